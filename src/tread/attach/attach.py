"""`attach`: routing on an unmodified model, through plain torch hooks.

- A hook on the model opens a state for each forward and drops it afterwards; the hooks of each layer gather and
  restore by it. Parameter names, `save_pretrained`, adapters and wrappers never notice; `detach` leaves no trace.
- What the family says of a forward's inputs is read here: how many tokens there are, and which of them are forced.
- This file and `hooks.py` are the only ones that touch stock models.
"""

import inspect
import operator
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread.attach import rotary
from tread.attach.family import Arguments, Family
from tread.attach.hooks import Checkpointing, HookedLayer
from tread.attach.registry import family_for
from tread.routing.errors import ConfigError
from tread.routing.forced import Forced
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.state import State

_KEY = "_tread_attachment"
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "PeftModel": "base_model.model",
}
"""Where torch.compile, torch's data parallelism and peft hold the model they wrap."""
_REFERENCES = (
    "the force mask does not cover just the target's tokens, or there are not as many reference tokens as in an "
    "earlier forward with as many tokens: give a mask of the target's (B, S), or set handle.references before each "
    "forward."
)


def attach(
    model: nn.Module,
    config: RoutePlan | Mapping[str, Any] | str | Path,
    *,
    seed: int | None = None,
    family: Family | None = None,
) -> "Attachment":
    """Route `model` by `config` from its next training forward on; `seed` replaces the config's.

    `family` says how a model of your own calls its layers; stock models are known, inside wrappers too. A second
    `attach` replaces the first, whose handle then refuses to be set. The handle is a context manager that detaches at
    the end.
    """
    model = _unwrapped(model)
    return Attachment(model, RoutePlan.from_config(config), family_for(model, family), seed=seed)


def _unwrapped(model: nn.Module) -> nn.Module:
    while path := next((_WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None):
        model = operator.attrgetter(path)(model)
    return model


class Attachment(Handle):
    """The handle of an attached model."""

    def __init__(self, model: nn.Module, plan: RoutePlan, family: Family, *, seed: int | None = None) -> None:
        found = [(stack, block) for stack in family.stacks for block in operator.attrgetter(stack.name)(model)]
        super().__init__(plan, depth=len(found), seed=seed)
        for index, (_, block) in enumerate(found):
            _check_not_wrapped(block, index)
        for stock in family.rotary:
            rotary.install(stock, self)
        if (attached := model.__dict__.get(_KEY)) is not None:  # nothing can be refused from here on
            attached.detach()
        self.model, self.family = model, family
        self.state = State()
        self.references: int | None = None
        """The number of reference tokens; None: read from the inputs, once per number of tokens."""
        self._references: dict[int, int] = {}
        self.layers = [HookedLayer(self, block, stack, index) for index, (stack, block) in enumerate(found)]
        self._parameters = list(inspect.signature(type(model).forward).parameters)[1:]
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._wrap_checkpointing(model)
        model.__dict__[_KEY] = self

    @property
    def attached(self) -> bool:
        """Whether the model still routes by it."""
        return self.model.__dict__.get(_KEY) is self

    def check_attached(self) -> None:
        """Refuse to ask for routing that the model would never hear of."""
        self._check_current()
        if not self.attached:
            raise ConfigError("this handle was detached, so its model runs dense: attach the model again.")

    def _check_current(self) -> None:
        """A loop may go on with a handle that was detached, but not with one whose model follows another."""
        if self.model.__dict__.get(_KEY, self) is not self:
            raise ConfigError("a later tread.attach of the same model replaced this handle: use the one it returned.")

    def set_step(self, step: int) -> None:
        """As of every handle."""
        self._check_current()
        super().set_step(step)

    @contextmanager
    def _set(self, **changes: object) -> Iterator[None]:
        if changes.get("on") is False:  # dense, as it is without
            self._check_current()
        else:
            self.check_attached()
        with super()._set(**changes):
            yield

    def detach(self) -> None:
        """Take routing off; the model is as it was. A second time does nothing."""
        if not self.attached:
            return
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.detach()
        if isinstance(function := self.model.__dict__.get("_gradient_checkpointing_func"), Checkpointing):
            self.model.__dict__["_gradient_checkpointing_func"] = function.inner
        for stock in self.family.rotary:
            rotary.remove(stock, self)
        del self.model.__dict__[_KEY]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied model is attached too: it needs the rotary functions as long as it lives."""
        self.__dict__.update(state)
        for stock in self.family.rotary:
            rotary.install(stock, self)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def kind(self, *, training: bool) -> tuple[Hashable, ...]:
        """As of every handle, and how many tokens are said to be references."""
        return *super().kind(training=training), self.references

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the state of one forward."""
        family = self.family
        self._wrap_checkpointing(model)
        for layer in self.layers:
            layer.follow_compile()
        if not self.is_on(training=model.training):
            self.state = self.begin(training=model.training)
            return
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        tokens = None if family.tokens is None else family.tokens(model, arguments)
        forced = Forced(
            references=self._count_references(model, arguments, tokens),
            references_at=family.references_at,
            pinned=0 if family.pinned is None else family.pinned(model, arguments),
        )
        self.state = state = self.begin(training=model.training, forced=forced)
        if family.refuse is not None and (reason := family.refuse(model, arguments)):
            raise ConfigError(f"{type(model).__name__} cannot be routed in this forward: {reason}")
        state.tokens = tokens
        if family.offset is not None:
            state.offset = family.offset(model, arguments)
        state.per_block = family.per_block or any(arguments.get(name) is not None for name in family.residuals)

    def _count_references(self, model: nn.Module, arguments: Arguments, tokens: int | None) -> int:
        """How many tokens are reference tokens that must stay.

        Where the inputs say it by a tensor, reading that waits for the device, so it happens once per number of tokens;
        or a force mask says it, which covers the target's tokens only. The device checks it in every forward, without
        a wait.
        """
        if self.family.references is None or self.plan.reference_tokens == "route" or tokens is None:
            return 0
        if self.references is not None:
            return self.references
        found = self.family.references(model, arguments)
        if not isinstance(found, Tensor):
            return found
        mask = self._mode.mask
        if mask is not None and mask.shape[1] > tokens:
            raise ConfigError(f"force_keep has shape {tuple(mask.shape)}; this forward has {tokens} tokens.")
        count = self._references.get(tokens) if mask is None else tokens - mask.shape[1]
        if count is None:
            count = _read(found)
            if not torch.compiler.is_compiling():  # a change seen by compiled code would compile it again
                self._references[tokens] = count
        torch._assert_async(found == count, _REFERENCES)  # pyright: ignore[reportPrivateImportUsage]
        return count

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Drop the state with the forward, after an error too: it holds tensors, and recomputations would see it."""
        state, self.state = self.state, State()
        if state.inside and output is not None:
            raise ConfigError("the forward ended inside a window of routing: the model skipped its last layers.")

    def _wrap_checkpointing(self, model: nn.Module) -> None:
        """Re-enabling checkpointing overwrites the function, so look at every forward."""
        function = getattr(model, "_gradient_checkpointing_func", None)
        if function is not None and not isinstance(function, Checkpointing):
            model.__dict__["_gradient_checkpointing_func"] = Checkpointing(self, self.layers, function)


def _check_not_wrapped(block: nn.Module, index: int) -> None:
    if type(block).__name__ == "CheckpointWrapper":
        raise ConfigError(
            f"layer {index} is inside torch's checkpoint_wrapper, whose recomputation would route a second time. "
            "Use the model's own enable_gradient_checkpointing() instead."
        )


@torch.compiler.assume_constant_result
def _read(count: Tensor) -> int:
    """The value of a count on the device; a constant in compiled code."""
    return int(count)
