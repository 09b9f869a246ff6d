"""The mode of a handle and the tokens that a forward's inputs force: inputs of a selection beside plan and step.

- A mode holds the settings of the handle's open context managers; each forward inside is checked against it.
- Forced tokens have the same positions in all samples, so their number is known on the host and the budget counts it
  exactly. Tokens of reference images are not part of the target, so a force mask, which covers the target, leaves them
  out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tread.errors import ConfigError, check_int
from tread.routing.state import End


class Given(NamedTuple):
    """A selection (B, K) that the caller gave, and its largest index."""

    ids: Tensor
    largest: int


@dataclass(frozen=True)
class Mode:
    """The settings of the context managers that are open; None: not set."""

    on: bool | None = None
    """Whether forwards are routed; None: only in training mode with gradients enabled."""
    ratio: float | None = None
    """The ratio of every route, in place of the plan's."""
    selections: tuple[Given, ...] | None = None
    """The kept indices, one selection per route, in place of drawn ones."""
    step: Tensor | None = None
    """The step to draw for, () or (B, 1)."""
    samples: Tensor | None = None
    """The global sample positions to draw for, (B,) or (1,)."""
    mask: Tensor | None = None
    """The force mask, bool (B, S)."""
    masked: int | None = None
    """The largest number of tokens that the mask forces in a sample."""
    leading: int = 0
    """How many leading tokens the mask forces in every sample."""
    permuted: bool = False
    """Whether all tokens are kept, in a random order."""


def step_tensor(step: int | Tensor) -> Tensor:
    """A step for all samples, (), or one for each, (B, 1)."""
    if not isinstance(step, Tensor):
        return torch.tensor(check_int(step, "step", 0))
    if step.ndim > 1 or step.is_floating_point():
        raise ConfigError(f"step is {step.dtype} of shape {tuple(step.shape)}; it must be whole, () or (B,).")
    return step if step.ndim == 0 else step.unsqueeze(1)


def check_fits(mode: Mode, batch: int, tokens: int) -> None:
    """Refuse a force mask of another shape than the forward's target, and steps for another batch."""
    if mode.mask is not None and mode.mask.shape != (batch, tokens):
        raise ConfigError(
            f"force_keep has shape {tuple(mode.mask.shape)}; this forward has {batch} samples of {tokens} tokens."
        )
    if mode.step is not None and mode.step.numel() not in (1, batch):
        raise ConfigError(
            f"step has {mode.step.numel()} values; this forward has {batch} samples: give one step, or one per sample."
        )


def check_given(given: Given, route: int, batch: int, tokens: int) -> Tensor:
    """The given indices (B, K), checked against the shape of this forward."""
    if torch.compiler.is_compiling():  # reading `largest` would guard on it: a recompile for each value
        return given.ids
    if len(given.ids) != batch or given.largest >= tokens:
        raise ConfigError(
            f"selections[{route}] is for {len(given.ids)} samples, with indices up to {given.largest}; this forward "
            f"has {batch} samples of {tokens} tokens."
        )
    return given.ids


def sample_positions(samples: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """The positions of a forward's samples in the global batch, (B,)."""
    if samples is None:
        first = rank() * batch
        return torch.arange(first, first + batch, device=device)
    if samples.shape not in ((batch,), (1,)):
        raise ConfigError(
            f"samples has shape {tuple(samples.shape)}; this forward has {batch} samples: give one position per "
            "sample, or one for all, (1,)."
        )
    return samples.to(device, non_blocking=True).expand(batch)


def rank() -> int:
    """This process's index in its process group; 0 without one."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The image tokens that a forward's inputs force."""

    references: int = 0
    """The number of reference tokens, all at one end."""
    references_at: End = "last"
    """The end of the image tokens that the references are at."""
    pinned: int = 0
    """The number of leading tokens that the layers address by index."""

    @property
    def count(self) -> int:
        """The number of forced tokens in each sample."""
        return self.references + self.pinned

    def with_mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """All forced tokens, bool (B, S) like `like`; `mask` (B, S - references) adds its own; None if none."""
        if mask is None and self.count == 0:
            return None
        forced = torch.zeros_like(like, dtype=torch.bool)  # (B, S)
        start = self.references if self.references_at == "first" else 0
        stop = start + like.shape[1] - self.references
        forced[:, :start] = True
        forced[:, stop:] = True
        if mask is not None:
            forced[:, start:stop] = mask.to(like.device, non_blocking=True)
        forced[:, : self.pinned] = True
        return forced


NONE_FORCED = Forced()
