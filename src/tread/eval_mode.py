"""Eval mode for a while, for validation, samples and measurements."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(net: object) -> Iterator[None]:
    """Eval mode inside; afterwards the mode of every module is restored. Nothing to do for what is no module."""
    if not isinstance(net, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        net.train(modes[0][1])  # the net comes first in modules(); calls an overridden train()
        for module, mode in modes:
            module.training = mode
