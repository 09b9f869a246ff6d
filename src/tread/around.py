"""Wrapping the `forward` of stock modules, for calls of the module and of `module.forward(...)` itself.

Libraries replace `forward` on the instance and remember the old one (accelerate's hooks and mixed precision, diffusers'
hooks, `block.forward = torch.compile(block.forward)`), before or after us. So the class gets a data descriptor instead
of its function: for an attached module it returns `module.forward`, whatever that is, wrapped; for any other module it
returns it unchanged. Assignments and deletions by others go to the instance as always. No name, hook or parameter of a
module changes, deep copies and pickles carry nothing, and the class is restored when its last attached module is gone.

Libraries of kernels assign `forward` to the class, which removes the descriptor. Python tells nobody of that, so a
handle looks for it before a forward (`is_patched`) and wraps the replacement, which stays when the wrapper goes.
"""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

Outer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with a function and its arguments; returns the function's output."""
_KEY = "_tread"
_inner: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
"""Wrapper function -> what it wraps. Not an attribute of the function: libraries copy those."""


class Around:
    """A wrapper around a module's `forward`; this one changes nothing."""

    def __init__(self) -> None:
        self.quiet = False
        """Whether `forward` is called unwrapped, because this wrapper is what calls it."""
        self.outer: Outer | None = None
        """Runs `call`, for example as a CUDA graph; None: it is called as it is."""
        self._patches: set[_Forward] = set()
        """The descriptors of the modules it is on: another one where a class, or its `forward`, was replaced."""

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of `module`: the one it was put on, or a shallow copy; `forward` is the wrapped function."""
        return forward(*args, **kwargs)

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call`, through `outer` if there is one."""
        if self.outer is None:
            return self.call(module, forward, args, kwargs)
        return self.outer(lambda *args, **kwargs: self.call(module, forward, args, kwargs), args, kwargs)

    def put_on(self, module: nn.Module) -> None:
        """Wrap `module` from now on, replacing an earlier wrapper."""
        patch = _patched(type(module))
        patch.users.add(self)
        self._patches.add(patch)
        module.__dict__[_KEY] = self

    def take_off(self, module: nn.Module) -> None:
        """Unwrap `module`, if this is its wrapper."""
        if around(module) is self:
            del module.__dict__[_KEY]
        for patch in self._patches:
            patch.users.discard(self)
            if not patch.users:
                patch.remove()
        self._patches.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """None: a module that was copied or pickled is not attached."""
        return type(None), ()


def around(module: nn.Module) -> Around | None:
    """The wrapper of a module, or None."""
    return module.__dict__.get(_KEY)


def module_of(call: Any) -> Any:
    """The module that a call runs: some models checkpoint `block.__call__` instead of `block`."""
    return getattr(call, "__self__", call)


def is_patched(cls: type) -> bool:
    """Whether the modules of a class run their wrappers."""
    return isinstance(_first(cls), _Forward)


def _patched(cls: type) -> "_Forward":
    patch = cls.__dict__.get("forward")
    if not isinstance(patch, _Forward):
        patch = _Forward(cls)
        cls.forward = patch
    return patch


class _Forward:
    """The `forward` of a class with attached modules; a data descriptor, so that it precedes instance attributes."""

    def __init__(self, cls: type) -> None:
        self._class, self._own = cls, cls.__dict__.get("forward")
        self._own_function = None if self._own is None else cls.forward
        self.users: WeakSet[Around] = WeakSet()
        """The wrappers of the class's modules; weak, as a module may be freed without detaching."""

    @property
    def stock(self) -> Any:
        """The class's own function, or what it inherits now."""
        if self._own is not None:
            return self._own_function
        return super(self._class, self._class).forward  # pyright: ignore[reportAttributeAccessIssue]

    def remove(self) -> None:
        """Restore the class's own function, or inheritance if it had none; leave what replaced this since."""
        if self._class.__dict__.get("forward") is not self:
            return
        del self._class.forward
        if self._own is not None:
            self._class.forward = self._own

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self.stock
        here, own = getattr(module, _KEY, None), module.__dict__.get("forward")
        if torch.compiler.is_compiling():
            forward = functools.partial(self.stock, module) if own is None else own
            return forward if here is None or here.quiet else functools.partial(_called, here, module, forward)
        if _first(type(module)) is not self:  # called through super(), which ignores the instance
            return MethodType(self.stock, module)
        own = MethodType(self.stock, module) if own is None else own
        if here is None:
            return own
        if isinstance(own, MethodType) and own.__self__ is module:
            return MethodType(_wrapped(own.__func__), module)
        return _Wrapped(module, own)

    def __set__(self, module: nn.Module, value: Any) -> None:
        if isinstance(value, _Wrapped):  # assigns a wrapper that __get__ returned
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
    """The `forward` that a lookup on the class finds."""
    return next(base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__)


def _called(here: Around, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return here.call(module, forward, args, kwargs)


def _wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A module's method `inner`, called through the module's wrapper at that time. A plain function, because accelerate
    takes bound methods apart, and without a reference to the module, because copies share it."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = around(self)
        if here is None or here.quiet:
            return inner(self, *args, **kwargs)
        return here.run(self, functools.partial(inner, self), args, kwargs)

    _inner[forward] = inner
    return forward


class _Wrapped:
    """The same for other callables, such as accelerate's and compiled functions."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        self.module, self.inner = module, inner
        functools.update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = around(self.module)
        if here is None or here.quiet:
            return self.inner(*args, **kwargs)
        return here.run(self.module, self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)
