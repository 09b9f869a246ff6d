"""Optimizer, average, compiled layers and saves on shards of two processes, beside the same on whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import in_ranks
from tests.training.shards import MODES, bf16_weights, main, round_stochastically
from tread.training.checkpoint import list_checkpoints, read_whole
from tread.training.parts import load_part

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote down."""
    folder = tmp_path_factory.mktemp("shards")
    in_ranks(main, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


def test_stochastic_rounding_does_not_depend_on_the_shards(ranks: list[dict[str, Any]]) -> None:
    """Bit for bit, also where the rows do not divide by the processes."""
    alone = round_stochastically(bf16_weights())
    for rank in ranks:
        assert len(rank["rounded"]) == len(alone)
        assert all(torch.equal(one, other) for one, other in zip(alone, rank["rounded"], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_gather_their_weights(ranks: list[dict[str, Any]], mode: str) -> None:
    """Gradients are those of eager layers, and the layers were compiled: for two lengths."""
    gradients, graphs = ranks[0]["compiled"][mode]
    assert graphs == (0 if mode == "eager" else 2)
    for eager, gradient in zip(ranks[0]["compiled"]["eager"][0], gradients, strict=True):
        torch.testing.assert_close(gradient, eager, rtol=1e-5, atol=1e-6)


def test_the_average_is_swapped_in_and_out(ranks: list[dict[str, Any]]) -> None:
    before = [parameter.detach() for parameter in bf16_weights().float().parameters()]
    for rank in ranks:
        inside, after = rank["averaged"]
        for weight, average, restored in zip(before, inside, after, strict=True):
            torch.testing.assert_close(average, weight + 0.5)
            torch.testing.assert_close(restored, weight + 1)


def test_a_save_is_of_its_step_whatever_training_does_meanwhile(folder: Path) -> None:
    for path, value in zip(list_checkpoints(folder / "saves"), (1, 3), strict=True):
        assert read_whole(path)["step"] == value
        assert torch.equal(load_part(path, "model")["weight"], torch.full((64, 64), float(value)))


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing(
    folder: Path, ranks: list[dict[str, Any]]
) -> None:
    """Earlier checkpoints are untouched, and a later save works."""
    for rank in ranks:
        (error,) = rank["errors"]
        assert error.startswith("CheckpointError: cannot write the checkpoint")
        assert "(on rank 1). Earlier checkpoints are untouched" in error
    assert sorted(path.name for path in (folder / "saves").iterdir()) == ["step-00000001", "step-00000003"]
