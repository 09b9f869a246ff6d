"""Routing around the `forward` of stock modules: of their calls, and of `module.forward(...)` itself.

Libraries replace `forward` on the instance and remember what was there (accelerate's hooks and mixed precision,
diffusers' hooks, `block.forward = torch.compile(block.forward)`), in any order with ours. So the class gets a
descriptor in the place of its function: whatever `module.forward` would be, it comes back with something around it
where the module is attached, and as it is everywhere else. What others put on or take off goes to the instance as
always. No name, hook or parameter of a module changes, deep copies and pickles carry nothing, and a class is as it was
when its last attached module is gone.
"""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

_KEY = "_tread"
_inner: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
"""What each function that was given out stands around. (Others copy a function's attributes, so it has none.)"""


class Around:
    """What is called in the place of a module's `forward`."""

    def __init__(self) -> None:
        self.quiet = False
        """Whether `forward` runs as it is, because this is what runs it."""
        self._class: type = nn.Module

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output; `forward` is the module's own."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Stand around `module` from now on, in the place of whatever did."""
        self._class = type(module)  # fully_shard gives a module another, which inherits from it
        _patched(self._class).users.add(self)
        module.__dict__[_KEY] = self

    def take_off(self, module: nn.Module) -> None:
        """Leave `module`, if it is still there."""
        if around(module) is self:
            del module.__dict__[_KEY]
        patch = self._class.__dict__.get("forward")
        if isinstance(patch, _Forward):
            patch.users.discard(self)
            if not patch.users:
                patch.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module is a stock one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def around(module: nn.Module) -> Around | None:
    """What stands around a module."""
    return module.__dict__.get(_KEY)


def _patched(cls: type) -> "_Forward":
    patch = cls.__dict__.get("forward")
    if not isinstance(patch, _Forward):
        patch = _Forward(cls)
        cls.forward = patch
    return patch


class _Forward:
    """The `forward` of a class some of whose modules are attached; a data descriptor, so that it comes before what is
    set on an instance."""

    def __init__(self, cls: type) -> None:
        self._class, self._own, self.stock = cls, cls.__dict__.get("forward"), cls.forward
        self.users: WeakSet[Around] = WeakSet()
        """What stands around modules of the class; one that is gone with its module needs it no more."""

    def remove(self) -> None:
        """Put back what the class had: its own function, or what it inherits."""
        del self._class.forward
        if self._own is not None:
            self._class.forward = self._own

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self.stock
        here, own = getattr(module, _KEY, None), module.__dict__.get("forward")
        if torch.compiler.is_compiling():
            forward = functools.partial(self.stock, module) if own is None else own
            return forward if here is None or here.quiet else functools.partial(_called, here, forward)
        if _first(type(module)) is not self:  # by super(), which knows nothing of the instance
            return MethodType(self.stock, module)
        own = MethodType(self.stock, module) if own is None else own
        if here is None:
            return own
        if isinstance(own, MethodType) and own.__self__ is module:
            return MethodType(_looking(own.__func__), module)
        return _Looking(module, own)

    def __set__(self, module: nn.Module, value: Any) -> None:
        if isinstance(value, _Looking):  # what was read comes back
            value = value.inner
        elif isinstance(value, MethodType) and value.__func__ in _inner:
            value = MethodType(_inner[value.__func__], value.__self__)
        if isinstance(value, MethodType) and value.__func__ is self.stock and value.__self__ is module:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__["forward"]


def _first(cls: type) -> Any:
    """Where a lookup of `forward` on a class ends."""
    return next(base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__)


def _called(here: Around, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return here.call(forward, args, kwargs)


def _looking(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A module's method `inner`, called through what stands around the module by then; a function, which accelerate
    takes apart, and which knows no module, because it is shared with copies."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = around(self)
        if here is None or here.quiet:
            return inner(self, *args, **kwargs)
        return here.call(functools.partial(inner, self), args, kwargs)

    _inner[forward] = inner
    return forward


class _Looking:
    """The same for what is no method of the module, such as accelerate's and compiled functions."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        self.module, self.inner = module, inner
        functools.update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = around(self.module)
        return self.inner(*args, **kwargs) if here is None or here.quiet else here.call(self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)
