"""Two processes: the same training as one, to rounding, and the same weights on both."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from torch import distributed

from tests.forks import in_ranks
from tests.programs import ROOT, environment, finished
from tests.tiny.runs import TINY, final_state, forget, metrics, train, write_images
from tests.training.ranks import main
from tread.cli import main as cli
from tread.data.images import ImageFolder
from tread.data.order import Order, split
from tread.data.readable import FEW
from tread.errors import ConfigError, RankLost
from tread.pretrain import task as pretraining
from tread.pretrain.config import compose
from tread.pretrain.run import pretrain
from tread.pretrain.task import Pretraining
from tread.together import together
from tread.training import job
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.job import make_accelerator
from tread.training.loop import fit
from tread.training.ranks import lost_ranks
from tread.training.session import Session

LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
# validation.samples is odd and smaller than a micro-batch: the ranks share it unevenly
SETTINGS = ["train.steps=5", "train.class_dropout=0.3", "validation.samples=5", "validation.every=5"]


def launched(*program: object) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with two processes on this machine's CPU."""
    return finished(*LAUNCH, *program, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")


def launch(*program: object) -> str:
    """What it prints, where it succeeds."""
    done = launched(*program)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run on two processes and what each rank wrote down."""
    folder = tmp_path_factory.mktemp("ranks") / "two"
    in_ranks(main, [*TINY, *SETTINGS, f"output_dir={folder}"])
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    forget()
    return train(tmp_path_factory.mktemp("ranks") / "one", *SETTINGS)


def test_two_processes_train_as_one(both: tuple[Path, list[dict[str, Any]]], alone: Path) -> None:
    folder, ranks = both
    assert [rank["world"] for rank in ranks] == [2, 2]
    one, two = metrics(alone), metrics(folder)
    assert len(one) == len(two) == 6
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5)
    for name, tensor in final_state(alone)["model"].items():
        torch.testing.assert_close(final_state(folder)["model"][name], tensor, rtol=1e-3, atol=1e-5)


def test_weights_and_average_are_identical_on_both(both: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = both
    for what in ("model", "ema", "val_loss"):
        assert ranks[0][what] == ranks[1][what], what


def test_gradients_are_kept_once(both: tuple[Path, list[dict[str, Any]]]) -> None:
    """Not beside the buckets that are exchanged."""
    _, ranks = both
    assert [rank["gradients kept once"] for rank in ranks] == [True, True]


def test_the_average_starts_from_the_synchronised_weights(both: tuple[Path, list[dict[str, Any]]]) -> None:
    """The EMA is not copied before the weights are synchronised across ranks."""
    _, ranks = both
    assert ranks[0]["before"] != ranks[1]["before"]
    assert ranks[0]["ema at start"] == ranks[1]["ema at start"] == ranks[0]["before"]


def test_the_ranks_select_different_tokens_and_together_those_of_one_process(
    both: tuple[Path, list[dict[str, Any]]], alone: Path
) -> None:
    """Every rank does not draw the same masks."""
    _, ranks = both
    assert ranks[0]["selection"] != ranks[1]["selection"]
    config = compose([*TINY, *SETTINGS, f"output_dir={alone}"])
    task = Pretraining(config, Accelerator(cpu=True), alone)
    assert task.handle is not None
    task.handle.set_step(4)
    task.loss(task.model, next(task.batches(4)))
    assert ranks[0]["selection"] + ranks[1]["selection"] == task.handle.selections[0].tolist()


def needed_in_the_third_step(rank: int) -> tuple[int, list[int]]:
    """A seed, and more of 120 samples, 4 held out, than can be left out; a rank meets them in the third step of 4."""
    for seed in range(100):
        train, _ = split(120, 4, seed)
        visited = Order(len(train), seed).indices(torch.arange(12)).tolist()
        sample = visited.pop(8 + 2 * rank)
        broken = [place % len(train) for place in range(sample, sample + FEW + 1)]
        if not {*visited} & {*broken}:
            return seed, train[broken].tolist()
    raise AssertionError("no such seed")


@pytest.mark.contract  # tests/training/test_dying.py has one rank of it
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_both_and_costs_no_step(tmp_path: Path, rank: int) -> None:
    data = write_images(tmp_path / "data", "a", "b", count=60, size=8)
    folder = tmp_path / "run"
    seed, broken = needed_in_the_third_step(rank)
    settings = ["data=images", f"data.path={data}", "data.size=8", "train.batch_size=4", "validation.samples=4"]
    settings.append(f"train.seed={seed}")
    for index in broken:
        (data / ImageFolder(data, size=8).files[index]).write_bytes(b"")
    process = launched(ROOT / "train.py", *TINY, *settings, "train.steps=4", f"output_dir={folder}")
    assert process.returncode != 0
    assert f"tread train: {FEW + 1} of 116 samples cannot be read, the last: cannot read" in process.stderr
    assert process.stdout.count("step 2 is saved, continue with") == 1
    assert [path.name for path in list_checkpoints(folder / CHECKPOINTS)] == ["step-00000002"]


BROKEN = {
    "folder": "tread.training.job.sweep",
    "own folder": "tread.training.job.make_folder",
    "session": "tread.training.session.EMA",
    "tracker": "tread.training.job._start_tracker",
    "metrics": "tread.training.loop.Metrics",
    "validating": "tread.pretrain.task.Pretraining.validation_losses",
    "drawing": "tread.pretrain.task.make_grid",
    "result": "tread.pretrain.task.Pretraining.saved",
}
"""Where a rank fails -> the call that does."""


def fail_on(rank: int, where: str, layout: str, folder: Path) -> None:
    """A rank meets a full disk, and lives on until the other one has ended its wait for it, or for ten seconds."""
    settings = ["log.trackers=tensorboard", "train.steps=1", "validation.samples=8", f"output_dir={folder / 'run'}"]
    every = {"validating": "validation.every=1", "drawing": "sample.every=1"}.get(where, "validation.every=0")
    config = compose([*TINY, *settings, every, f"train.parallel={layout}", "train.timeout_minutes=0.5"])
    accelerator, full = make_accelerator(config), OSError(errno.ENOSPC, "No space left on device")
    task = Pretraining(config, accelerator, folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RankLost)) as error:
        if accelerator.process_index == rank:
            patch.setattr(BROKEN[where], Mock(side_effect=full))
        if "folder" in where:
            with job.claimed_folder(config, accelerator):
                pass
        elif where == "tracker":
            (folder / "run").mkdir(exist_ok=True)
            job.run(task, config, accelerator, folder / "run", {})
        elif where == "result":
            Session(task, config, accelerator).save(folder / CHECKPOINTS, 0)
        else:
            fit(Session(task, config, accelerator), folder, start=0)
    if accelerator.process_index == rank:
        wait_for(folder / f"rank-{1 - rank}")
    (folder / f"rank-{accelerator.process_index}").write_text(f"{time.time()} {error.value}")
    os._exit(0)


CASES = [
    *[
        (0, "folder", "ddp"),
        (1, "own folder", "ddp"),
        (0, "tracker", "ddp"),
        (0, "result", "ddp"),
        (0, "metrics", "ddp"),
        (1, "session", "fsdp"),
    ],
    *[(0, "drawing", "ddp"), (0, "validating", "ddp"), (1, "validating", "ddp"), (0, "drawing", "fsdp")],
]


@pytest.mark.parametrize(("rank", "where", "layout"), CASES)
def test_an_error_of_one_rank_is_told_to_the_other(tmp_path: Path, rank: int, where: str, layout: str) -> None:
    """It would wait for it until its timeout."""
    in_ranks(fail_on, rank, where, layout, tmp_path)
    said = [(tmp_path / f"rank-{number}").read_text().split(" ", 1) for number in (rank, 1 - rank)]
    assert said[0][1] == "[Errno 28] No space left on device"
    assert said[1][1] == f"process {rank} of this run has ended, so this one ends too: {said[0][1]}"
    assert said[1][0] < said[0][0], "the one that failed ended first"


def wait_for(path: Path) -> bool:
    """Whether another rank writes a file within ten seconds."""
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


def fail_early(folder: Path) -> None:
    """Rank 0 fails, and ends, while rank 1 is long in its own work."""
    rank = Accelerator(cpu=True).process_index
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RankLost)), lost_ranks(), together():
        patch.setattr("tread.together.PATIENCE", 0.2)
        if rank == 0:
            raise OSError("no such weights")
        assert wait_for(folder / "ended")
    if rank == 0:
        distributed.destroy_process_group()  # as at the end of a program
        (folder / "ended").touch()
    os._exit(0)


def test_an_error_is_not_kept_back_until_the_others_have_done_their_own_work(tmp_path: Path) -> None:
    """Which may be hours of encoding."""
    in_ranks(fail_early, tmp_path)


def fail_before_shards(folder: Path) -> None:
    """Rank 1 cannot read its data, and lives on until rank 0 has ended."""
    config = compose([*TINY, "train.parallel=hsdp", "train.shard_size=1", f"output_dir={folder}"])
    accelerator = make_accelerator(config)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RankLost)):
        if accelerator.process_index == 1:
            patch.setattr(pretraining, "build_dataset", Mock(side_effect=OSError("no such disk")))
        Pretraining(config, accelerator, folder)
    assert accelerator.process_index == 0 or wait_for(folder / "ended")
    (folder / "ended").touch()
    os._exit(0)


def test_data_that_one_rank_cannot_read_ends_the_other_before_it_opens_process_groups(tmp_path: Path) -> None:
    in_ranks(fail_before_shards, tmp_path)


def end_in_report(folder: Path) -> None:
    """Rank 0 ends while it writes the report of a run."""
    config = compose([*TINY, "train.steps=1", f"output_dir={folder / 'run'}"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankLost, match="has ended, so this one ends too"):
        patch.setattr("tread.page.write.page", lambda *_: os._exit(0))
        pretrain(config)
    os._exit(0)


def test_a_rank_that_ends_after_the_last_step_ends_the_other_with_a_sentence(tmp_path: Path) -> None:
    in_ranks(end_in_report, tmp_path)


def train_on_own_data(folder: Path) -> None:
    """Each rank has another folder of images."""
    data = folder / f"data-{os.environ['RANK']}"
    settings = [
        "data=images",
        f"data.path={data}",
        "data.size=8",
        "validation.samples=2",
        f"output_dir={folder / 'run'}",
    ]
    message = (
        "the data of process 1 of this run is not that of process 0: 'b' has 3 files instead of 5. Give all machines"
    )
    with pytest.raises(ConfigError, match=message):
        pretrain(compose([*TINY, *settings]))
    os._exit(0)


def test_ranks_that_have_other_data_are_refused(tmp_path: Path) -> None:
    """Each would draw its part of a batch from samples of its own."""
    for rank, count in enumerate((5, 3)):
        write_images(tmp_path / f"data-{rank}", "a", count=5, size=8)
        write_images(tmp_path / f"data-{rank}", "b", count=count, size=8)
    in_ranks(train_on_own_data, tmp_path)


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": None}, "RANK is not set"),  # accelerate would take 0 on each, and wait for the other
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),  # on GPUs each would train alone
        ({"MASTER_ADDR": None, "MASTER_PORT": "port"}, "MASTER_ADDR is not set, MASTER_PORT is 'port'"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ],
)
def test_variables_of_a_launcher_that_do_not_fit_are_refused(
    changes: dict[str, str | None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    said = f"this process was launched as one of several, but {said}: start it with torchrun"
    with pytest.raises(ConfigError, match=f"^{said}"):
        make_accelerator(compose([*TINY, f"output_dir={tmp_path}"]))
    with pytest.raises(SystemExit):
        cli(["eval", str(tmp_path), "--ref", str(tmp_path), "--device", "cpu"])
    assert f"tread eval: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.contract)])
def test_a_signal_to_one_rank_saves_and_ends_both_with_its_number(tmp_path: Path, layout: str) -> None:
    """They agree after every step, not only where they write metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    settings = [*TINY, "train.steps=1000000", "checkpoint.every=5", "log.every=1000000", f"train.parallel={layout}"]
    settings.append(f"output_dir={tmp_path / 'run'}")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *settings],
            env=environment(**common, RANK=rank, LOCAL_RANK=rank, CUDA_VISIBLE_DEVICES=""),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in "01"
    ]
    while not list_checkpoints(tmp_path / "run" / CHECKPOINTS):
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGUSR1)
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [128 + signal.SIGUSR1] * 2
    assert "continue with: tread train resume=" in said[0]


@pytest.mark.slow
def test_the_documented_command_and_a_resume_on_another_number_of_processes(tmp_path: Path) -> None:
    """`accelerate launch train.py` on two processes goes on from a checkpoint of one.

    With one held-out sample, one of the ranks has nothing to validate.
    """
    validation = ["validation.every=4", "validation.samples=1"]
    straight = train(tmp_path / "straight", *validation, "train.steps=4")
    folder = train(tmp_path / "run", *validation, "train.steps=2", "validation.every=0")
    said = launch(ROOT / "train.py", *TINY, f"output_dir={folder}", "resume=latest", "train.steps=4", *validation)
    assert "2 processes on cpu" in said
    assert said.count(f"resumed from {folder}/checkpoints/step-00000002") == 1
    for line, other in zip(metrics(straight), metrics(folder), strict=True):
        assert other == pytest.approx(line, rel=1e-5)
