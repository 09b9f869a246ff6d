"""What nothing can beat: the FLOPs of a step, counted by torch on one eager step.

Counted are matrix products and attention, forward, backward and what checkpointing computes twice. The ratio of dense
to routed FLOPs is the speed-up that a device bound by arithmetic alone would show.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], Any], device: torch.device) -> int:
    """The FLOPs of one step, run without compiled code."""
    # attention on CPUs is not among the operations torch counts; as plain products it is
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    with torch.compiler.set_stance("force_eager"), attention, FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
