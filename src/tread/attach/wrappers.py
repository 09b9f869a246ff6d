"""Modules that wrap another (compiled, checkpointed, sharded, adapted); routing attaches to the wrapped module."""

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

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


def naming_forward(module: nn.Module) -> Callable[..., Any]:
    """The `forward` whose signature names the arguments of `module`.

    It is the class's own, unless that passes `*args` on: then the next in the MRO, or that of the only module inside.
    """
    own = type(module).forward
    for cls in type(module).__mro__:
        if "forward" in cls.__dict__ and inspect.Parameter.VAR_POSITIONAL not in _kinds(cls.forward):
            return cls.forward
    children = list(module.children())
    if len(children) == 1 and set(_kinds(own)) <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return naming_forward(unwrapped(children[0]))
    return own


def _kinds(forward: Callable[..., Any]) -> list[Any]:
    """The kinds of a forward's parameters, without `self`."""
    return [parameter.kind for parameter in inspect.signature(forward).parameters.values()][1:]
