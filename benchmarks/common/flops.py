"""What nothing can beat: the FLOPs of a step, counted by torch's formulas on one eager step.

Counted are matrix products and attention, forward, backward and what checkpointing computes twice. The ratio of dense
to routed FLOPs is the speed-up that a device bound by arithmetic alone would show.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Flops:
    """Of one step."""

    products: int
    attention: int
    """What torch counts as attention; on CPUs it is among the products."""

    @property
    def total(self) -> int:
        return self.products + self.attention


def count_flops(step: Callable[[], Any], device: torch.device) -> Flops:
    """The FLOPs of one step, run without compiled code."""
    # attention on CPUs is not among the operations torch counts; as plain products it is
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    with torch.compiler.set_stance("force_eager"), attention, Counter() as counter:
        step()
    return Flops(counter.products, counter.attention)


class Counter(TorchDispatchMode):
    """Torch's FlopCounterMode without its count by modules, which keeps what checkpointing has computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            attention = "attention" in str(func)
            shaped = _all_heads(args) if attention else args
            flops = flop_registry[func._overloadpacket](*shaped, **kwargs, out_val=out)
            if attention:
                self.attention += flops
            else:
                self.products += flops
        return out


def _all_heads(args: Sequence[Any]) -> list[Any]:
    """Arguments of attention in which keys and values have the query's heads: older formulas of torch refuse fewer."""
    shapes = {n: x.shape for n, x in enumerate(args) if isinstance(x, torch.Tensor) and x.ndim == 4}
    heads = max(shape[1] for shape in shapes.values())
    new = {n: torch.empty((s[0], heads, *s[2:]), device="meta") for n, s in shapes.items()}
    return [new.get(n, x) for n, x in enumerate(args)]
