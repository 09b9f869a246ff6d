"""The FLOPs of a step, counted by torch's formulas on one eager step: the bound on any speed-up.

Matrix products and attention are counted, in forward, backward and recomputation under checkpointing. The ratio of
dense to routed FLOPs is the speed-up of a purely compute-bound device.
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
    """The FLOPs of one step."""

    products: int
    attention: int
    """FLOPs of attention kernels; 0 on CPUs, where attention counts as matrix products."""

    @property
    def total(self) -> int:
        return self.products + self.attention


def count_flops(step: Callable[[], Any], device: torch.device) -> Flops:
    """The FLOPs of one step, run without compiled code."""
    # torch has no FLOP formula for the CPU attention kernel; the MATH backend uses plain matrix products
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    with torch.compiler.set_stance("force_eager"), attention, Counter() as counter:
        step()
    return Flops(counter.products, counter.attention)


class Counter(TorchDispatchMode):
    """Torch's FlopCounterMode without its counts per module, which keep recomputed activations alive."""

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
    """Attention arguments with keys and values expanded to the query's heads: older torch formulas refuse GQA."""
    shapes = {n: x.shape for n, x in enumerate(args) if isinstance(x, torch.Tensor) and x.ndim == 4}
    heads = max(shape[1] for shape in shapes.values())
    new = {n: torch.empty((s[0], heads, *s[2:]), device="meta") for n, s in shapes.items()}
    return [new.get(n, x) for n, x in enumerate(args)]
