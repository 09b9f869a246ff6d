"""Layouts of a model over processes: torch's FSDP2 (`fully_shard`), layer by layer, in a mesh of one or two axes.

- `fsdp`: all processes share one copy of the weights. `hsdp`: groups of `shard_size` processes share one each, and the
  groups average their gradients.
- In a forward a layer sees plain parameters, gathered just before it runs; so routing, adapters and compiled code know
  nothing of shards. The optimizer, the average and clipping see DTensors.
- Under bf16 the layers' weights are gathered in bfloat16, which is what autocast would make of them, and gradients are
  averaged in float32. What is outside the layers is small and is gathered as it is.
- Each micro-step reduces its gradients into the shards: whole gradients between micro-steps would need the memory that
  sharding saves.
- Accelerate's plugin is not used: it finds layers by class names and makes frozen weights float32.
"""

import os
import warnings
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tread.errors import ConfigError
from tread.training.settings import JobConfig, LoopConfig

UNSHARDED_OPTIMIZERS = {
    "adamw-8bit": "keeps its moments in blocks of 256 values that no other number of processes could cut",
    "lion-8bit": "keeps its moments in blocks of 256 values that no other number of processes could cut",
    "adamw-schedule-free": "swaps the storage of weights for that of its average, which shards do not allow",
    "prodigy": "estimates its rate from all weights together, and its library knows no shards",
    "muon": "steps along whole matrices, and torch's takes other steps on shards",
    "adafactor": "needs whole rows and columns of a weight, and torch's has no form for shards",
}
"""The optimizers that cannot be sharded, with the reason."""
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl"}
"""Backends of a process group by device; gloo is for shards in host memory, and for all else."""


def check_layout(config: JobConfig) -> None:
    """Refuse settings of the layout that contradict each other, before anything is loaded."""
    train, called = config.train, config.called
    parallel, size = called("train.parallel"), called("train.shard_size")
    if not train.sharded:
        if train.shard_size is not None:
            raise ConfigError(
                f"{size} is {train.shard_size}, but {parallel} is 'ddp', where each process has the whole model: set "
                f"{parallel} to 'hsdp' or leave {size} out."
            )
        if train.cpu_offload:
            raise ConfigError(
                f"{called('train.cpu_offload')} is true, but {parallel} is 'ddp', which keeps the model on the GPU: "
                f"set {parallel} to 'fsdp'; one process will do."
            )
        return
    if train.shard_size is not None and train.parallel == "fsdp":
        raise ConfigError(
            f"{size} is {train.shard_size}, but {parallel} is 'fsdp', where all processes share one copy: set "
            f"{parallel} to 'hsdp', or leave {size} out."
        )
    if (reason := UNSHARDED_OPTIMIZERS.get(config.optimizer.name)) is not None:
        raise ConfigError(
            f"{called('optimizer.name')} is {config.optimizer.name!r}, which {reason}: with {parallel} "
            f"{train.parallel!r} use 'adamw', 'adamw-bf16' or 'lion', or set {parallel} to 'ddp'."
        )
    if train.graphs:
        raise ConfigError(
            f"{called('train.graphs')} is true, but a CUDA graph cannot gather the weights of {parallel} "
            f"{train.parallel!r}: set one of the two otherwise."
        )


def open_group(device: torch.device) -> None:
    """Open a process group of one if nothing was launched: offloading is useful on one GPU too."""
    if not distributed.is_initialized():
        backend = BACKENDS.get(device.type, "gloo")
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def shard_size(config: JobConfig, processes: int) -> int:
    """The number of processes that share one copy of the weights."""
    train, called = config.train, config.called
    if train.parallel == "fsdp":
        return processes
    size = train.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if processes % size:
        raise ConfigError(
            f"{called('train.shard_size')} is {size}, which does not divide the {processes} processes of this run: set "
            f"it to one of {', '.join(str(n) for n in range(1, processes + 1) if processes % n == 0)}."
        )
    return size


def make_mesh(config: JobConfig, accelerator: Accelerator) -> DeviceMesh:
    """The processes as a line (fsdp), or as rows that hold a copy each (hsdp)."""
    size, device = shard_size(config, accelerator.num_processes), accelerator.device.type
    if config.train.parallel == "fsdp":
        return init_device_mesh(device, (size,), mesh_dim_names=("shards",))
    mesh = init_device_mesh(device, (accelerator.num_processes // size, size), mesh_dim_names=("copies", "shards"))
    for group in mesh.get_all_groups():  # new groups, which have torch's default timeout
        _set_pg_timeout(config.train.timeout, group)
    return mesh


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    config: JobConfig,
    accelerator: Accelerator,
    *,
    parts: Iterable[nn.Module] = (),
) -> None:
    """Shard a model in place, each of its `layers` by itself; the weights move to the device layer by layer.

    `parts` are modules that hold layers and are called separately, such as the experts of a model.
    """
    # FSDP2 warns of in-place changes to an output that is a view; the losses make none
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    mesh = make_mesh(config, accelerator)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )
    offload = _offload(config.train, accelerator.device)
    for layer in layers:
        _check_dtypes(layer, config)
        used = low if accelerator.mixed_precision == "bf16" else policy
        fully_shard(layer, mesh=mesh, mp_policy=used, offload_policy=offload)
    for module in (*parts, model):
        # by default the root stays gathered after a forward without a backward: training would go on with the average
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)


def _offload(train: LoopConfig, device: torch.device) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if train.cpu_offload else OffloadPolicy()


def _check_dtypes(layer: nn.Module, config: JobConfig) -> None:
    """Refuse trained weights of several dtypes, as FSDP2 would: a few models keep some in float32."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in layer.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        called = config.called("train.parallel")
        raise ConfigError(
            f"{called} is {config.train.parallel!r}, but the trained weights of a {type(layer).__name__} are "
            f"{' and '.join(sorted(dtypes))}, and shards need one dtype: train in float32, or set {called} to 'ddp'."
        )
