"""Routing around the `forward` of stock modules: of their calls, and of `module.forward(...)` itself.

The class's `forward` is replaced by one that looks at the instance: where an attached module carries something that
stands around it, that is called, and everywhere else the stock function. So the patches that accelerate and diffusers
put on an instance's `forward`, which end in the class's, work in any order of putting on and taking off; a deep copy
or a pickle of an attached module carries nothing; and no hook, name or parameter of a module changes. A class is as it
was when its last attached module is gone.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakSet

from torch import nn

_KEY = "_tread"
_users: dict[type, WeakSet["Around"]] = {}
"""What stands around modules of each patched class; a module that is gone needs it no more."""


class Around:
    """What is called in the place of a module's `forward`."""

    def __init__(self) -> None:
        self.quiet = False
        """Whether the stock function runs alone, because routing happens further out."""
        self._class: type = nn.Module

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output; `forward` is the module's own."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Stand around `module` from now on, in the place of whatever did."""
        self._class = type(module)  # fully_shard gives a module another, which inherits from it
        _patch(self._class).add(self)
        module.__dict__[_KEY] = self

    def take_off(self, module: nn.Module) -> None:
        """Leave `module`, if it is still there."""
        if around(module) is self:
            del module.__dict__[_KEY]
        users = _users.get(self._class)
        if users is not None:
            users.discard(self)
            if not users:
                _unpatch(self._class)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module is a stock one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def around(module: nn.Module) -> Around | None:
    """What stands around a module."""
    return module.__dict__.get(_KEY)


def _patch(cls: type) -> WeakSet[Around]:
    if cls not in _users:
        _users[cls] = WeakSet()
        cls.forward = _looking(cls.__dict__.get("forward"), cls.forward)
    return _users[cls]


def _unpatch(cls: type) -> None:
    del _users[cls]
    patched = cls.__dict__.get("forward")
    if getattr(patched, "looks", False):  # else another library patched the class since: ours does nothing inside
        if patched.own is None:
            del cls.forward
        else:
            cls.forward = patched.own


def _looking(own: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock function for modules with nothing around them; `own` is the class's, None where it inherits it."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = getattr(self, _KEY, None)
        if here is None or here.quiet:
            return stock(self, *args, **kwargs)
        return here.call(MethodType(stock, self), args, kwargs)

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(forward, name, getattr(stock, name))
    # no __wrapped__: accelerate unwraps by it, and would go past this function
    forward.__signature__ = inspect.signature(stock)  # pyright: ignore[reportFunctionMemberAccess]
    vars(forward).update(looks=True, own=own)
    return forward
