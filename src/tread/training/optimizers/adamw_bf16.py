"""AdamW for bfloat16 weights, with stochastic rounding.

The rounding is a hash of (step, parameter, element): unbiased, and equal on every rank and for every sharding of the
weights, unlike draws from torch's generator.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from tread.routing import noise

ROUNDING = int.from_bytes(b"roun")
"""First word of the hash, which separates it from other noise."""


class AdamWBF16(Optimizer):
    """AdamW that keeps bfloat16 parameters and their moments in bfloat16, with stochastic rounding.

    Rounding to nearest would lose every update below 1/256 of a weight, which is nearly all of them; stochastic
    rounding keeps them in expectation. It needs half the memory of float32 weights with float32 moments. Float32
    parameters get plain AdamW.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                self._update(parameter, state, group, index)

    @staticmethod
    def _update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], index: int) -> None:
        step = int(state["step"])  # a CPU tensor: no synchronisation
        beta1, beta2 = group["betas"]
        own, mean_kept, square_kept = map(_local, (parameter, state["exp_avg"], state["exp_avg_sq"]))
        gradient = _local(parameter.grad).float()  # pyright: ignore[reportArgumentType]
        mean = mean_kept.float().lerp(gradient, 1 - beta1)
        square = square_kept.float().lerp(gradient.square(), 1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight = own.float() * (1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
        chance = _chance(parameter, step, index) if parameter.dtype == torch.bfloat16 else None
        for kept, value in ((own, weight), (mean_kept, mean), (square_kept, square)):
            kept.copy_(value if chance is None else round_to_bf16(value, chance))


def round_to_bf16(x: Tensor, chance: Tensor) -> Tensor:
    """Float32 -> bfloat16 by stochastic rounding, unbiased; `chance` int32 in [0, 2**16), shaped like x."""
    # bfloat16 drops the low 16 bits; adding a random number below 2**16 carries with their probability
    bits = (x.view(torch.int32) + chance) & -65536
    return bits.view(torch.float32).bfloat16()


def _local(tensor: Tensor) -> Tensor:
    """The shard that this process holds; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _chance(parameter: Tensor, step: int, index: int) -> Tensor:
    """16 random bits for every element that this process holds, two elements per hash; equal for every sharding."""
    half = (parameter.numel() + 1) // 2
    if isinstance(parameter, DTensor):  # sharded by rows
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        first = offset[0] * math.prod(parameter.shape[1:])
        element = torch.arange(first, first + math.prod(shape), device=parameter.to_local().device)
        both = noise.bits(ROUNDING, step, index, element % half)
        return torch.where(element < half, both & 0xFFFF, both >> 16).to(torch.int32).view(*shape)
    both = noise.bits(ROUNDING, step, index, torch.arange(half, device=parameter.device))
    halves = torch.cat([both & 0xFFFF, both >> 16])[: parameter.numel()]
    return halves.to(torch.int32).view(parameter.shape)
