"""Shards on disk: safetensors written and read by torch's distributed checkpoints (DCP).

- Every process writes the shards it holds, and reads the pieces it needs, whatever layout wrote them: another number of
  processes, groups, or one process that reads all (`read_part`).
- The state is flat: `model.NAME`, `ema.NAME`, `optimizer.INDEX.NAME`.
- Files with whole tensors (checkpoints of `ddp`, released weights) are read piece by piece too: `fill`.
- DCP's own format keeps its index in a pickle; its safetensors carry the offsets in their headers.
"""

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

FILE_BYTES = 1 << 32
"""Bytes of tensors per file, over all shards: a file is assembled in memory."""


def write_shards(folder: Path, state: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
    """Write this process's shards of a flat state into `folder`; all processes of the group call it."""
    writer = HuggingFaceStorageWriter(str(folder), _files(state), save_distributed=True)
    save(dict(state), storage_writer=writer, process_group=group)


def _files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Name of a tensor -> the number of its file, from 1; the same on every process."""
    numbers, filled = {}, 0
    for name, tensor in state.items():
        numbers[name] = 1 + filled // FILE_BYTES
        filled += tensor.numel() * tensor.element_size()
    return numbers


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files that the process `rank` of `write_shards` wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """The whole tensors of one part, such as `model`, by name; read by this process alone."""
    stored = _stored(folder, part)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    read_shards(folder, part, tensors)
    return tensors


def shapes_of(folder: Path, part: str) -> dict[str, torch.Size]:
    """The shapes of one part's whole tensors, by name."""
    return {name: entry.size for name, entry in _stored(folder, part).items()}


def _stored(folder: Path, part: str) -> dict[str, TensorStorageMetadata]:
    """The size and dtype of one part's whole tensors, by name."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): entry
        for name, entry in stored.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, part: str, own: Mapping[str, Tensor]) -> None:
    """Read one part into tensors of which this process holds shards; runs no collective."""
    state = {f"{part}.{name}": tensor for name, tensor in own.items()}
    with _alone():
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)  # pyright: ignore[reportArgumentType]


@contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's warning that a read without collectives is not distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def materialise(
    model: nn.Module,
    names: Container[str],
    device: torch.device,
    fill_shards: Callable[[Mapping[str, Tensor]], None],
    stored: Callable[[str], str] = str,
) -> None:
    """Give a sharded model on the meta device its weights, of which `fill_shards` fills this process's shards.

    `fill_shards` gets empty tensors for the weights in `names`; others, such as an adapter's, stay. `stored` maps the
    name of a tensor in the model to its name in `names`.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if stored(name) in names}
    own = {stored(name): torch.empty_like(tensor, device=device) for name, tensor in state.items()}
    fill_shards(own)
    model.load_state_dict({name: own[stored(name)] for name in state}, strict=False, assign=True)


def fill(own: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """Read the pieces that this process holds from files of whole tensors; `files` maps each name to its file."""
    by_file: dict[Path, list[str]] = {}
    for name in own:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                sharded = isinstance(own[name], DTensor)
                keep(own[name], file.get_slice(name) if sharded else file.get_tensor(name))


@torch.no_grad()
def keep(own: Tensor, whole: Any) -> None:
    """Copy this process's piece of a whole tensor, or of a slice of a file, into `own`."""
    if not isinstance(own, DTensor):
        own.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
    if 0 not in sizes:  # with more processes than rows, some have no piece
        piece = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        own.to_local().copy_(whole[piece])
