"""AdamW and Lion with 8-bit moments: bitsandbytes' own, which run on CPUs and GPUs alike.

- Their state is made flat, a mapping of plain tensors, so that a checkpoint is safetensors. The code books are the same
  for every parameter: they are not saved, and restored on loading.
- A step does not synchronise with the device, as the library's own would.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tread.errors import needs


def adamw_8bit(params: Sequence[nn.Parameter], **settings: Any) -> Optimizer:
    """AdamW (Dettmers et al. 2022, arXiv 2110.02861) with moments in blocks of 8-bit numbers."""
    return _classes()["adamw"](params, **settings)


def lion_8bit(params: Sequence[nn.Parameter], **settings: Any) -> Optimizer:
    """Lion with its momentum in blocks of 8-bit numbers."""
    return _classes()["lion"](params, **settings)


@cache
def _classes() -> dict[str, Any]:
    """The optimizers by name; defined on first use, because their base class is in an optional library."""
    with needs("8-bit optimizers need bitsandbytes", "quant"):
        optim: Any = importlib.import_module("bitsandbytes.optim")
        base: Any = importlib.import_module("bitsandbytes.optim.optimizer").Optimizer8bit

    books = {"qmap1": "dynamic", "qmap2": "udynamic"}

    class Flat(base):
        """The library's base class with a flat state and a step that does not synchronise."""

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
