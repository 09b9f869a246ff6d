"""The loss of a noised batch: its random draws, the weight of each latent, and the loss of each sample.

- Everything random is a hash of (seed, purpose, global sample position): the latent drawn from its moments, the noise
  and its offset; the task draws times and experts in the same way.
- Masked loss is the weighted mean of the error. Every token with a nonzero weight is forced, computed from the same
  weights as the loss.
- In a routed forward only kept tokens carry loss, unless `routed_loss` gives it to all.
- Sound that is trained with a clip has its own noise at the clip's time, and its loss is added. It is not routed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tread.finetune.experts import Range, caller
from tread.finetune.family import Batch, TuneFamily
from tread.finetune.settings import FinetuneConfig
from tread.finetune.target import Target
from tread.routing import noise
from tread.routing.handle import Handle

LATENT, NOISE, TIME, EXPERT, VALIDATION, OFFSET, SOUND = (
    int.from_bytes(word) for word in (b"late", b"nois", b"time", b"expe", b"vali", b"offs", b"soun")
)
"""Purpose of a draw: a word of the hash, so that no two purposes share random numbers."""


@dataclass(frozen=True)
class Draws:
    """The random draws of a batch."""

    seed: int
    positions: Tensor
    """Global positions of the samples in the run, (B,)."""
    u: Tensor
    """Quantiles of their times, (B,)."""
    offset: Tensor | None = None
    """Offset added to the noise, (B, C, 1, ...)."""

    def latents(self, mean: Tensor, std: Tensor | None, *words: int) -> tuple[Tensor, Tensor]:
        """Latents drawn from their moments, and noise of the same shape; `words` tell further draws apart."""
        x = mean.float()
        if std is not None:
            x = x + std.float() * noise.per_sample_normal(self.seed, self.positions, x.shape[1:], LATENT, *words)
        return x, noise.per_sample_normal(self.seed, self.positions, x.shape[1:], NOISE, *words)


def noise_offset(config: FinetuneConfig, batch: Batch) -> Tensor | None:
    """The offset of each channel's noise in each sample, (B, C, 1, ...); None without `noise_offset`."""
    positions, x = batch["position"], batch["mean"]
    if config.noise_offset == 0:
        return None
    normal = noise.per_sample_normal(config.seed, positions, (x.shape[1],), OFFSET)  # (B, C)
    chosen = noise.uniform(config.seed, OFFSET, positions) < config.noise_offset_probability  # (B,)
    offset = config.noise_offset * normal * chosen[:, None]
    return offset.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def forced_tokens(family: TuneFamily, batch: Batch) -> Tensor | None:
    """Bool mask of the tokens that a mask weighs and those of clean latents, (B, S); None if none is forced."""
    forced = None
    if "weight" in batch:
        weight = batch["weight"]
        rows = weight.flatten(1)
        masked = rows.amax(1) != rows.amin(1)  # (B,); a sample without a mask weighs the same everywhere
        forced = family.patch.any_in_token(weight > 0) & masked[:, None]
    own = family.weight(batch)
    if own is not None:
        clean = family.patch.any_in_token(own == 0)
        forced = clean if forced is None else forced | clean
    return forced


@dataclass(frozen=True)
class SampleLosses:
    """Computes the loss of each sample of a batch with one of the experts."""

    family: TuneFamily
    handles: Mapping[str, Handle | None]
    """The routing of each expert, None where it is dense."""
    kept_only: bool
    """Whether only kept tokens carry loss in a routed forward."""

    def __call__(
        self, model: nn.Module, span: Range, batch: Batch, draws: Draws, target: Target, *, kept: Tensor | None = None
    ) -> Tensor:
        """The losses, (B,); `kept` (B, S) replaces the tokens that the forward itself kept."""
        family = self.family
        x, drawn = draws.latents(batch["mean"], batch.get("std"))  # (B, C, [F,] H, W)
        if draws.offset is not None:
            drawn = drawn + draws.offset
        time = target.times(draws.u, family.shifting_tokens(x))
        noisy = target.mix(x, drawn, time)
        call: Any = caller(model, span.expert, len(self.handles) > 1)
        sound_losses = None
        if "sound.mean" in batch:
            prediction, sound_losses = self._with_sound(call, noisy, time, batch, draws, target)
        else:
            prediction = family.predict(call, noisy, time, batch)
        error = target.error(prediction, x, drawn, time).mean(1, keepdim=True)  # (B, 1, [F,] H, W)
        weight = batch["weight"].expand_as(error) if "weight" in batch else torch.ones_like(error)
        own = family.weight(batch)
        if own is not None:
            weight = weight * own
        if self.kept_only:
            handle = self.handles[span.expert]
            if kept is None and handle is not None:
                kept = handle.kept  # (B, S)
            if kept is not None:  # cut off the references, whose tokens come after the target's
                weight = weight * family.patch.of_tokens(kept[:, : family.tokens(x)].float(), error)
        # clamped: a sample whose mask is all black has loss 0, not 0 / 0
        losses = (error * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1e-6)  # (B,)
        return losses if sound_losses is None else losses + sound_losses

    def _with_sound(
        self, call: Any, noisy: Tensor, time: Tensor, batch: Batch, draws: Draws, target: Target
    ) -> tuple[Tensor, Tensor]:
        """The prediction for the picture, and the loss of each sample's sound, (B,)."""
        sound, drawn = draws.latents(batch["sound.mean"], batch["sound.std"], SOUND)  # (B, L, D)
        given = target.mix(sound, drawn, time)
        prediction, heard = self.family.predict_with_sound(call, noisy, given, time, batch)
        return prediction, target.error(heard, sound, drawn, time).flatten(1).mean(1)
