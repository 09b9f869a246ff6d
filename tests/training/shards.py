"""Run in each of two processes: the pieces that meet shards, one by one; each rank writes down what came of them.

`main(folder)` writes `rank-N.pt`, and `saves/` with checkpoints. The test computes
`round_stochastically(bf16_weights())` alone.
"""

import resource
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tread.kernels.checkpointing import Checkpointing
from tread.kernels.fast import Fast
from tread.models import DiT
from tread.routing.handle import Handle
from tread.training.optimizers.adamw_bf16 import AdamWBF16
from tread.training.optimizers.ema import EMA
from tread.training.sharding.layout import open_group
from tread.training.sharding.saver import Saver

MODES: dict[str, Checkpointing | None] = {
    "eager": None,
    "compiled": False,
    "checkpointed": True,
    "selective": "selective",
}
"""Compiled layers with each sort of checkpointing; None: not compiled."""
LIMIT = 2000
"""Bytes of the largest file that rank 1 may write when its disk is full."""


def bf16_weights() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 1)).to(torch.bfloat16)  # 9 rows and 1 do not divide by 2


def round_stochastically(model: nn.Module) -> list[Tensor]:
    """The weights and moments after three steps of adamw-bf16 on gradients that are all 1."""
    optimizer = AdamWBF16(list(model.parameters()), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [whole(tensor) for tensor in (*model.parameters(), *states)]


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def network() -> tuple[DiT, Handle]:
    torch.manual_seed(0)
    model = DiT(input_size=(8, 8), in_channels=1, num_classes=10, patch=2, depth=4, width=16, heads=2)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model, model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}]}, seed=1)


def steps(model: DiT, handle: Handle) -> list[Tensor]:
    """The gradients of two routed steps."""
    generator = torch.Generator().manual_seed(0)
    x, time = torch.randn(2, 1, 8, 8, generator=generator), torch.rand(2, generator=generator)
    for step in range(2):
        handle.set_step(step)
        model(x, time, torch.tensor([1, 2])).square().mean().backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


def sharded(model: nn.Module, layers: Any = ()) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def compiled_steps() -> dict[str, tuple[list[Tensor], int]]:
    """Gradients by mode, and how many graphs were compiled."""
    found = {}
    for mode, checkpointing in MODES.items():
        model, handle = network()
        sharded(model, model.blocks)
        counters.clear()
        compiled, options = checkpointing is not None, {"shapes": 2, "backend": "aot_eager"}
        fast = Fast(model, list(model.blocks), [handle], compiled=compiled, checkpointing=checkpointing, **options)
        gradients = steps(model, handle)
        found[mode] = gradients, counters["stats"]["unique_graphs"]
        assert not fast.failed
        fast.remove()
        torch._dynamo.reset()
    return found


def averaged() -> tuple[list[Tensor], list[Tensor]]:
    """The weights of a sharded model with its average in place, and after."""
    model = sharded(bf16_weights().float())
    average = EMA(model, decay=0.5, warmup=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    average.update(5)
    with average.applied():
        inside = [whole(parameter) for parameter in model.parameters()]
    return inside, [whole(parameter) for parameter in model.parameters()]


def saves(folder: Path) -> list[str]:
    """The errors of three saves, with weights that change meanwhile; rank 1's disk is full at the second."""
    model = sharded(nn.Linear(64, 64, bias=False))
    saver, errors = Saver(torch.device("cpu"), timedelta(minutes=1)), []
    for step in range(1, 4):
        with torch.no_grad():
            model.weight.fill_(step)  # pyright: ignore[reportCallIssue]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step == 2 and distributed.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            saver.start(folder, step, {"model": {"weight": model.weight.detach()}}, {}, keep=5)  # pyright: ignore[reportCallIssue]
            with torch.no_grad():
                model.weight.fill_(-1)  # pyright: ignore[reportCallIssue]
            saver.wait()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return errors


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    open_group(torch.device("cpu"))  # there is one
    found = {
        "rounded": round_stochastically(sharded(bf16_weights())),
        "compiled": compiled_steps(),
        "averaged": averaged(),
        "errors": saves(folder / "saves"),
    }
    torch.save(found, folder / f"rank-{distributed.get_rank()}.pt")
    distributed.destroy_process_group()
