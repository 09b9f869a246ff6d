"""A small DiT with no parameter at zero: a fresh one is the identity on the stream and would prove nothing."""

from typing import Any

import torch

from tread.models import DiT

SMALL: dict[str, Any] = {
    "input_size": (6, 10),
    "patch": 2,
    "in_channels": 3,
    "depth": 6,
    "width": 32,
    "heads": 4,
    "num_classes": 5,
}
MODERN: dict[str, Any] = {"rope": True, "qk_norm": True, "norm": "rms", "mlp": "swiglu"}


def small_dit(**changes: Any) -> DiT:
    """A float64 DiT in training mode, every parameter drawn from N(0, 0.2)."""
    model = DiT(**(SMALL | changes)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model
