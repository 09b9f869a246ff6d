"""The optimizers by their config names.

- `adamw` and `adafactor` are torch's; `adamw-8bit` and `lion-8bit` are bitsandbytes', which run on CPUs and GPUs alike;
  `lion` and `adamw-bf16` are small enough to be written here. `muon` joins torch's Muon and AdamW (`muon.py`);
  `prodigy` and `adamw-schedule-free` are their authors' (`self_tuned.py`).
- Every state is a flat mapping of plain tensors, so that a checkpoint is safetensors and a resumed run is bit-equal.
  Bitsandbytes' code books are the same for every parameter: they are not saved, and restored on loading.
- `adamw-bf16` rounds by a hash of (step, parameter, element): unbiased, and the same on every rank and however the
  weights are sharded, which torch's generator would not be.
- Sharded weights are DTensors: adamw, adamw-bf16 and lion work on them (`sharding/layout.py` refuses the others).
"""

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from tread.errors import check_choice, needs
from tread.routing import noise
from tread.training.optimizers.muon import MuonWithAdamW
from tread.training.optimizers.self_tuned import prodigy, schedule_free
from tread.training.settings import OptimizerConfig

ROUNDING = int.from_bytes(b"roun")


def make_optimizer(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig, embeddings: Sequence[Tensor] = ()
) -> Optimizer:
    """The optimizer that `config.name` names, over all of `parameters`; Muon leaves `embeddings` to AdamW."""
    make = OPTIMIZERS[check_choice(config.name, "optimizer.name", OPTIMIZERS)]
    arguments: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name != "adafactor":  # it has no betas
        arguments["betas"] = tuple(config.betas)
    if config.name.startswith(("adamw", "muon", "prodigy")):
        arguments["eps"] = config.eps
    if config.name == "muon":
        arguments["embeddings"] = embeddings
    if config.name == "adamw":
        arguments["fused"] = all(parameter.is_cuda for parameter in parameters)
    return make(list(parameters), **arguments)


def keeps_average(optimizer: Optimizer) -> bool:
    """Whether an optimizer averages the weights by itself, as the schedule-free one does."""
    return hasattr(optimizer, "averaged")


def averaged_weights(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Inside, the parameters hold the average that the optimizer keeps; without one they stay as they are."""
    return getattr(optimizer, "averaged", nullcontext)()


def applied_rate(optimizer: Optimizer) -> float:
    """The learning rate of the last step; Prodigy's is its estimate times the configured factor."""
    group = optimizer.param_groups[0]
    return group["lr"] * group.get("d", 1.0)


# Chen et al. 2023 (arXiv 2302.06675), Algorithm 2
class Lion(Optimizer):
    """Lion: steps by the sign of an interpolation of momentum and gradient; needs about a tenth of AdamW's rate."""

    def __init__(
        self, params: Sequence[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                direction = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


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
    """16 random bits for every element that this process holds, two from each hash; the same however it is sharded."""
    half = (parameter.numel() + 1) // 2
    if isinstance(parameter, DTensor):  # by rows
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


@cache
def _bitsandbytes() -> dict[str, Any]:
    """Bitsandbytes' optimizers with a flat state of plain tensors and without a synchronisation in each step."""
    with needs("8-bit optimizers need bitsandbytes", "quant"):
        optim: Any = importlib.import_module("bitsandbytes.optim")
        base: Any = importlib.import_module("bitsandbytes.optim.optimizer").Optimizer8bit

    books = {"qmap1": "dynamic", "qmap2": "udynamic"}

    class Flat(base):
        def state_dict(self) -> dict[str, Any]:
            whole = Optimizer.state_dict(self)  # the library's own would nest the quantized tensors
            kept = {
                index: {name: value for name, value in values.items() if name not in books}
                for index, values in whole["state"].items()
            }
            return {**whole, "state": kept}

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            # the step is a Python number to the library, which would round a tensor to the parameter's precision
            state = {index: {**values, "step": int(values["step"])} for index, values in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state}, move_to_device)
            for parameter, values in self.state.items():
                if values["state1"].dtype == torch.uint8:
                    for name, book in books.items():
                        values[name] = self.name2qmap[book].to(parameter.device)

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for i, group in enumerate(self.param_groups):
                for j, parameter in enumerate(group["params"]):
                    if parameter.grad is not None:
                        if not self.state[parameter]:
                            self.init_state(group, parameter, i, j)
                        self.update_step(group, parameter, i, j)

    class AdamW8bit(Flat, optim.AdamW8bit): ...

    class Lion8bit(Flat, optim.Lion8bit): ...

    return {"adamw": AdamW8bit, "lion": Lion8bit}


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-8bit": lambda *given, **settings: _bitsandbytes()["adamw"](*given, **settings),
    "adamw-bf16": AdamWBF16,
    "lion": Lion,
    "lion-8bit": lambda *given, **settings: _bitsandbytes()["lion"](*given, **settings),
    "adamw-schedule-free": schedule_free,
    "prodigy": prodigy,
    "muon": MuonWithAdamW,
    "adafactor": torch.optim.Adafactor,  # scales its steps by each weight: needs about a hundred times AdamW's rate
}
