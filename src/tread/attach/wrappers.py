"""Modules that wrap another (compiled, checkpointed, sharded, adapted); routing attaches to the wrapped module."""

import operator
from collections.abc import Iterator

from torch import nn

_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "PeftModel": "base_model.model",
}
"""Class name -> the attribute that holds the wrapped module."""


def wrapped_in(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that `module` wraps, from the outermost to the innermost."""
    while path := next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None):
        module = operator.attrgetter(path)(module)
        yield module


def unwrapped(module: nn.Module) -> nn.Module:
    """The innermost module."""
    return [module, *wrapped_in(module)][-1]
