"""A run by CUDA graphs is the run without them, step by step: the same losses, selections and weights."""

import json
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch

from tests.finetune.tasks import make_config
from tests.tiny.pictures import write_gradients
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.runs import forget, write_images
from tread.finetune.run import finetune
from tread.kernels import graphs
from tread.models import DiT
from tread.pretrain.config import compose
from tread.pretrain.run import pretrain
from tread.training.checkpoint import CHECKPOINTS, newest
from tread.training.metrics import read_metrics
from tread.training.parts import load_part

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}
PLANS = {
    "one ratio": {"routes": [ROUTE]},
    "levels": {"routes": [ROUTE], "schedule": {"warmup_steps": 8, "levels": 2}},
    "l1": {"routes": [ROUTE], "selector": "l1", "importance": 0.5},
}


def pretrained(folder: Path, *settings: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    images = write_images(folder / "images", "a", "b", count=4, size=16)
    forget()
    pretrain(
        compose(
            [
                *["data=images", f"data.path={images}", "data.size=16", f"output_dir={folder}"],
                *["model=tread", "model.depth=5", "model.width=32", "model.heads=4", "train.batch_size=6"],
                *["train.steps=16", "validation.every=5", "validation.samples=2", "sample.every=0"],
                *["log.trackers=none", *settings],
            ]
        )
    )
    found = newest(folder / CHECKPOINTS, print)
    assert found is not None
    losses = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    return losses, load_part(found[0], "model")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "settings",
    [
        ("train.compile=false",),
        ("train.compile=true",),
        ("train.compile=false", "train.micro_steps=3"),
        ("train.compile=true", "train.checkpointing=selective"),
    ],
    ids=["eager", "compiled", "micro-steps", "selective"],
)
def test_pretraining_is_the_same(plan: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    replays = []
    run = graphs.Graphs._capture

    def capture(self: Any, *args: Any) -> Any:
        replays.append(args)
        return run(self, *args)

    monkeypatch.setattr(graphs.Graphs, "_capture", capture)
    routes = "model.tread_config=" + json.dumps(PLANS[plan])
    plain = pretrained(tmp_path / "plain", routes, *settings)
    assert not replays
    graphed = pretrained(tmp_path / "graphed", routes, "train.graphs=true", *settings)
    assert len(replays) == {"levels": 3}.get(plan, 1), said  # the levels' two ratios and the full one
    assert graphed[0] == pytest.approx(plain[0], rel=1e-5)
    for name, weight in plain[1].items():
        assert torch.allclose(graphed[1][name], weight, rtol=1e-4, atol=1e-6), name


def test_selections_follow_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DiT(input_size=8, patch=1, in_channels=1, depth=4, width=32, heads=2, num_classes=3).cuda().train()
    handle = model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}]})
    network = graphs.Graphs(model, [handle])
    given = torch.randn(2, 1, 8, 8, device="cuda"), torch.rand(2, device="cuda"), torch.tensor([0, 1], device="cuda")

    def selected(call: Any, step: int) -> list[torch.Tensor]:
        handle.set_step(step)
        found = []
        for _ in range(2):  # two micro-steps
            call(*given).mean().backward()
            found.append(handle.selections[0].clone())
        return found

    seen = [selected(network, step) for step in range(6)]
    assert network.count
    for step, both in enumerate(seen):
        for one, other in zip(both, selected(model, step), strict=True):
            assert one.equal(other), step
    assert not seen[4][0].equal(seen[5][0])
    assert not seen[5][0].equal(seen[5][1])


def test_a_lora_is_the_same(tmp_path: Path, pipeline_folder: PipelineFolder) -> None:
    images = write_gradients(tmp_path / "images", masked=False)
    losses = []
    for name in ("plain", "graphs"):
        forget()
        config = make_config(
            pipeline_folder("flux"),
            images,
            output_dir=str(tmp_path / name),
            max_train_steps=10,
            compile=False,
            graphs=name == "graphs",
            report_to="none",
        )
        losses.append([line["loss"] for line in read_metrics(finetune(config)) if "loss" in line])
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_forwards_before_a_backward() -> None:
    """Graphs share their memory: the second forward must not write over what the first one's backward reads."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    network = graphs.Graphs(model, [])
    first, second = (torch.randn(size, 8, device="cuda") for size in (4, 6))

    def gradients(call: Any) -> list[torch.Tensor]:
        loss = call(first).square().sum() + call(second).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for _ in range(6):
        for x in (first, second):
            network(x).sum().backward()
    assert network.count == 2
    for found, expected in zip(gradients(network), gradients(model), strict=True):
        torch.testing.assert_close(found, expected)


def same_gradients(model: torch.nn.Module, network: graphs.Graphs, x: torch.Tensor) -> None:
    """The next call by `network`, and its backward outside autocast, equals the model's own."""

    def gradients(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(x).float().square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for found, expected in zip(gradients(network), gradients(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)  # bf16 would be off by ten times as much


def runs_the_same(model: torch.nn.Module) -> None:
    """Before it is captured, and by its graphs."""
    network, x = graphs.Graphs(model, []), torch.randn(32, 64, device="cuda")
    for _ in range(graphs.CALLS + 2):
        same_gradients(model, network, x)
    assert network.count


def test_the_backward_runs_outside_autocast() -> None:
    class Exact(torch.nn.Module):
        """Has a product in float32, which autocast would round in the backward."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", enabled=False):
                x = self.first(x)
            return self.second(x)

    torch.manual_seed(0)
    runs_the_same(Exact().cuda())


def test_dropout_draws_what_it_would() -> None:
    torch.manual_seed(0)
    runs_the_same(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64)).cuda())


def test_casts_of_an_earlier_forward_are_not_read() -> None:
    """Autocast remembers them until it ends: a graph that read them would read memory that others use by then."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda()
    network, x = graphs.Graphs(model, []), torch.randn(32, 256, device="cuda")
    for _ in range(graphs.CALLS + 1):
        with torch.autocast("cuda", torch.bfloat16):
            model(x)
            network(x).sum().backward()
    assert network.count
    with torch.no_grad():
        model.weight.add_(1)
    same_gradients(model, network, x)


def test_weights_may_move() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).cuda()
    network, x = graphs.Graphs(model, []), torch.randn(32, 64, device="cuda")
    for _ in range(2):
        for _ in range(graphs.CALLS + 2):
            same_gradients(model, network, x)
        assert network.count == 1
        model.cpu().cuda()
        with torch.no_grad():
            model.weight.mul_(2)
        torch.full((64, 64), torch.nan, device="cuda")  # where the weight was, perhaps


def test_what_cannot_be_captured_runs_without_under_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    """The casts of weights that were recorded, and so never computed, are not used by the forward that follows."""

    class Waits(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            x = self[0](x)
            return self[1](x * float((x * 0).sum() + 1))

    torch.manual_seed(0)
    model = Waits(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
    network, x = graphs.Graphs(model, []), torch.randn(32, 64, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(graphs.CALLS + 2):
        same_gradients(model, network, x)
    assert "CUDA graph capture failed" in capsys.readouterr().out
    assert torch.cuda.current_stream() == stream


def test_a_failure_leaves_other_models_their_graphs() -> None:
    """They share a memory pool, in which a failed recording must not stay."""

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x) * float(x.sum() * 0 + 1)

    torch.manual_seed(0)
    models = [kind(64, 64).cuda() for kind in (torch.nn.Linear, Waits, torch.nn.Linear)]
    networks = [graphs.Graphs(model, []) for model in models]
    for model, network in zip(models, networks, strict=True):
        for size in (16, 32):
            for _ in range(graphs.CALLS + 2):
                same_gradients(model, network, torch.randn(size, 64, device="cuda"))
    assert [network.count for network in networks] == [2, 0, 2]


def test_graphs_share_their_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).cuda()
    network = graphs.Graphs(model, [])
    inputs = [torch.randn(size, 64, device="cuda") for size in (16, 32, 48)]
    for _ in range(graphs.CALLS + 3):
        for x in inputs:
            same_gradients(model, network, x)
    places = {
        tuple(g.data_ptr() for g in capture.gradients if g is not None) for capture, _ in network._captured.values()
    }
    assert network.count == 3
    assert len(places) == 1


def test_a_loop_may_keep_its_last_loss() -> None:
    """As plain loops do: the loss, with all that autograd knows of it, lives until the next one replaces it."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64).cuda(), torch.randn(32, 64, device="cuda")
    network = graphs.Graphs(model, [])
    for _ in range(graphs.CALLS + 2):
        loss = network(x).square().sum()
        loss.backward()
    assert network.count == 1
    same_gradients(model, network, x)


def test_numbers_from_the_host_are_constants() -> None:
    """Stock models make tensors of Python's numbers on the device, as Qwen-Image does of its prompt's length."""

    class Counts(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            weights = torch.tensor([0.5, float(len(x))], device=x.device)
            return super().forward(x) * weights.sum() + torch.as_tensor(len(x), device=x.device)

    torch.manual_seed(0)
    model = Counts(64, 64).cuda()
    runs_the_same(model)
    network = graphs.Graphs(model, [])
    for _ in range(graphs.CALLS + 3):
        for size in (16, 32):
            same_gradients(model, network, torch.randn(size, 64, device="cuda"))
        torch.full((999, 99), torch.nan, device="cuda")  # where a constant was, if it was not kept
    assert network.count == 2
    assert isinstance(torch.tensor, BuiltinFunctionType), "restored"


def test_plain_values_among_the_outputs() -> None:
    class Beside(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None, super().forward(x), len(x)

    torch.manual_seed(0)
    model = Beside(64, 64).cuda()
    network = graphs.Graphs(model, [])
    for _ in range(graphs.CALLS + 2):
        x = torch.randn(16, 64, device="cuda")
        found, direct = (one(x) for one in (network, model))
        assert (found[0], found[2]) == (None, 16)
        assert found[1].equal(direct[1])
        found[1].sum().backward()
    assert network.count == 1


def test_what_cannot_be_captured_runs_without(capsys: pytest.CaptureFixture[str]) -> None:
    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return torch.nn.functional.dropout(super().forward(x), 0.0) * float(x.sum() * 0 + 2)

    model = Waits(4, 4).cuda()
    network = graphs.Graphs(model, [])
    x = torch.randn(2, 4, device="cuda")
    for _ in range(6):
        assert network(x).equal(model(x))
    assert "CUDA graph capture failed; continuing without graphs" in capsys.readouterr().out
    assert torch.ones(2, device="cuda").sum() == 2, "the device works on"
    assert torch.nn.functional.dropout(torch.ones(999, device="cuda")).any(), "and so do its random numbers"
