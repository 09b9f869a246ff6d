"""`attach`: routing on an unmodified model.

- The `forward` of the model and of each layer is wrapped (`wiring.py`): the model's wrapper opens a state for each
  forward, and the layers' wrappers gather and restore by it. Parameter names, `save_pretrained`, adapters and module
  wrappers are not affected; `detach` restores the model exactly.
- The family's functions of a forward's inputs (number of tokens, forced tokens, offset) are called here.
- `compile` makes the model fast (`tread.kernels.fast`); `detach` takes that off too.
- A recomputation uses the state of its forward (`tread.routing.recompute`), detached or not.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tread.around import Around, around, is_patched
from tread.attach.family import Arguments, Family
from tread.attach.references import References
from tread.attach.registry import family_for
from tread.attach.wiring import Wiring, layer_modules
from tread.attach.wrappers import naming_forward, unwrapped
from tread.errors import ConfigError
from tread.kernels.attention.kernel import Attention
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.compiling import Switch
from tread.kernels.fast import SETTINGS, SHAPES, Fast, print_once_per_job
from tread.kernels.offload.offload import Offload, Offloaded
from tread.routing import recompute
from tread.routing.handle import Handle
from tread.routing.mode import Forced
from tread.routing.plan import RoutePlan
from tread.routing.state import State, in_backward, unrecorded

_EVAL_MODE = (
    "the model is in eval mode, as from_pretrained returns it, so it runs dense: call model.train() before training. A "
    "forward that trains nothing belongs in torch.no_grad()."
)


def attach(
    model: nn.Module,
    config: RoutePlan | Mapping[str, Any] | str | Path,
    *,
    seed: int | None = None,
    family: Family | None = None,
) -> "Attachment":
    """Route `model` by `config` from its next training forward on; `seed` replaces the config's.

    `family` describes how a model of your own calls its layers; stock models are known, inside wrappers too. A second
    `attach` replaces the first, whose handle then raises when it is used. The handle is a context manager that detaches
    on exit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is no torch module: attach its transformer, as in "
            "tread.attach(pipeline.transformer, ...)."
        )
    model = unwrapped(model)
    return Attachment(model, RoutePlan.from_config(config), family_for(model, family), seed=seed)


class Attachment(Handle):
    """The handle of an attached model."""

    def __init__(self, model: nn.Module, plan: RoutePlan, family: Family, *, seed: int | None = None) -> None:
        super().__init__(plan, depth=len(layer_modules(model, family)), seed=seed)
        self.model, self.family = model, family
        self.fast: Fast | None = None
        """The compiled layers, graphs and kernels that `compile` put on the model."""
        self.offloaded: Offload | None = None
        """The offloaded layers, if `offload` was called."""
        self.references: int | None = None
        """The number of reference tokens; None: read from the inputs, once per sequence length."""
        self._references = References()
        self._argument_names = list(inspect.signature(naming_forward(model)).parameters)[1:]
        self._wiring = Wiring(self, model, family, ModelCall(self))
        self.layers = list(self._wiring.layers)
        """The modules that are layers, unwrapped."""
        self._wiring.install_rotary()
        if isinstance(attached := around(model), ModelCall):  # nothing raises from here on
            attached.handle.replace_on(model)
        self._wiring.put_on()

    @property
    def attached(self) -> bool:
        """Whether the model still routes by this handle."""
        return self._wiring.is_on

    def check_attached(self) -> None:
        """Raise if this handle no longer affects its model."""
        self._check_current()
        if not self.attached:
            raise ConfigError("this handle was detached, so its model runs dense: attach the model again.")

    def _check_current(self) -> None:
        """Raise if another handle replaced this one; a loop may go on with a detached handle."""
        if self._wiring.is_replaced:
            raise ConfigError("a later tread.attach of the same model replaced this handle: use the one it returned.")

    def set_step(self, step: int) -> None:
        """See `Handle.set_step`."""
        self._check_current()
        self._follow_patches()
        super().set_step(step)

    def reroute(self, config: RoutePlan | Mapping[str, Any] | str | Path, *, seed: int | None = None) -> None:
        """See `Handle.reroute`."""
        self.check_attached()
        super().reroute(config, seed=seed)

    @contextmanager
    def _set(self, **changes: object) -> Iterator[None]:
        if changes.get("on") is False:  # a detached model is dense anyway
            self._check_current()
        else:
            self.check_attached()
        self._follow_patches()
        with super()._set(**changes):
            yield

    def _follow_patches(self) -> None:
        """Wrap what others replaced since, so that the next forward is routed."""
        if self.attached:
            self._wiring.follow_patches()

    def check_unrouted(self, layer: nn.Module) -> None:
        """See `Handle.check_unrouted`; refuses a forward of the model that did not open a state."""
        super().check_unrouted(layer)
        if torch.compiler.is_compiling() or in_backward() or not self.attached or is_patched(type(self.model)):
            return
        if self.is_on(training=layer.training):
            name = type(self.model).__name__
            raise ConfigError(
                f"{name}.forward was replaced after tread.attach, so this forward is not routed: attach after the "
                "replacement, or call handle.set_step(step) before each step."
            )

    def compile(
        self,
        *,
        checkpointing: Checkpointing | None = None,
        graphs: Switch = "auto",
        attention: Attention = "auto",
        shapes: int = SHAPES,
        say: Callable[[str], None] | None = None,
        **options: Any,
    ) -> "Attachment":
        """Make training steps fast: compiled layers, CUDA graphs, attention's fastest kernel; returns this handle.

        `checkpointing`: True or "selective" checkpoints every layer within its compiled code; "dense" does so in
        forwards that drop fewer tokens than the plan says; None where the model would checkpoint it
        (`enable_gradient_checkpointing`). `graphs`: "auto" uses them on one GPU. `shapes`: input shapes with code of
        their own; further ones share code. `options` are torch.compile's. In eval mode layers run eager. `detach` takes
        everything off.
        """
        self.check_attached()
        self._remove_fast()
        self.fast = Fast(
            self.model,
            self.layers,
            [self],
            checkpointing=checkpointing,
            graphs=graphs,
            attention=attention,
            shapes=shapes,
            training_only=True,
            say=say,
            **options,
        )
        return self

    def offload(
        self,
        layers: Offloaded = "auto",
        *,
        device: torch.device | str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> "Attachment":
        """Keep the frozen weights of `layers` layers in host memory, fetched ahead of their use; returns this handle.

        "auto": as few layers as the memory that the first step leaves allows. `device` computes; the rest of the model
        is moved there, so a model that does not fit stays on the CPU until this call. Offloaded layers are
        checkpointed. Call it after adapters are added and before `compile`; `detach` puts the weights back.
        """
        self.check_attached()
        if self.fast is not None:
            raise ConfigError("handle.offload() comes before handle.compile(): call compile again after it.")
        self._remove_offload()
        self.offloaded = Offload(self.model, self.layers, layers, device=device, say=say or print_once_per_job)
        return self

    def release_graphs(self) -> None:
        """Give the memory of CUDA graphs back, for example before validation; the next step captures anew."""
        if self.fast is not None:
            self.fast.release()

    def detach(self) -> None:
        """Remove routing, compiled code and offloading; restore the model exactly. Calling it again does nothing."""
        if not self.attached:
            return
        self._remove_fast()
        self._remove_offload()
        self._wiring.take_off()
        recompute.leave(self)

    def replace_on(self, model: nn.Module) -> None:
        """Detach because another handle takes `model`, the attached one or a shallow copy that may never have run."""
        self._wiring.include(model)
        self.detach()

    def _remove_fast(self) -> None:
        """Take off what `compile` put on."""
        self._wiring.leave_compiled()
        SETTINGS.leave(self)  # entered where a user compiled the layers (`StaticShapes`)
        if self.fast is not None:
            self.fast.remove()
            self.fast = None

    def _remove_offload(self) -> None:
        """Take off what `offload` put on."""
        if self.offloaded is not None:
            self._wiring.leave_compiled()
            self.offloaded.remove()
            self.offloaded = None

    def reattach(self) -> Callable[[], None] | None:
        """Attach again for a recomputation after `detach` or replacement; returns a function that undoes it."""
        if self.attached:
            self._wiring.follow_patches()
            return None
        take_off_again = self._wiring.put_on_again()
        recompute.follow(self)

        def undo() -> None:
            recompute.leave(self)
            take_off_again()

        return undo

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attachment":
        """A copied model is not attached, so a copied handle is the original."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a handle cannot be pickled: save handle.state_dict(), and attach the model after loading it.")

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def signature(self, *, training: bool) -> tuple[Hashable, ...]:
        """See `Handle.signature`; adds the number of reference tokens."""
        return *super().signature(training=training), self.references

    def open(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The state of one forward of `model`, the attached one or a shallow copy of it, with these arguments."""
        if (state := self.replayed()) is not None:
            return state
        family = self.family
        self._wiring.follow(model)
        if not torch.compiler.is_compiling():
            self._check_mode(model)
        if not self.is_on(training=model.training):
            return self.begin(training=model.training)
        if not torch.compiler.is_compiling():
            self._wiring.check_layers()
        self._check_parallel(model)
        arguments = dict(zip(self._argument_names, args, strict=False)) | kwargs
        if family.refuse is not None and (reason := family.refuse(model, arguments)):
            raise ConfigError(f"{type(model).__name__} cannot be routed in this forward: {reason}")
        with unrecorded():
            tokens = None if family.tokens is None else family.tokens(model, arguments)
            forced = Forced(
                references=self._count_references(arguments, tokens),
                references_at=family.references_at,
                pinned=0 if family.pinned is None else family.pinned(model, arguments),
            )
            offset = None if family.offset is None else family.offset(model, arguments)
        per_block = family.per_block or any(arguments.get(name) is not None for name in family.residuals)
        return self.begin(training=model.training, forced=forced, tokens=tokens, offset=offset, per_block=per_block)

    def _check_mode(self, model: nn.Module) -> None:
        """Warn if the first forward with gradients is in eval mode, which `from_pretrained` leaves a model in."""
        if model.training:
            self._said.add(_EVAL_MODE)  # it trains: later forwards in eval mode are meant
            return
        meant = _EVAL_MODE in self._said or self._mode.on is not None or not torch.is_grad_enabled()
        if not meant and any(parameter.requires_grad for parameter in model.parameters()):
            self.warn([_EVAL_MODE])

    def _check_parallel(self, model: nn.Module) -> None:
        """Refuse a routed forward whose ranks share samples (diffusers' `enable_parallelism`): each would drop other
        tokens."""
        config: Any = getattr(model, "_parallel_config", None)
        if config is None:
            return
        if config.context_parallel_config is not None:
            raise ConfigError("context parallelism splits the tokens between ranks and excludes routing: turn it off.")
        if self._mode.samples is None:
            raise ConfigError(
                "with tensor parallelism several ranks compute one sample and must drop the same tokens: give the "
                "positions of a rank's samples in the global batch, with handle.routed(samples=positions): ..."
            )

    def _count_references(self, arguments: Arguments, tokens: int | None) -> int:
        """The number of reference tokens that are forced; `references` overrides what the inputs say."""
        if self.family.references is None or self.plan.reference_tokens == "route" or tokens is None:
            return 0
        if self.references is not None:
            return self.references
        return self._references.count(self.family.references(self.model, arguments), tokens, self._mode.mask)


class ModelCall(Around):
    """The wrapper of an attached model's `forward`: opens a state for each forward and drops it afterwards."""

    def __init__(self, handle: Attachment) -> None:
        super().__init__()
        self.handle = handle

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Around.call`."""
        handle = self.handle
        before = handle.state
        state = handle.state = handle.open(module, args, kwargs)
        self.quiet = True
        try:
            output = forward(*args, **kwargs)
        finally:  # also after an error: the state holds tensors
            handle.state, self.quiet = before, False
        if state.inside:
            raise ConfigError(
                f"the forward ended inside a window of routing: the model skipped every layer after {state.layer}. End "
                "the route at or before that layer, or run this forward inside handle.dense()."
            )
        if state.routed and state.layer < 0:
            raise ConfigError(
                "the forward ran none of the model's layers: something replaced their forward after tread.attach, or "
                "the family names the wrong stack. Attach after the replacement."
            )
        return output
