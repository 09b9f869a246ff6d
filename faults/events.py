"""Events of a job, counted as they come: every change of its folder, every fsync, and every step of its work.

- Python's audit hook tells of opened, renamed and removed files before the change is made, and an exception raised
  there prevents it. Tensors are written in Rust, out of the hook's sight: `serialize_file` is wrapped.
- A count does not depend on the clock, so the same number strikes at the same point of the job. Threads that write at
  once may swap places.
- A hook cannot be taken away: `watch` is called in processes that end with their job.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
"""Audit events; the first argument is the path, and that of a rename its old one."""
STEP, FSYNC = "step", "fsync"


def watch(folder: Path, tell: Callable[[str], None]) -> None:
    """Call `tell` with each event in this process, before it takes place; paths are relative to `folder`, the cwd."""
    owner = os.getpid()

    def inside(path: object) -> str:
        """The path below `folder`, empty for any other; a name relative to a descriptor counts as inside."""
        if not isinstance(path, str | bytes | os.PathLike):  # an open descriptor
            return ""
        name = os.path.abspath(os.fsdecode(path))
        return os.path.relpath(name, folder) if name.startswith(f"{folder}{os.sep}") else ""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if os.getpid() != owner:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and (name := inside(path)):
                tell(f"open {name}")
        elif event in CHANGES and (name := inside(arguments[0])):
            to = f" to {inside(arguments[1])}" if event == "os.rename" else ""
            tell(f"{event.removeprefix('os.')} {name}{to}")

    for module, name, event in _wrapped():
        _before(module, name, lambda event=event: tell(event) if os.getpid() == owner else None)
    sys.addaudithook(audit)


def _wrapped() -> list[tuple[Any, str, str]]:
    """What the audit hook does not see: owner, name of the function, event."""
    import safetensors.torch

    from tread.data.vae import Autoencoder
    from tread.evaluate.statistics import Tally
    from tread.training.session import Session

    return [
        (os, "fsync", FSYNC),
        (safetensors.torch, "serialize_file", "open tensors"),
        (Session, "step", STEP),
        (Autoencoder, "encode", STEP),
        (Tally, "add", STEP),
    ]


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    function = getattr(owner, name)

    @wraps(function)
    def act_first(*arguments: Any, **options: Any) -> Any:
        try:
            act()
        except OSError as error:
            if name != "serialize_file":
                raise
            reason = f"{error.strerror} (os error {error.errno})"  # what Rust says of a write that fails
            raise SafetensorError(f"Error while serializing: I/O error: {reason}") from None
        return function(*arguments, **options)

    setattr(owner, name, act_first)
