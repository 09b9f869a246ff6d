"""The optimizers by their config names.

- `adamw` and `adafactor` are torch's; `lion` is small enough to be written here; the others have files of their own:
  `adamw_bf16.py`, `eight_bit.py`, `muon.py`, and `self_tuned.py` for `prodigy` and `adamw-schedule-free`.
- Every state is a flat mapping of plain tensors, so that a checkpoint is safetensors and a resumed run is bit-equal.
- Sharded weights are DTensors: adamw, adamw-bf16 and lion work on them (`sharding/layout.py` refuses the others).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tread.errors import check_choice
from tread.training.optimizers.adamw_bf16 import AdamWBF16
from tread.training.optimizers.eight_bit import adamw_8bit, lion_8bit
from tread.training.optimizers.muon import MuonWithAdamW
from tread.training.optimizers.self_tuned import prodigy, schedule_free
from tread.training.settings import OptimizerConfig


def make_optimizer(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig, embeddings: Sequence[Tensor] = ()
) -> Optimizer:
    """The optimizer that `config.name` names, over all of `parameters`; Muon leaves `embeddings` to AdamW."""
    make = OPTIMIZERS[check_choice(config.name, "optimizer.name", OPTIMIZERS)]
    arguments: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name != "adafactor":  # it has no betas
        arguments["betas"] = config.betas
    if config.name.startswith(("adamw", "muon", "prodigy")):
        arguments["eps"] = config.eps
    if config.name == "muon":
        arguments["embeddings"] = embeddings
    if config.name == "adamw":
        arguments["fused"] = all(parameter.is_cuda for parameter in parameters)
    return make(list(parameters), **arguments)


def keeps_average(optimizer: Optimizer) -> bool:
    """Whether an optimizer averages the weights itself, as the schedule-free one does."""
    return hasattr(optimizer, "averaged")


def averaged_weights(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Inside, the parameters hold the optimizer's average; unchanged if it keeps none."""
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
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-8bit": adamw_8bit,
    "adamw-bf16": AdamWBF16,
    "lion": Lion,
    "lion-8bit": lion_8bit,
    "adamw-schedule-free": schedule_free,
    "prodigy": prodigy,
    "muon": MuonWithAdamW,
    "adafactor": torch.optim.Adafactor,  # scales its steps by each weight: needs about a hundred times AdamW's rate
}
