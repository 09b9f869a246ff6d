"""Run in each of two processes: one routed step per model, and the gradients that came of it.

Each rank takes one sample of the batch; the folder receives `CASE-MODE.pt` with the full gradients
and `CASE-MODE-RANK.json` with the rank's selection.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tread
from tests.attach.attached import BY_NAME
from tests.tiny.case import Case, one_sample

NAMES = ("flux", "sd3", "wan")
MODES = ("ddp", "ddp-checkpointed", "fsdp2", "fsdp2-checkpointed", "fsdp2-wrapped", "fsdp1-wrapped")
STEPS = [*((name, mode) for name in NAMES for mode in MODES), ("sd3", "ddp-compiled")]
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -1}]}
STEP = 3


def wrapped(case: Case, model: Any, mode: str) -> Any:
    """DDP around a model; FSDP layer by layer and whole, with torch's checkpoint_wrapper around each layer or not."""
    if mode.startswith("ddp"):
        return DistributedDataParallel(model)
    if mode.endswith("wrapped"):
        classes = {type(layer) for _, layer in case.layers(model)}
        apply_activation_checkpointing(model, check_fn=lambda module: type(module) in classes)
    if mode.startswith("fsdp1"):
        policy = ModuleWrapPolicy({CheckpointWrapper})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = init_device_mesh("cpu", (2,))
    for _, layer in case.layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(case: Case, mode: str, folder: Path, rank: int) -> None:
    model = case.model()
    if mode.endswith("checkpointed"):
        model.enable_gradient_checkpointing()
    called = wrapped(case, model, mode)
    handle = tread.attach(called, ROUTES)  # found inside DDP, and through the MRO of the class FSDP2 makes
    if mode.endswith("compiled"):
        handle.compile(backend="aot_eager", graphs=True)  # says that graphs are for one GPU, and goes on
    handle.set_step(STEP)
    case.call(called, one_sample(case.inputs(2), 2, rank)).square().mean().backward()
    gradients = {}
    whole = FullyShardedDataParallel.summon_full_params(called, with_grads=True) if "fsdp1" in mode else nullcontext()
    with whole:
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            for wrapper in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
                name = name.replace(wrapper, "")
            gradients[name] = (
                grad.full_tensor() if isinstance(grad, DTensor) else None if grad is None else grad.clone()
            )
    (folder / f"{case.name}-{mode}-{rank}.json").write_text(json.dumps(handle.selections[0].tolist()))
    if rank == 0:
        torch.save(gradients, folder / f"{case.name}-{mode}.pt")
    handle.detach()


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    for name, mode in STEPS:
        step(BY_NAME[name], mode, folder, distributed.get_rank())
    distributed.destroy_process_group()
