"""`Saver`: sharded checkpoints written in the background, whole or absent.

- A step waits for the copy of the shards to host memory (pinned, kept from save to save); a thread writes them. One
  save runs at a time: the next one waits for it.
- The threads of all processes use a process group of their own (gloo), so they cannot disturb a step's collectives.
- Rank 0 makes the temporary folder, every process writes its files and signs them (size, checksum), rank 0 writes the
  manifest and renames. A failure on one process is raised on all, with its reason, and leaves nothing behind.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from tread.errors import reason_of
from tread.training import checkpoint
from tread.training.sharding import files

Made = TypeVar("Made")
Signatures = dict[str, tuple[int, str]]
"""File name -> size and checksum."""
LAST_SECONDS = 30.0
"""Seconds that a process ended by an error waits for its save: the others may have ended already."""


@dataclass
class _Save:
    """One save that is being written."""

    step: int
    thread: threading.Thread
    errors: list[BaseException] = field(default_factory=list)


class Saver:
    """Writes the shards of all processes; each process makes one, at the same point."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout)
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self._running: _Save | None = None
        self.saved: int | None = None
        """Step of the last checkpoint written."""

    def start(
        self,
        folder: Path,
        step: int,
        parts: checkpoint.Parts,
        meta: Mapping[str, Any],
        *,
        keep: int,
        keep_best: bool = False,
    ) -> None:
        """Copy the state to host memory and write it in the background; every process calls it.

        A failure of the previous save is raised here.
        """
        self.wait()
        state = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        staged = self._stage(state)
        known = {**meta, "parts": list(parts)}
        finish = partial(checkpoint.finish, folder, step, meta=known, keep=keep, keep_best=keep_best)

        def write() -> None:
            try:
                self._write(folder, step, staged, finish)
            except BaseException as error:  # raised where the main thread waits
                save.errors.append(error)

        # a daemon: the end of a process whose peers are gone does not wait for it
        save = self._running = _Save(step, threading.Thread(target=write, name=f"save {step}", daemon=True))
        save.thread.start()

    @torch.no_grad()
    def _stage(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state copied to host memory; DTensors stay DTensors of the same placement.

        torch 2.11's own stager cannot copy a DTensor.
        """
        pinned, staged = self._device.type == "cuda", {}
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer.copy_(local, non_blocking=pinned)
            # `DTensor.from_local` would copy it back to the device of the mesh
            shards = isinstance(tensor, DTensor)
            staged[name] = DTensor(buffer, tensor._spec, requires_grad=False) if shards else buffer  # pyright: ignore
        if pinned:
            torch.cuda.synchronize(self._device)
        return staged

    def wait(self) -> None:
        """Wait for the running save; raises the error that made it fail."""
        save, self._running = self._running, None
        if save is None:
            return
        save.thread.join()
        if save.errors:
            raise save.errors[0]
        self.saved = save.step

    def settle(self) -> None:
        """Wait for the running save, up to LAST_SECONDS, in a process that an error ends; raises nothing."""
        if self._running is not None:
            self._running.thread.join(LAST_SECONDS)

    def _write(
        self, folder: Path, step: int, state: Mapping[str, Tensor], finish: Callable[[Signatures], Path]
    ) -> None:
        temporary, is_main = checkpoint.temporary_path(folder, step), self._rank == 0

        def write() -> Signatures:
            files.write_shards(temporary, state, self._group)
            return {path.name: checkpoint.sign(path) for path in files.own_files(temporary, self._rank)}

        try:
            self._together(lambda: checkpoint.begin(folder, step) if is_main else None)
            signatures = {name: one for signed in self._together(write) for name, one in signed.items()}
            self._together(lambda: finish(signatures) if is_main else None)
        except _Failed as error:
            if is_main:
                checkpoint.give_up(folder, step)
            raise checkpoint.unwritten(folder, step, str(error)) from error

    def _together(self, make: Callable[[], Made]) -> list[Made]:
        """The results of `make` on all processes; raises on all of them if it failed on one."""
        made, reason = None, None
        try:
            made = make()
        except (OSError, SafetensorError) as error:
            reason = self._reason(error, self._rank)
        except CheckpointException as error:  # torch's, after a failure on any process
            reason = next((self._reason(cause, rank) for rank, (cause, _) in error.failures.items()), str(error))
        outcomes: list[Any] = [None] * self._world
        distributed.all_gather_object(outcomes, (made, reason), self._group)
        for _, said in outcomes:
            if said is not None:
                raise _Failed(said)
        return [one for one, _ in outcomes]

    def _reason(self, error: BaseException, rank: int) -> str:
        said = reason_of(error)
        return said if self._world == 1 else f"{said} (on rank {rank})"


class _Failed(Exception):
    """Why a save failed, on whichever process."""
