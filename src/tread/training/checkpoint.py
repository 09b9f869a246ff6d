"""Checkpoints that are whole or absent.

- A checkpoint is a folder `step-00001000` with one safetensors file per part (model, ema, optimizer) and a
  `checkpoint.json` that lists them with their sizes and CRC-32 checksums. It is written under a temporary name, synced
  to disk and renamed, so an interrupted save leaves the earlier ones untouched. A checkpoint of the same step is
  removed last, and `recover` finishes a save that was killed just before its rename.
- The newest whole checkpoint is loaded; broken ones are reported and skipped, and do not count towards those kept. If
  all are broken, an error is raised: starting again would replace files that could be repaired.
- Checksums are compared before anything is loaded: a changed byte makes a checkpoint a broken one. Checkpoints of
  earlier versions have none and load without.
- A sharded run's processes write `shard-0000N-...safetensors` each, with the names of all parts in one file
  (`sharding/files.py`); the manifest then lists the `parts`. `parts.py` reads both layouts.
- Each save has its own id, which a result records.
- There is no random state to save: noise, data order and selections are functions of the step.
"""

import json
import os
import re
import shutil
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tread.errors import CheckpointError, TreadWarning, reason_of, shown
from tread.files import fsync, is_folder, is_safetensors

CHECKPOINTS = "checkpoints"
"""The folder, within a run's folder, of its checkpoints."""
MANIFEST = "checkpoint.json"
VALIDATED = "validated"
"""The key of a manifest with the validation loss of the checkpoint's own weights."""
Parts = Mapping[str, Mapping[str, Tensor]]


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def temporary_path(folder: Path, step: int) -> Path:
    """The folder that the checkpoint after `step` steps is written to before it gets its name."""
    return folder / f".{checkpoint_path(folder, step).name}.tmp"


def save(folder: Path, step: int, parts: Parts, meta: Mapping[str, Any], *, keep: int, keep_best: bool = False) -> Path:
    """Write the checkpoint after `step` steps, then remove those before the newest `keep`, except the best if asked."""
    with _explained(folder, step):
        temporary, signatures = begin(folder, step), {}
        for name, tensors in parts.items():
            path = temporary / f"{name}.safetensors"
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
            signatures[path.name] = sign(path)
        return finish(folder, step, signatures, meta, keep=keep, keep_best=keep_best)


def begin(folder: Path, step: int) -> Path:
    """The empty folder that the files of a checkpoint are written to."""
    for left_over in _left_overs(folder):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = temporary_path(folder, step)
    temporary.mkdir(parents=True)
    return temporary


def sign(path: Path) -> tuple[int, str]:
    """Sync a file to disk; returns its size and checksum."""
    fsync(path)
    return path.stat().st_size, _checksum(path)


def finish(
    folder: Path,
    step: int,
    signatures: Mapping[str, tuple[int, str]],
    meta: Mapping[str, Any],
    *,
    keep: int,
    keep_best: bool = False,
) -> Path:
    """Give a written checkpoint its manifest and its name, then remove older ones as `save` does."""
    temporary, final = temporary_path(folder, step), checkpoint_path(folder, step)
    replaced, manifest = folder / f".{final.name}.old", temporary / MANIFEST
    lists = {
        "files": {name: size for name, (size, _) in signatures.items()},
        "checksums": {name: checksum for name, (_, checksum) in signatures.items()},
    }
    manifest.write_text(json.dumps({"step": step, "id": uuid.uuid4().hex, **lists, **meta}, indent=2) + "\n")
    fsync(manifest)
    fsync(temporary)
    if final.exists():
        final.rename(replaced)
    os.replace(temporary, final)
    fsync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(folder, keep=keep, keep_best=keep_best)
    return final


def _prune(folder: Path, *, keep: int, keep_best: bool) -> None:
    """Remove the checkpoints before the newest `keep` whole ones, broken ones among them, except the best if asked."""
    excess = [path.name for path in list_checkpoints(folder) if _is_whole(path)][:-keep]
    kept = best(folder) if keep_best else None
    for path in list_checkpoints(folder):
        if excess and path.name <= excess[-1] and (kept is None or path != kept[0]):
            shutil.rmtree(path, ignore_errors=True)


def best(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint of the lowest validation loss, and its manifest; of equal ones the oldest.

    None if no checkpoint was validated at its own step. Losses on other samples than the newest one's do not count.
    """
    readable: list[tuple[Path, dict[str, Any]]] = []
    for path in list_checkpoints(folder):
        with suppress(CheckpointError):
            readable.append((path, read_manifest(path)))
    validated = [(path, manifest) for path, manifest in readable if VALIDATED in manifest]
    comparable = [one for one in validated if _validated_on(one[1]) == _validated_on(validated[-1][1])]
    return min(comparable, key=lambda one: one[1][VALIDATED], default=None)


def _validated_on(manifest: Mapping[str, Any]) -> Any:
    """The fingerprint of the data that a validation loss was computed on: held-out data, else the training data."""
    return manifest.get("held_out") or manifest.get("contents")


@contextmanager
def _explained(folder: Path, step: int) -> Iterator[None]:
    """Turn a failed write inside into a CheckpointError, and remove what was written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        give_up(folder, step)
        raise unwritten(folder, step, reason_of(error)) from error


def give_up(folder: Path, step: int) -> None:
    """Remove what a failed save wrote."""
    shutil.rmtree(temporary_path(folder, step), ignore_errors=True)
    with suppress(OSError):  # the first error is the one to report, and a resume recovers too
        recover(folder)


def unwritten(folder: Path, step: int, reason: str) -> CheckpointError:
    """The error for a checkpoint that cannot be written."""
    return CheckpointError(
        f"cannot write the checkpoint {checkpoint_path(folder, step)}: {reason}. Earlier checkpoints are untouched; "
        "free space or name another output_dir."
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def moved_run(config: Path, output_dir: object) -> Path | None:
    """The folder of a config file if it is a run that was moved: it has checkpoints, and the `output_dir` has none."""

    def has_checkpoints(run: Path) -> bool:
        return is_folder(run / CHECKPOINTS) and bool(list_checkpoints(run / CHECKPOINTS))

    if not has_checkpoints(config.parent) or has_checkpoints(Path(str(output_dir))):
        return None
    message = f"{config}: output_dir {shown(str(output_dir))} has no checkpoints, so the run goes on beside the config"
    warnings.warn(f"{message}, in {config.parent}; name another output_dir to begin one.", TreadWarning, stacklevel=2)
    return config.parent


def recover(folder: Path) -> None:
    """Finish what a killed save left: the new checkpoint gets its name if it is whole, else the one it was to replace.

    Other left-overs are removed: a new checkpoint that is not whole, and one that was replaced.
    """
    for left_over in _left_overs(folder):
        final = folder / left_over.stem.removeprefix(".")
        whole = _is_whole(left_over)
        if whole and not final.exists():
            left_over.rename(final)
        elif _is_whole(final) or (left_over.suffix == ".tmp" and not whole):
            shutil.rmtree(left_over, ignore_errors=True)


def _left_overs(folder: Path) -> list[Path]:
    """Folders of killed saves: new checkpoints first, then those that were being replaced."""
    return [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after checking its step and that every file it lists exists and has its size."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        for name, size in manifest["files"].items():
            actual = (path / name).stat().st_size
            if actual != size:
                raise CheckpointError(f"{path} is not whole: {name} has {actual} of {size} bytes")
            with safe_open(path / name, framework="pt"):  # reads the header only
                pass
        named = re.match(r"\.?step-(\d+)", path.name)
        if named and manifest["step"] != int(named[1]):
            raise CheckpointError(f"{path} is not whole: its {MANIFEST} is of step {manifest['step']}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not whole: {Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not whole: {error}") from error
    return manifest


def read_whole(path: Path) -> dict[str, Any]:
    """`read_manifest`, after comparing the content of every file with its checksum."""
    manifest = read_manifest(path)
    checksums = manifest.get("checksums", {})  # checkpoints of earlier versions have none
    for name in manifest["files"] if checksums else ():
        try:
            same = _checksum(path / name) == checksums.get(name)
        except OSError as error:
            raise CheckpointError(f"{path} is not whole: {name} cannot be read ({reason_of(error)})") from error
        if not same:
            raise CheckpointError(f"{path} is not whole: the content of {name} has changed since it was saved")
    return manifest


def _checksum(path: Path) -> str:
    stat = path.stat()
    return _checksum_of(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _checksum_of(path: Path, *_identity: int) -> str:
    """The CRC-32 of a file, cached: a resume checks its checkpoint several times."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def _is_whole(path: Path) -> bool:
    try:
        return bool(read_manifest(path))
    except CheckpointError:
        return False


def newest(folder: Path, say: Callable[[str], object] = print) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its manifest; None if there is no checkpoint.

    Broken ones are reported through `say`; if all are broken, the error lists their files that still open.
    """
    broken: list[tuple[Path, CheckpointError]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            manifest = read_whole(path)
        except CheckpointError as error:
            broken.append((path, error))
            continue
        for _, error in broken:
            say(f"{error}; looking for an earlier one.")
        return path, manifest
    if broken:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole; nothing was changed. "
            + " ".join(f"{error}; {_may_be_whole(path)}.".replace(f"{folder}{os.sep}", "") for path, error in broken)
            + " Restore the broken files, or start anew in another output_dir."
        )
    return None


def _may_be_whole(path: Path) -> str:
    """A phrase that lists the files of a broken checkpoint that still open."""
    opened = [file.name for file in sorted(path.glob("*.safetensors")) if is_safetensors(file)]
    return f"{', '.join(opened)} may be whole" if opened else "no other file of it is whole"
