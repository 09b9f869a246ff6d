"""Modules that wrap another: compiled, checkpointed, sharded, adapted. Routing sits on what they wrap."""

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
"""Class name -> the attribute that holds what it wraps."""


def wrapped_in(module: nn.Module) -> Iterator[nn.Module]:
    """What `module` wraps, and what that wraps, from the outermost to the innermost."""
    while path := next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None):
        module = operator.attrgetter(path)(module)
        yield module


def unwrapped(module: nn.Module) -> nn.Module:
    """The innermost module."""
    return [module, *wrapped_in(module)][-1]
