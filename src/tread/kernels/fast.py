"""Everything that makes the training steps of a model fast, put on by one call and taken off by another.

- Layers are compiled, checkpointing included (`compiling.py`), and mixtures of experts compute at fixed shapes
  (`experts.py`); forward and backward of the whole model are CUDA graphs (`graphs.py`); attention and noise have
  kernels of their own.
- `handle.compile()` is this on an attached model, in anyone's loop; both trainers use it too.
- Attention, noise and torch's compiler settings belong to the process. They are restored when the last fast model is
  taken off.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from tread.around import Around, around
from tread.kernels.attention.kernel import Attention, remember_attention, use_attention
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.compiling import Attempt, Switch, compile_layers, compile_noise
from tread.kernels.experts import compute_all_experts
from tread.kernels.graphs import Graphs, is_distributed
from tread.kernels.offload.call import compiled_code, recomputes, set_compiled_code
from tread.routing import noise
from tread.routing.handle import Handle
from tread.routing.mode import rank

SHAPES = 32
"""Shapes of a layer's inputs that get code of their own, in a loop that does not say how many there are."""


class Fast:
    """A model with compiled layers, CUDA graphs and fast kernels; `remove` restores it.

    `compiled`: compile the layers. `checkpointing` is theirs, within compiled code. `graphs`: if they cannot be used,
    True says why and "auto" does not; `graphs_setting` is the setting's name in that message. `device` computes; by
    default it is the parameters', so give it if they are offloaded. `options` are torch.compile's.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        handles: Sequence[Handle] = (),
        *,
        compiled: bool = True,
        checkpointing: Checkpointing | None = False,
        graphs: Switch = "auto",
        attention: Attention = "auto",
        shapes: int = SHAPES,
        training_only: bool = False,
        say: Callable[[str], None] | None = None,
        graphs_setting: str = "graphs",
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        say = say or print_once_per_job
        self.model, self.layers, device = model, list(layers), device or next(model.parameters()).device
        self._before = [compiled_code(layer) for layer in self.layers]
        SETTINGS.enter(self)
        use_attention(attention, device)
        self.attempt: Attempt | None = None
        """The state of compilation; None: nothing is compiled."""
        self._restore_experts: Callable[[], None] | None = None
        if compiled:
            self._restore_experts = compute_all_experts(self.layers)
            self.attempt = compile_layers(
                self.layers,
                shapes=shapes,
                checkpointed=checkpointing,
                handles=handles,
                training_only=training_only,
                say=say,
                **options,
            )
            if device.type == "cuda":
                compile_noise(self.attempt)
        self.graphs: Graphs | None = None
        has_one_gpu = device.type == "cuda" and not is_distributed()
        if graphs is True and not has_one_gpu:
            say(f"{graphs_setting} needs exactly one CUDA GPU; continuing without.")
        if graphs and any(recomputes(layer) for layer in self.layers):
            if graphs is True:
                say(f"{graphs_setting} cannot replay the copies of offloaded layers; continuing without.")
        elif graphs and has_one_gpu:
            self.graphs = Graphs(model, handles, say)
            if around(model) is None:
                Around().put_on(model)
            self._around().outer = self.graphs.run

    @property
    def failed(self) -> bool:
        """Whether compiling or capturing failed, so that steps are slower than they could be."""
        parts = [part for part in (self.attempt, self.graphs) if part is not None]
        return any(part.failed for part in parts)

    def release(self) -> None:
        """Give the memory of CUDA graphs back; the next step captures anew."""
        if self.graphs is not None:
            self.graphs.release()

    def remove(self) -> None:
        """Restore the model and the process's settings. Calling it again does nothing."""
        if not SETTINGS.leave(self):
            return
        for layer, before in zip(self.layers, self._before, strict=True):
            set_compiled_code(layer, before)
        if self._restore_experts is not None:
            self._restore_experts()
        if self.graphs is not None:
            self.graphs.close()
            self._around().outer = None
            if type(here := self._around()) is Around:
                here.take_off(self.model)

    def _around(self) -> Around:
        here = around(self.model)
        assert here is not None
        return here


class Settings:
    """The process's settings, remembered while anything that changes them is in use."""

    def __init__(self) -> None:
        self._users: WeakSet[Any] = WeakSet()  # a model may be freed without being taken off
        self._restore: list[Callable[[], None]] = []

    def enter(self, user: object) -> None:
        """Remember the settings if this is the first user."""
        if not self._restore:
            self._restore = [remember_attention(), _remember_compiler(), _remember_noise()]
        self._users.add(user)

    def leave(self, user: object) -> bool:
        """Restore the settings if this was the last user; False if it had left before."""
        if user not in self._users:
            return False
        self._users.remove(user)
        if not self._users:
            for restore in self._restore:
                restore()
            self._restore = []
        return True


SETTINGS = Settings()


def _remember_compiler() -> Callable[[], None]:
    from torch._dynamo import config as limits  # takes a second to import
    from torch._functorch import config as lowering

    before = limits.recompile_limit, limits.accumulated_recompile_limit, lowering.force_non_lazy_backward_lowering

    def restore() -> None:
        limits.recompile_limit, limits.accumulated_recompile_limit, lowering.force_non_lazy_backward_lowering = before

    return restore


def _remember_noise() -> Callable[[], None]:
    before = noise.draw_two
    return lambda: setattr(noise, "draw_two", before)


def print_once_per_job(message: str) -> None:
    """Print on rank 0 only."""
    if rank() == 0:
        print(message, flush=True)
