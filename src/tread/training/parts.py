"""The parts of a checkpoint, `model`, `ema` and `optimizer`: collected from a model and its optimizer, and loaded.

Every layout loads the checkpoints of every other: whole files and shards, in one process or many.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tread.errors import CheckpointError, ConfigError
from tread.training.sharding import files

GROUP = "group"
"""Prefix, in an optimizer's file, of state that all parameters share."""


def averaged_part(manifest: Mapping[str, Any]) -> str:
    """The part of a checkpoint with the averaged weights: `ema`, or `model` where none are kept."""
    parts = manifest.get("parts", [Path(name).stem for name in manifest["files"]])  # `parts` is there if sharded
    return "ema" if "ema" in parts else "model"


def load_part(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, whole, also if it is sharded."""
    with _readable(path, name):
        return files.read_part(path, name) if _is_sharded(path) else load_file(path / f"{name}.safetensors")


def _is_sharded(path: Path) -> bool:
    return any(path.glob("shard-*.safetensors"))


@contextmanager
def _readable(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path / name}.safetensors: {error}") from error


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, by name: all of a model, or an adapter's."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """The number of a model's parameters, and of those that train."""
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)


def load_into(own: Mapping[str, Tensor], path: Path, part: str) -> None:
    """Read one part of a checkpoint into tensors, of which this process may hold shards; refused if names or shapes
    differ. Only what this process holds is read, whatever layout wrote the checkpoint."""
    with _readable(path, part):
        _check_shapes(own, _shapes(path, part), path)
        if _is_sharded(path):
            files.read_shards(path, part, own)
        else:
            files.fill(own, dict.fromkeys(own, path / f"{part}.safetensors"))


def _shapes(path: Path, part: str) -> dict[str, torch.Size]:
    if _is_sharded(path):
        return files.shapes_of(path, part)
    with safe_open(path / f"{part}.safetensors", framework="pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _check_shapes(own: Mapping[str, Tensor], given: Mapping[str, torch.Size], source: Path) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in own.items()}
    there = {name: tuple(shape) for name, shape in given.items()}
    if here != there:
        name = next(name for name in [*here, *there] if here.get(name) != there.get(name))
        raise ConfigError(
            f"the checkpoint {source} is of another model: {name} is {there.get(name, 'absent')} there and "
            f"{here.get(name, 'absent')} here. Set the model and the data as in that run's config.yaml, "
            "or begin a run in another output_dir."
        )


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as flat tensors: "3.exp_avg" belongs to the fourth parameter, "group.d" to all of them."""
    state = optimizer.state_dict()["state"]
    own = {
        f"{index}.{name}": torch.as_tensor(value) for index, values in state.items() for name, value in values.items()
    }
    shared = {name: optimizer.param_groups[0][name] for name in _group_state(optimizer)}
    return own | {
        f"{GROUP}.{name}": torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        for name, value in shared.items()
    }


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Restore a state from `optimizer_tensors`; hyper-parameters stay as configured now."""
    if not tensors:
        raise CheckpointError(f"the optimizer's state in {source} is empty: restore the file, or resume from a copy.")
    state: dict[int, dict[str, Tensor]] = {}
    shared: dict[str, int | float] = {}
    try:
        for key, tensor in tensors.items():
            index, name = key.split(".", 1)
            if index == GROUP:
                shared[name] = tensor.item()
            else:
                state.setdefault(int(index), {})[name] = tensor
        if set(shared) != set(_group_state(optimizer)):
            raise KeyError(*sorted(set(shared) ^ set(_group_state(optimizer))))
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer's state does not belong to this run ({error!r}); restore its file."
        ) from error
    for group in optimizer.param_groups:
        group.update(shared)


def _group_state(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of what an optimizer keeps for all parameters together, such as Prodigy's estimate of the rate."""
    return getattr(optimizer, "group_state", ())


def load_moments(optimizer: Optimizer, path: Path) -> None:
    """Restore the optimizer's state from a checkpoint; of sharded weights, each process reads its own shards."""
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return load_optimizer(optimizer, load_part(path, "optimizer"), path)
    moments: dict[str, Tensor] = {}
    with _readable(path, "optimizer"):
        for name, shape in _shapes(path, "optimizer").items():
            index = name.partition(".")[0]
            like = None if index == GROUP else parameters[int(index)]
            same = like is not None and shape == like.shape
            moments[name] = torch.empty_like(like) if same else torch.empty(shape)  # pyright: ignore[reportArgumentType]
        load_into(moments, path, "optimizer")
    return load_optimizer(optimizer, moments, path)
