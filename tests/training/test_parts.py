"""The parts of a checkpoint: into a model and an optimizer exactly, or refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tread.errors import CheckpointError, ConfigError
from tread.training.checkpoint import save
from tread.training.parts import load_into, load_optimizer, load_part, optimizer_tensors, trained


def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model: nn.Module, optimizer: torch.optim.AdamW, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = make()
    steps(straight, optimizer, 0, 5)
    tensors = {"model": straight.state_dict(), "optimizer": optimizer_tensors(optimizer)}
    path = save(tmp_path, 5, tensors, {}, keep=1)
    steps(straight, optimizer, 5, 9)

    resumed, other = make()
    load_into(trained(resumed), path, "model")
    load_optimizer(other, load_part(path, "optimizer"), path)
    steps(resumed, other, 5, 9)
    for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_hyper_parameters_stay_as_configured_now(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, eps=1e-8)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(model.parameters(), lr=0.25, eps=1e-6)
    load_optimizer(other, optimizer_tensors(optimizer), tmp_path)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["eps"]) == (0.25, 1e-6)
    assert other.state_dict()["state"][0]["step"] == 1


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model": nn.Linear(2, 1).state_dict()}, {}, keep=1)
    with pytest.raises(CheckpointError, match=r"^cannot read .*/step-00000001/teacher\.safetensors: "):
        load_part(tmp_path / "step-00000001", "teacher")


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (nn.Linear(3, 3), "weight is (2, 3) there and (3, 3) here"),
        (nn.Linear(3, 2, bias=False), "bias is (2,) there and absent here"),
        (nn.Sequential(nn.Linear(3, 2)), "0.weight is absent there and (2, 3) here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    other: nn.Module, difference: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, {"model": nn.Linear(3, 2).state_dict()}, {}, keep=1)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ConfigError) as error:
        load_into(trained(other), path, "model")
    assert str(error.value) == (
        f"the checkpoint {path} is of another model: {difference}. Set the model and the data as in "
        "that run's config.yaml, or begin a run in another output_dir."
    )
    for one, two in zip(before, other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_optimizer_without_state_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters())
    with pytest.raises(CheckpointError, match=r"^the optimizer's state in .* is empty: "):
        load_optimizer(optimizer, {}, tmp_path)
