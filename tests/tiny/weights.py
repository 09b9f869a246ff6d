"""Random weights that hide nothing."""

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def randomised(model: Model, seed: int = 0, *, scale: float = 0.7) -> Model:
    """Draw all parameters anew: a projection that starts at zero would hide what comes before it.

    `scale` is about what a layer multiplies the size of its input by.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            gain = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            spread = scale / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + gain)
    return model.eval()
