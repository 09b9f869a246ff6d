"""Processes that end in the middle of a run, or never answer: the others end too, and torchrun's restart goes on."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import PROCESSES, environment, finished
from tests.tiny.runs import TINY, metrics, train
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints, read_whole

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


@pytest.mark.contract  # it waits for the timeout
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path: Path, layout: str) -> None:
    done = launched("hung", tmp_path / "run", f"train.parallel={layout}", "train.timeout_minutes=0.2")
    assert done.returncode != 0
    assert "tread train: another process of this run has not answered for 0.2 minutes (train.timeout" in done.stderr
    assert [path.name for path in list_checkpoints(tmp_path / "run" / CHECKPOINTS)][-1] == "step-00000004"


@pytest.mark.parametrize(
    ("job", "rank"),
    [
        ("train", "0"),
        pytest.param("train", "1", marks=pytest.mark.contract),
        pytest.param("finetune", "0", marks=pytest.mark.contract),
        pytest.param("finetune", "1", marks=pytest.mark.contract),
    ],
)
def test_a_rank_that_never_arrives_is_not_waited_for(
    job: str, rank: str, tmp_path: Path, pipeline_folder: Callable[[str], Path]
) -> None:
    """One process of two is started, first or second; without the setting it would wait for half an hour."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if job == "train":
        settings, name = [*TINY, f"output_dir={tmp_path / 'run'}"], "train.timeout_minutes"
    else:
        config = tmp_path / "config.yaml"
        config.write_text(f"model_family: flux\npretrained_model_name_or_path: {pipeline_folder('flux')}\ndata: data\n")
        settings, name = [str(config), f"output_dir={tmp_path / 'run'}"], "timeout_minutes"
    done = subprocess.run(
        [sys.executable, "-m", "tread", job, *settings, f"{name}=0.05"],
        env=environment(**alone, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=300,  # of a test that fails
    )
    assert done.returncode == 2
    said = f"tread {job}: not all 2 processes of this run met at 127.0.0.1 within 0.05 minutes ({name}): see the output"
    assert said in done.stderr
    assert "Traceback" not in done.stderr
