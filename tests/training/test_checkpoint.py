"""Checkpoints are whole or absent: exact round trips, failed and half-written saves, and what is kept."""

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tread.errors import CheckpointError
from tread.training import checkpoint
from tread.training.checkpoint import MANIFEST, list_checkpoints, newest, read_manifest, save
from tread.training.parts import load_part

Break = Callable[[Path], object]


def parts(value: float) -> dict[str, dict[str, Tensor]]:
    return {"model": {"weight": torch.full((300, 10), value)}, "ema": {"weight": torch.full((300, 10), -value)}}


def saved(folder: Path, *steps: int, keep: int = 10) -> list[str]:
    for step in steps:
        save(folder, step, parts(float(step)), {"shape": [1, 8, 8]}, keep=keep)
    return [path.name for path in list_checkpoints(folder)]


def test_round_trip_is_exact_with_its_facts(tmp_path: Path) -> None:
    odd = {"a": torch.randn(7, 3).t(), "b": torch.tensor(2.5), "c": torch.randn(4).bfloat16(), "d": torch.arange(3)}
    path = save(tmp_path, 12, {"model": odd}, {"shape": [4, 2, 2], "tread_config": None}, keep=1)
    assert path == tmp_path / "step-00000012"
    loaded = load_part(path, "model")
    assert loaded.keys() == odd.keys()
    for name, tensor in odd.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["shape"], manifest["tread_config"]) == (12, [4, 2, 2], None)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    assert saved(tmp_path, 5, 10, 15, 20, keep=2) == ["step-00000015", "step-00000020"]


def test_the_best_is_kept_too_if_asked(tmp_path: Path) -> None:
    """By the loss of its own weights: step 4 has none, and a damaged one does not count."""

    def put(step: int, loss: float | None, *, keep_best: bool = True) -> list[str]:
        meta = {} if loss is None else {checkpoint.VALIDATED: loss}
        save(tmp_path, step, parts(step), meta, keep=1, keep_best=keep_best)
        return [path.name[-1] for path in checkpoint.list_checkpoints(tmp_path)]

    assert put(1, 0.3) == ["1"]
    assert put(2, 0.5) == ["1", "2"]
    assert put(3, 0.2) == ["3"]
    assert put(4, None) == ["3", "4"]
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"")
    assert put(5, 0.4) == ["5"]
    assert put(6, 0.9) == ["5", "6"]
    assert put(7, 0.9, keep_best=False) == ["7"]


def test_a_loss_on_other_samples_is_no_best_one(tmp_path: Path) -> None:
    """A resume with data_changed=accept validates on other samples; new training data beside held-out data does not."""

    def put(step: int, loss: float, **data: Any) -> str:
        save(tmp_path, step, parts(step), {checkpoint.VALIDATED: loss} | data, keep=9, keep_best=True)
        found = checkpoint.best(tmp_path)
        assert found is not None
        return found[0].name[-1]

    assert put(1, 0.2, contents={"a": [7, "x"]}) == "1"
    assert put(2, 0.5, contents={"a": [8, "y"]}) == "2"
    assert put(3, 0.4, contents={"a": [8, "y"]}) == "3"
    assert put(4, 0.6, contents={"a": [8, "y"]}, held_out={"b": [1, "z"]}) == "4"
    assert put(5, 0.7, contents={"a": [9, "w"]}, held_out={"b": [1, "z"]}) == "4"


def fail_to_rename(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "replace", fail_to_rename)
    with pytest.raises(CheckpointError) as error:
        saved(tmp_path, 2, keep=1)
    assert str(error.value) == (
        f"cannot write the checkpoint {tmp_path}/step-00000002: No space left on device. Earlier checkpoints are "
        "untouched; free space or name another output_dir."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = newest(tmp_path)
    assert found is not None
    assert torch.equal(load_part(found[0], "model")["weight"], parts(1)["model"]["weight"])


def test_a_disk_that_is_full_leaves_the_earlier_ones(tmp_path: Path) -> None:
    """The kernel refuses the write here, in the middle of a tensor file, as a full disk would."""
    saved(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"^cannot write the checkpoint .*step-00000002: .*File too large"):
            saved(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert saved(tmp_path, 2) == ["step-00000001", "step-00000002"]


def test_a_kill_during_a_save_leaves_a_temporary_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        saved(tmp_path, 2)
    assert (tmp_path / ".step-00000002.tmp").is_dir()
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "step-00000001"
    assert saved(tmp_path, 3) == ["step-00000001", "step-00000003"]
    assert not (tmp_path / ".step-00000002.tmp").exists()


def truncate(path: Path) -> None:
    os.truncate(path / "ema.safetensors", 5000)


def zero(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))


def flip(path: Path) -> None:
    """Change one bit of the last weight."""
    with (path / "ema.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / MANIFEST).read_text()) | changes
    (path / MANIFEST).write_text(json.dumps(manifest))


BREAKS: dict[str, tuple[Break, str]] = {
    "truncated": (truncate, "ema.safetensors has 5000 of 12080 bytes"),
    "file missing": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "checkpoint.json is missing"),
    "cut JSON": (lambda path: (path / MANIFEST).write_text('{"step": 2, "fi'), "Unterminated string"),
    "no text": (lambda path: (path / MANIFEST).write_bytes(b"\x80\x81 no text"), "codec can't decode"),
    "other JSON": (lambda path: (path / MANIFEST).write_text("[]"), "list indices"),
    "no file list": (lambda path: (path / MANIFEST).write_text("{}"), "'files'"),
    "zeros": (zero, "header"),
    "flipped bit": (flip, "the content of ema.safetensors has changed since it was saved"),
    "other step": (lambda path: change_manifest(path, step=1), "its checkpoint.json is of step 1"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_newest_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    damage, reason = BREAKS[name]
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None
    assert (found[0].name, found[1]["step"]) == ("step-00000001", 1)
    (line,) = said
    assert line.startswith(f"{tmp_path}/step-00000002 is not whole: ")
    assert reason in line
    assert line.endswith("; looking for an earlier one.")


def test_a_newest_that_the_disk_does_not_give_back_is_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is in the page cache; the content is on a sector that has gone bad."""
    saved(tmp_path, 1, 2)
    opened = Path.open

    def open_(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == "ema.safetensors" and path.parent.name == "step-00000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *arguments, **named)

    checkpoint._checksum_of.cache_clear()
    monkeypatch.setattr(Path, "open", open_)
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None
    assert found[0].name == "step-00000001"
    assert "step-00000002 is not whole: ema.safetensors cannot be read (Input/output error); looking for" in said[0]


def test_a_file_that_changes_after_it_was_compared_is_compared_again(tmp_path: Path) -> None:
    """In place, at the same size: a later write shows in its time alone."""
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    checkpoint.read_whole(path)
    flip(path)
    os.utime(path / "ema.safetensors", (0, 0))  # the clock of a filesystem may be coarse
    with pytest.raises(CheckpointError, match=r"the content of ema\.safetensors has changed since it was saved"):
        checkpoint.read_whole(path)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_broken_newest_never_costs_a_whole_one(tmp_path: Path, keep: int) -> None:
    """The broken one is the newest by name; counting it as kept would remove what was just saved."""
    saved(tmp_path, 4, 6)
    truncate(tmp_path / "step-00000006")
    assert saved(tmp_path, 5, keep=keep)[-2:] == ["step-00000005", "step-00000006"]
    found = newest(tmp_path, lambda _: None)
    assert found is not None
    assert found[0].name == "step-00000005"
    assert saved(tmp_path, 6, 7, keep=keep) == ["step-00000006", "step-00000007"][-keep:]
    assert newest(tmp_path, pytest.fail) is not None


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None


def test_where_all_are_broken_each_is_named_with_what_may_be_whole(tmp_path: Path) -> None:
    """To start anew would replace them."""
    saved(tmp_path, 1, 2, 3)
    truncate(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    for file in (tmp_path / "step-00000003").iterdir():
        file.write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        newest(tmp_path, pytest.fail)
    assert str(error.value) == (
        f"no checkpoint in {tmp_path} is whole; nothing was changed. "
        "step-00000003 is not whole: Expecting value: line 1 column 1 (char 0); no other file of it is "
        "whole. step-00000002 is not whole: checkpoint.json is missing; ema.safetensors, model.safetensors "
        "may be whole. step-00000001 is not whole: ema.safetensors has 5000 of 12080 bytes; "
        "model.safetensors may be whole. Restore the broken files, or start anew in another output_dir."
    )


def killed_in(act: Callable[[], object], patch: pytest.MonkeyPatch, owner: Any, function: str) -> None:
    """Run `act` in a process that SIGKILL ends when it calls a function."""
    if not (child := os.fork()):
        try:
            patch.setattr(owner, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            act()
        finally:  # no second test process comes out of it
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def only(folder: Path) -> tuple[str, float]:
    """The name of the one checkpoint in a folder, and what its weights are filled with."""
    (path,) = folder.iterdir()
    return path.name, load_part(path, "model")["weight"][0, 0].item()


def test_a_save_killed_before_its_rename_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first checkpoint, and of one that replaces a whole one: both would be all there is."""
    killed_in(lambda: saved(tmp_path, 1), monkeypatch, os, "replace")
    assert list_checkpoints(tmp_path) == []
    checkpoint.recover(tmp_path)
    assert only(tmp_path) == ("step-00000001", 1.0)
    killed_in(lambda: save(tmp_path, 1, parts(7.0), {}, keep=1), monkeypatch, os, "replace")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000001.old", ".step-00000001.tmp"]
    checkpoint.recover(tmp_path)
    assert only(tmp_path) == ("step-00000001", 7.0)
    saved(tmp_path, 2, keep=1)
    assert only(tmp_path) == ("step-00000002", 2.0)


def test_a_save_killed_in_its_files_leaves_the_one_that_it_would_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    killed_in(lambda: save(tmp_path, 1, parts(7.0), {}, keep=1), monkeypatch, checkpoint, "fsync")
    checkpoint.recover(tmp_path)
    assert only(tmp_path) == ("step-00000001", 1.0)
    killed_in(lambda: save(tmp_path, 1, parts(7.0), {}, keep=1), monkeypatch, os, "replace")
    truncate(tmp_path / ".step-00000001.tmp")
    checkpoint.recover(tmp_path)
    assert only(tmp_path) == ("step-00000001", 1.0)


def test_a_whole_checkpoint_stays_while_the_one_it_was_to_replace_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    truncate(tmp_path / "step-00000001")
    killed_in(lambda: save(tmp_path, 1, parts(7.0), {}, keep=1), monkeypatch, Path, "rename")
    checkpoint.recover(tmp_path)
    assert checkpoint.read_whole(tmp_path / ".step-00000001.tmp")


def test_a_save_that_fails_puts_back_what_it_was_to_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(os, "replace", fail_to_rename)
    with pytest.raises(CheckpointError):
        save(tmp_path, 1, parts(7.0), {}, keep=1)
    assert only(tmp_path) == ("step-00000001", 1.0)


def test_the_manifest_says_what_others_need(trained: Path) -> None:
    path = list_checkpoints(trained / "checkpoints")[-1]
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], manifest["shape"], manifest["num_classes"]) == (6, [1, 8, 8], 10)
    assert manifest["tread_config"]["routes"] == [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}]
    assert manifest["files"] == {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert manifest["files"].keys() == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}


def test_checkpoints_without_checksums_still_load(tmp_path: Path) -> None:
    """As versions before checksums wrote them."""
    saved(tmp_path, 1)
    manifest = read_manifest(tmp_path / "step-00000001")
    assert manifest.pop("checksums").keys() == manifest["files"].keys()
    (tmp_path / "step-00000001" / MANIFEST).write_text(json.dumps(manifest))
    assert newest(tmp_path, pytest.fail) == (tmp_path / "step-00000001", manifest)
