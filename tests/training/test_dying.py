"""Processes that end in the middle of a run: the others end too, and torchrun's restart goes on from the checkpoint."""

import subprocess
from pathlib import Path

import pytest

from tests.programs import PROCESSES, finished
from tests.tiny.runs import TINY, metrics, train
from tread.training.checkpoint import list_checkpoints, read_whole
from tread.training.loop import CHECKPOINTS

SETTINGS = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=10"]
LOST = "tread train: another process of this run has ended, so this one ends too"


def launched(how: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """`tread train` by torchrun, which restarts it once where `settings` begin with an option that says so."""
    options = [setting for setting in settings if setting.startswith("--")]
    given = [*TINY, *SETTINGS, *(setting for setting in settings if setting not in options), f"output_dir={folder}"]
    program = [*PROCESSES, *options, "-m", "tests.training.dying", how, *given]
    return finished(*program, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.contract), "fsdp"])
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path, layout: str) -> None:
    """The processes are given the same command again, and go on instead of refusing the folder."""
    folder = tmp_path / "run"
    done = launched("killed", folder, "--max-restarts=1", f"train.parallel={layout}")
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    straight = train(tmp_path / "straight", *SETTINGS)
    for line, other in zip(metrics(straight), metrics(folder), strict=True):
        assert other == pytest.approx(line, rel=1e-5)
    paths = list_checkpoints(folder / CHECKPOINTS)
    assert paths[-1].name == "step-00000006"
    assert all(read_whole(path) for path in paths)


def test_an_error_on_one_rank_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    """Each says one sentence, and the last checkpoint of the shards is whole."""
    folder = tmp_path / "run"
    done = launched("failed", folder, "train.parallel=fsdp")
    assert done.returncode != 0
    assert "tread train: the disk of rank 1 is gone." in done.stderr
    assert LOST in done.stderr
    assert "an error stopped the run; continue from its last checkpoint with: tread train resume=" in done.stdout
    assert [path.name for path in list_checkpoints(folder / CHECKPOINTS)] == ["step-00000002", "step-00000004"]
