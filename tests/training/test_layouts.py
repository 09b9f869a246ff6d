"""DDP, FSDP and HSDP on several processes: the training of one process, and checkpoints that each reads of the others.

The runs of one number of processes share their start: tests/training/layouts.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.forks import in_ranks
from tests.pretrain.corner import corner
from tests.tiny.runs import assert_same_state, final_state, forget, metrics
from tests.training.conftest import use_cpu
from tests.training.layouts import ALONE, CONVERTED, RUNS, convert, main, train_in
from tread.evaluate.features import FEATURES
from tread.pretrain.sample import open_run
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints, read_whole
from tread.training.parts import load_part

Alone = Callable[[str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The run of one process with the settings of a layout, and what its micro-steps saw."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def find(layout: str) -> tuple[Path, list[dict[str, Any]]]:
        name = layout if layout in ALONE else "alone"
        if name not in done:
            with pytest.MonkeyPatch.context() as patch:
                use_cpu(patch)
                patch.setitem(FEATURES, "corner", corner)
                forget()
                folder = tmp_path_factory.mktemp("alone") / name
                done[name] = folder, train_in(folder, *ALONE.get(layout, []))
        return done[name]

    return find


def launch(folder: Path, alone: Alone, names: list[str], processes: int) -> Path:
    (folder / "alone").symlink_to(alone("ddp")[0])
    in_ranks(main, names, folder, processes=processes)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Path:
    """The runs of two processes."""
    return launch(tmp_path_factory.mktemp("two"), alone, list(RUNS), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Path:
    """Runs of four processes; hsdp-2 is two groups of two."""
    return launch(tmp_path_factory.mktemp("four"), alone, ["ddp", "fsdp", "hsdp-2", "micro"], 4)


def assert_trains_as_one(folder: Path, layout: str, processes: int, alone: Alone) -> None:
    one, seen = alone(layout)
    ranks = [json.loads((folder / layout / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    for micro_step, expected in enumerate(seen):
        for what in ("positions", "selections"):
            parts = [rank[micro_step][what] for rank in ranks]
            assert [row for part in parts for row in part] == expected[what]
        # the load is balanced: as many samples, as many tokens
        assert (
            len({(len(rank[micro_step]["selections"]), len(rank[micro_step]["selections"][0])) for rank in ranks}) == 1
        )
    rounding = {"bf16": 2e-2, "evaluated": 1e-2}.get(layout, 1e-5)  # a pixel may round the other way
    lines = metrics(one)
    assert len(lines) == 6
    for line, other in zip(lines, metrics(folder / layout), strict=True):
        assert other == pytest.approx(line, rel=rounding)


@pytest.mark.parametrize("layout", RUNS)
def test_two_processes_train_as_one(two: Path, layout: str, alone: Alone) -> None:
    """The same samples and selections for the same batch, and losses, norms and averages that agree to rounding."""
    assert_trains_as_one(two, layout, 2, alone)


@pytest.mark.contract
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp-2", "micro"])
def test_four_processes_train_as_one(four: Path, layout: str, alone: Alone) -> None:
    assert_trains_as_one(four, layout, 4, alone)


@pytest.mark.parametrize(("source", "layout"), CONVERTED)
def test_a_checkpoint_is_the_same_in_every_layout(two: Path, source: str, layout: str) -> None:
    """Bit for bit, after a load and a save there: weights, average and moments."""
    assert_same_state(final_state(two / source), final_state(two / f"{source}-to-{layout}"))


@pytest.mark.contract
@pytest.mark.parametrize(("source", "layout"), CONVERTED)
def test_and_on_four_processes(four: Path, source: str, layout: str) -> None:
    assert_same_state(final_state(four / source), final_state(four / f"{source}-to-{layout}"))


@pytest.mark.parametrize("settings", [[], ["train.parallel=fsdp"]])
def test_one_process_reads_the_shards_of_two(two: Path, tmp_path: Path, settings: list[str]) -> None:
    convert(two / "hsdp-2", tmp_path / "run", *settings)
    assert_same_state(final_state(two / "hsdp-2"), final_state(tmp_path / "run"))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_a_run_goes_on_in_another_layout(two: Path, tmp_path: Path, alone: Alone) -> None:
    """One process continues from the shards of two."""
    settings = ["train.parallel=ddp", f"resume={two / 'fsdp'}", "train.steps=6"]
    train_in(tmp_path / "on", *settings)
    straight = tmp_path / "straight"
    train_in(straight, "train.steps=6")
    for line, other in zip(metrics(straight)[-3:], metrics(tmp_path / "on"), strict=True):
        assert other == pytest.approx(line, rel=1e-5)


def test_shards_are_whole_files_with_a_manifest(two: Path) -> None:
    paths = list_checkpoints(two / "fsdp" / CHECKPOINTS)
    assert [path.name for path in paths] == ["step-00000002", "step-00000004"]
    for path in paths:
        manifest = read_whole(path)
        assert len(manifest["files"]) == 2
        assert manifest["checksums"].keys() == manifest["files"].keys()
        assert sorted(manifest["parts"]) == ["ema", "model", "optimizer"]


def test_the_first_checkpoint_has_the_weights_of_its_step(two: Path, alone: Alone) -> None:
    """It is written while training goes on."""
    first = list_checkpoints(two / "fsdp" / CHECKPOINTS)[0]
    other = list_checkpoints(alone("ddp")[0] / CHECKPOINTS)[0]
    for part in ("model", "ema"):
        for name, tensor in load_part(other, part).items():
            torch.testing.assert_close(load_part(first, part)[name], tensor, rtol=1e-4, atol=1e-6)


def test_samples_are_drawn_from_shards(two: Path) -> None:
    """By `tread sample` and the previews of the run."""
    opened = open_run(two / "fsdp", device=torch.device("cpu"))
    averaged = final_state(two / "fsdp")["ema"]
    assert all(torch.equal(parameter, averaged[name]) for name, parameter in opened.model.named_parameters())
    assert (two / "fsdp" / "samples" / "step-00000004.png").is_file()
