"""What a job does around the loop: whose folder it is, where a run goes on, which config is kept."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny.runs import go_on, losses, make_session, metrics, train, write_images
from tread.config.schema import plain
from tread.errors import CheckpointError, ConfigError
from tread.pretrain.config import compose, from_run
from tread.pretrain.task import Pretraining
from tread.training.checkpoint import CHECKPOINTS
from tread.training.job import LOCK_FILE, claimed_folder, locked, make_accelerator, run, saved_settings


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path: Path, trained: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*"))
    message = f"{trained} already holds a run: continue it with resume=latest, or name another output_dir."
    with pytest.raises(ConfigError) as error:
        train(trained, "train.steps=2")
    assert str(error.value) == message
    other = train(tmp_path / "other", "train.steps=2")
    with pytest.raises(ConfigError) as error:
        go_on(other, f"output_dir={trained}", "train.steps=4")
    assert str(error.value) == message
    assert sorted((path, path.stat().st_mtime_ns) for path in trained.rglob("*")) == before


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The first has no checkpoint yet: what the second wrote would be mixed with what it writes."""
    task, _ = make_session(tmp_path / "run")
    with claimed_folder(task.config, task.accelerator) as folder:
        for settings in ([], ["resume=latest"]):
            with pytest.raises(ConfigError) as error:
                train(folder, "train.steps=2", *settings)
            assert str(error.value) == (
                f"another job is training in {folder}: wait for its end, or name another output_dir."
            )
    assert len(losses(train(folder, "train.steps=2"))) == 2


def test_a_folder_is_free_when_its_job_ends(tmp_path: Path) -> None:
    """Processes that it forked may live on for a while, and must not hold it."""
    fcntl = pytest.importorskip("fcntl")

    def is_free() -> bool:
        with (tmp_path / "run" / LOCK_FILE).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    task, _ = make_session(tmp_path / "run")
    read, write = os.pipe()
    with claimed_folder(task.config, task.accelerator):
        if not (child := os.fork()):
            os.write(write, b"alive")
            while True:
                signal.pause()
        assert os.read(read, 5) == b"alive"
        held = not is_free()
    free = is_free()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (held, free) == (True, True)


def test_what_is_not_the_folder_of_a_run_is_not_resumed(tmp_path: Path, trained: Path) -> None:
    """Both jobs claim their folder so; the newest checkpoint's own folder is no run either."""
    task, _ = make_session(tmp_path / "run")
    for place in (tmp_path / "nowhere", next((trained / CHECKPOINTS).iterdir())):
        with (
            pytest.raises(ConfigError, match="is not the folder of a run"),
            claimed_folder(replace(task.config, resume=str(place)), task.accelerator),
        ):
            pass
    assert not (tmp_path / "run").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", ["run", "latest", "fork"])
def test_a_run_whose_checkpoints_are_all_broken_is_not_begun_anew(tmp_path: Path, resume: str) -> None:
    """By its folder, by `latest`, and into another folder; what can be mended is left as it is."""
    folder = train(tmp_path / "run", "train.steps=4", "checkpoint.every=2")
    for step in (2, 4):
        os.truncate(folder / CHECKPOINTS / f"step-{step:08d}" / "optimizer.safetensors", 100)
    before = contents(folder)
    settings = [f"output_dir={tmp_path}/fork"] if resume == "fork" else []
    with pytest.raises(CheckpointError) as error:
        if resume == "latest":
            train(folder, "resume=latest", "train.steps=8")
        else:
            go_on(folder, "train.steps=8", *settings)
    assert str(error.value).startswith(f"no checkpoint in {folder}/checkpoints is whole; nothing was changed")
    for step in (2, 4):
        assert f"step-{step:08d} is not whole: optimizer.safetensors has 100 of" in str(error.value)
    assert "ema.safetensors, model.safetensors may be whole" in str(error.value)
    assert contents(folder) == before
    assert not (tmp_path / "fork").exists()


@pytest.mark.parametrize("resume", ["run", "latest"])
def test_a_run_without_checkpoints_begins_where_it_is(
    tmp_path: Path, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped before its first one."""
    folder = train(tmp_path / "run", "train.steps=2")
    shutil.rmtree(folder / CHECKPOINTS)
    if resume == "latest":
        train(folder, "resume=latest", "train.steps=3")
    else:
        go_on(folder, "train.steps=3")
    assert f"no checkpoint in {folder}/checkpoints: the run starts at step 0." in capsys.readouterr().out
    assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == ["step-00000003"]


def test_a_first_start_says_nothing_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", "resume=latest", "train.steps=1")
    assert "no checkpoint" not in capsys.readouterr().out


def test_the_bar_says_what_the_run_is_doing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", "train.steps=2", "validation.every=1", "sample.every=2")
    said = capsys.readouterr().err
    assert [word for word in ("validating", "drawing", "saving", "compiling") if f"run, {word}: " in said] == [
        "validating",
        "drawing",
        "saving",
    ]
    assert "run: 100%" in said
    assert "img/s" in said


def test_a_checkpoint_that_a_kill_left_without_its_name_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that begins there is refused as where any other checkpoint lies."""
    folder = train(tmp_path / "run", "train.steps=2")
    (folder / CHECKPOINTS / "step-00000002").rename(folder / CHECKPOINTS / ".step-00000002.tmp")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(folder, "train.steps=2")
    (folder / CHECKPOINTS / "step-00000002").rename(folder / CHECKPOINTS / ".step-00000002.tmp")
    go_on(folder, "train.steps=3")
    assert f"resumed from {folder}/checkpoints/step-00000002" in capsys.readouterr().out


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """By the one that holds the folder, and by no other; files of the user's stay."""
    folder = train(tmp_path / "run", "train.steps=2")
    left = [folder / f".config.yaml.{'0' * 32}.tmp", folder / f".metrics.jsonl.{'f' * 32}.tmp"]
    half = folder / CHECKPOINTS / ".step-00000004.tmp"
    half.mkdir()
    for path in (*left, half / "model.safetensors", folder / ".mine.tmp"):
        path.write_bytes(b"half")
    with locked(folder / LOCK_FILE), pytest.raises(ConfigError, match="another job is training"):
        go_on(folder)
    assert all(path.exists() for path in (*left, half))
    go_on(folder)  # it has nothing left to do
    assert [path for path in (*left, half) if path.exists()] == []
    assert (folder / ".mine.tmp").exists()


def test_a_run_that_has_nothing_left_to_do_keeps_its_config(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "config.yaml").read_bytes()
    go_on(trained, "train.steps=2")
    assert "the run is at step 6 already; raise train.steps to train on." in capsys.readouterr().out
    assert (trained / "config.yaml").read_bytes() == before


def test_a_run_can_be_continued_in_a_new_folder(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    fork = go_on(trained, f"output_dir={tmp_path}/fork", "train.steps=8")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    assert told == ["changed since the run was started: train.steps: 6 -> 8"]
    assert [line["step"] for line in metrics(fork) if "loss" in line] == [7, 8]
    assert [path.name for path in (fork / CHECKPOINTS).iterdir()] == ["step-00000008"]
    assert len(losses(trained)) == 6


def test_a_run_that_has_nothing_left_to_do_is_not_continued_in_a_new_folder(tmp_path: Path, trained: Path) -> None:
    """Nothing would be written there, and its end would name a result and a report that do not exist."""
    with pytest.raises(ConfigError) as error:
        go_on(trained, f"output_dir={tmp_path}/fork")
    assert str(error.value) == (
        f"{trained} is at step 6 already, and train.steps is 6, so there is nothing to train in {tmp_path}/fork: raise "
        "train.steps."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.width=32", "model.width is 32, but the weights in"),
        ("train.micro_steps=3", "train.batch_size is 8; it must be a multiple of 3"),
        ("data=images", "no image folder at nowhere"),
        ("optimizer.name=muon", "has the state of 'adamw': set it back, or begin a run in another output_dir."),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path, change: str, message: str) -> None:
    folder = train(tmp_path / "run", "train.steps=2")
    saved, lines = from_run(folder), metrics(folder)
    with pytest.raises(ConfigError) as error:
        go_on(folder, "train.steps=4", change, *(["data.path=nowhere"] if change == "data=images" else []))
    assert message in str(error.value)
    assert from_run(folder) == saved
    assert metrics(folder) == lines
    assert len(losses(go_on(folder, "train.steps=3"))) == 3


def test_the_config_of_the_run_is_kept(trained: Path) -> None:
    saved = from_run(trained)
    assert (saved.train.steps, saved.model.depth, saved.output_dir) == (6, 5, str(trained))
    assert plain(saved) == saved_settings(trained)


def test_one_process_where_several_were_asked_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, `accelerate launch --num_processes 2` starts a single process and leaves only this trace."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    train(tmp_path / "run", "train.steps=1")
    assert "Launched for several processes but running one" in capsys.readouterr().out


def test_data_that_changed_is_named_and_needs_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A renamed class swaps labels, one more image moves held-out samples into training."""
    data = write_images(tmp_path / "data", "a", "b", "c", size=8)
    settings = ["data=images", f"data.path={data}", "data.size=8", "validation.samples=2", "train.steps=1"]
    folder = train(tmp_path / "run", *settings)
    (data / "b").rename(data / "z")
    shutil.copy(data / "a" / "0.png", data / "a" / "9.png")
    with pytest.raises(ConfigError) as error:
        go_on(folder, "train.steps=2")
    told = "'a' has 4 files instead of 3, 'b' is gone, 'z' is new"
    assert f"the data is not what it was when {folder}/checkpoints/step-00000001 was saved: {told}." in str(error.value)
    assert str(error.value).endswith("go on with data.changed=accept.")
    go_on(folder, "train.steps=2", "data.changed=accept")
    assert f"the data has changed since the run was saved: {told}" in capsys.readouterr().out
    assert from_run(folder).checkpoint.data_changed == "refuse", "accepted once"
    go_on(folder, "train.steps=3")


def test_what_a_run_will_not_do_is_said_at_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", "train.steps=1", "optimizer.warmup_steps=5", "validation.samples=5000")
    said = capsys.readouterr().out
    assert "climbs for 5 steps and the run has 1, so it never reaches its rate: lower optimizer.warmup_steps." in said
    assert "validation.samples is 5000, but half of the data is 898: 898 are held out." in said


def test_a_schedule_that_routes_no_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", "train.steps=1", "model.tread_config.schedule={cooldown_fraction: 1}")
    assert "the routes' schedule leaves no step of 1 routed, so the run is dense" in capsys.readouterr().out


def test_an_empty_output_dir_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^output_dir is empty; name a folder"):
        compose(["output_dir="])


def test_secrets_are_not_kept_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the config of a run nor in what trackers are given; a resume finds nothing changed."""
    folder = tmp_path / "run"
    for steps in (2, 4):
        task, _ = make_session(folder, f"train.steps={steps}", "log.trackers=tensorboard")
        config = replace(task.config, resume="latest")
        secret = {"hub_token": "hidden!", "entries": [{"aws_secret_access_key": "hidden!", "id": "a"}]}
        accelerator = make_accelerator(config)
        task = Pretraining(config, accelerator, folder)
        with claimed_folder(config, accelerator):
            run(task, config, accelerator, folder, {"reference_tokens": "keep", "steps": steps, **secret})
        accelerator.end_training()
    assert saved_settings(folder) == {
        "reference_tokens": "keep",
        "steps": 4,
        "hub_token": "********",
        "entries": [{"aws_secret_access_key": "********", "id": "a"}],
    }
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    assert [path for path in files if b"hidden!" in path.read_bytes()] == []
    changed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since")]
    assert changed == ["changed since the run was started: steps: 2 -> 4"]
