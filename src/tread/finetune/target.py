"""Training targets of released models: what is predicted, the distribution of times, and the loss of each element.

- `FlowTarget`: the velocity noise - x on the straight path, time in (0, 1); FLUX, SD3, AuraFlow, Wan, Lumina2, Qwen.
- `VelocityTarget`: v of a discrete diffusion, time 0..999; CogVideoX.
- `EpsilonTarget`: the noise of a discrete diffusion, time 0..999, and the learned variance beside it; PixArt.
- A time is the quantile function at u in (0, 1): validation visits quantiles evenly, an expert those of its range.
- `adjusted` gives a target another density of times and weights of the loss by time; validation uses the target without
  weights, so that its figures do not depend on them.
- The loss is computed in float32, also under autocast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tread.errors import ConfigError
from tread.objectives.density import Density
from tread.objectives.flow import path_state, shifted
from tread.objectives.objective import at_least_float32, per_sample

Distance = Literal["l2", "huber"]
Weighting = Literal["none", "sigma_sqrt", "cosmap"]
LOGIT_NORMAL, UNIFORM = Density(name="logit-normal"), Density()
LEAST_SIGMA = 1e-3
"""The lowest time that sigma_sqrt tells from 0, the first level of the stock schedulers."""


class Target(Protocol):
    """The training objective of a model, as the loss uses it."""

    def times(self, u: Tensor, tokens: int) -> Tensor:
        """The quantile function of training times, u (B,) -> times (B,), for samples of `tokens` tokens."""
        ...

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The noisy state at `time` (B,), (B, C, ...)."""
        ...

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The loss of every element, (B, C, ...) float32."""
        ...

    def adjusted(
        self,
        *,
        density: Density | None = None,
        tokens: int | None = None,
        weighting: Weighting = "none",
        snr_gamma: float | None = None,
    ) -> Self:
        """The target with a density of times (None: its own), a shift by the number of tokens, and weights of the loss
        by time; refuses what it does not have."""
        ...

    def unweighted(self) -> Self:
        """The target without weights of the loss by time."""
        ...


def distance(a: Tensor, b: Tensor, kind: Distance) -> Tensor:
    """The elementwise loss of two tensors, in float32."""
    if kind == "huber":
        return F.huber_loss(a.float(), b.float(), reduction="none")
    return F.mse_loss(a.float(), b.float(), reduction="none")


@dataclass(frozen=True, kw_only=True)
class FlowTarget:
    """Rectified flow, with logit-normal times unless another density is given (Esser et al. 2024)."""

    shift: float = 1.0
    """A shift above 1 moves times towards noise; ignored if `dynamic` is set."""
    dynamic: tuple[float, float, int, int] | None = None
    """(base_shift, max_shift, base_seq_len, max_seq_len): the shift grows with the number of tokens, as in FLUX."""
    tokens: int | None = None
    """Tokens of a sample at which `shift` holds; more are shifted more, by the root of the ratio. None: one shift."""
    density: Density = LOGIT_NORMAL
    """The density of times before the shift."""
    weighting: Weighting = "none"
    distance: Distance = "l2"

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any], *, shift: float | None, distance: Distance) -> "FlowTarget":
        """The target with the shift of a stock scheduler's config, or with `shift` if that is given."""
        if shift is not None:
            return cls(shift=shift, distance=distance)
        if config.get("use_dynamic_shifting"):
            names = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
            usual = (0.5, 1.15, 256, 4096)
            base, top, few, many = (config.get(name, value) for name, value in zip(names, usual, strict=True))
            return cls(dynamic=(base, top, few, many), distance=distance)
        return cls(shift=config.get("shift") or config.get("flow_shift") or 1.0, distance=distance)

    def adjusted(
        self,
        *,
        density: Density | None = None,
        tokens: int | None = None,
        weighting: Weighting = "none",
        snr_gamma: float | None = None,
    ) -> Self:
        if snr_gamma is not None:
            raise ConfigError(
                f"snr_gamma is {snr_gamma}, but the model is a flow model, and min-SNR is for models that predict "
                "noise or v: leave it out, or set loss_weighting."
            )
        if tokens is not None and (self.dynamic is not None or type(self) is not FlowTarget):
            raise ConfigError(
                f"flow_shift_tokens is {tokens}, but the model's own sampler already shifts by the number of tokens: "
                "leave it out, or set flow_schedule_shift to the shift at that number."
            )
        return replace(self, density=density or self.density, tokens=tokens, weighting=weighting)

    def unweighted(self) -> Self:
        return replace(self, weighting="none")

    def shift_of(self, tokens: int) -> float:
        """The shift for samples of `tokens` tokens."""
        if self.dynamic is None:  # Esser et al. Eq. 23
            return self.shift * (1.0 if self.tokens is None else math.sqrt(tokens / self.tokens))
        base, top, few, many = self.dynamic
        return math.exp(base + (top - base) * (tokens - few) / (many - few))

    def times(self, u: Tensor, tokens: int) -> Tensor:
        return shifted(self.density.quantile(at_least_float32(u)), self.shift_of(tokens))

    def quantile(self, time: float, tokens: int) -> float:
        """The fraction of training times below `time`: the inverse of `times`."""
        shift = self.shift_of(tokens)
        return self.density.cdf(time / (shift - (shift - 1) * time))

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return path_state(x, noise, time)

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        error = distance(prediction, noise - x, self.distance)
        if self.weighting == "none":
            return error
        return error * per_sample(self.weight(time), error)

    def weight(self, time: Tensor) -> Tensor:
        """The weight of the loss at each time, (B,) float32."""
        time = time.float()
        if self.weighting == "sigma_sqrt":
            return time.clamp(min=LEAST_SIGMA) ** -2
        if self.weighting == "cosmap":  # CosMap of Esser et al., the density of its times as a weight
            return 2 / (math.pi * (1 - 2 * time + 2 * time.square()))
        return torch.ones_like(time)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiscreteTarget:
    """What the targets of a discrete diffusion share: times drawn from 0..T-1, and min-SNR weights."""

    density: Density = UNIFORM
    snr_gamma: float | None = None
    """The highest signal-to-noise ratio in the weights of the loss (min-SNR); None: all times weigh the same."""
    distance: Distance = "l2"

    def adjusted(
        self,
        *,
        density: Density | None = None,
        tokens: int | None = None,
        weighting: Weighting = "none",
        snr_gamma: float | None = None,
    ) -> Self:
        _refuse_flow_settings(tokens, weighting)
        return replace(self, density=density or self.density, snr_gamma=snr_gamma)

    def unweighted(self) -> Self:
        return replace(self, snr_gamma=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class VelocityTarget(DiscreteTarget):
    """v of a discrete diffusion (Salimans and Ho 2022, arXiv 2202.00512) at a time drawn evenly from 0..T-1.

    Its squared error is the squared error of x divided by the noise's variance, the loss that CogVideoX was trained by.
    """

    kept: Tensor
    """(T,) float64: the squared factor of x in the noisy state, the cumulative product of alphas."""
    _factors: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """Factors of x and of the noise, (T,) float32; one copy on each device: copying them would synchronise."""

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any], *, distance: Distance) -> "VelocityTarget":
        """The target with the noise levels of a stock scheduler's config, which must predict v."""
        import diffusers

        found = config.get("prediction_type")
        if found != "v_prediction":
            raise ConfigError(f"prediction_type of the scheduler is {found!r}; a model that predicts v is needed here.")
        scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
        return cls(kept=scheduler.alphas_cumprod.double(), distance=distance)

    def times(self, u: Tensor, tokens: int) -> Tensor:
        return _evenly(self.density.quantile(u), len(self.kept))

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        of_x, of_noise = self._at(time, x)
        return of_x * x + of_noise * noise

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        of_x, of_noise = self._at(time, x)
        error = distance(prediction, of_x * noise - of_noise * x, self.distance)
        if self.snr_gamma is None:
            return error
        # min(SNR, gamma) / (SNR + 1), where SNR = of_x^2 / of_noise^2 and both squares add up to 1
        return error * torch.minimum(of_x.square(), self.snr_gamma * of_noise.square())

    def _at(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        if time.device not in self._factors:
            of_x, of_noise = (square.sqrt().float().to(time.device) for square in (self.kept, 1 - self.kept))
            self._factors[time.device] = of_x, of_noise
        of_x, of_noise = self._factors[time.device]
        return _at(of_x, time, like), _at(of_noise, time, like)


class Tables(NamedTuple):
    """Coefficients of a discrete diffusion by time, each (T,) float32."""

    signal: Tensor
    """Factor of x in the noisy state."""
    noise: Tensor
    """Factor of the noise in the noisy state."""
    low: Tensor
    """Logarithm of the smallest variance that the model may predict."""
    high: Tensor
    """Logarithm of the largest variance that the model may predict."""
    apart: Tensor
    """Factor from the error of the noise to the error of the mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpsilonTarget(DiscreteTarget):
    """The noise of a discrete diffusion (Ho et al. 2020, arXiv 2006.11239) at a time drawn evenly from 0..T-1.

    A model with twice the channels predicts its variance too, and is trained by L_hybrid of Nichol and Dhariwal
    (2021, arXiv 2102.09672): the bound is in bits, its sum over T times is weighted by 0.001 as in the paper, and the
    mean is detached in it, so that it trains the variance alone. At time 0 the bound is the density of the data; the
    paper takes the density of a bin of pixel values, which latents do not have. Min-SNR does not weigh the bound.
    """

    betas: Tensor
    """(T,) float64: the variances of the forward process."""
    _tables: dict[torch.device, Tables] = field(default_factory=dict, init=False, repr=False)
    """One copy on each device: copying them in a step would synchronise."""

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any], *, distance: Distance) -> "EpsilonTarget":
        """The target with the betas of a stock scheduler's config."""
        import diffusers

        scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
        return cls(betas=scheduler.betas.double(), distance=distance)

    def times(self, u: Tensor, tokens: int) -> Tensor:
        return _evenly(self.density.quantile(u), len(self.betas))

    # Ho et al. Eq. 4
    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        tables = self._tables_on(time.device)
        return _at(tables.signal, time, x) * x + _at(tables.noise, time, x) * noise

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        channels = x.shape[1]
        epsilon = prediction[:, :channels]  # (B, C, ...)
        error = distance(epsilon, noise, self.distance)
        if self.snr_gamma is not None:  # Hang et al. 2023 (arXiv 2303.09556): min(SNR, gamma) / SNR
            tables = self._tables_on(time.device)
            ratio = _at(tables.noise, time, x).square() / _at(tables.signal, time, x).square()  # 1 / SNR
            error = error * (self.snr_gamma * ratio).clamp(max=1)
        if prediction.shape[1] == channels:
            return error
        bound = self._bound(epsilon.detach().float() - noise.float(), prediction[:, channels:].float(), time)
        return error + 0.001 * len(self.betas) * bound

    def _bound(self, off: Tensor, variance: Tensor, time: Tensor) -> Tensor:
        """One term of the variational bound in bits, elementwise; `off` is the error of the noise."""
        tables = self._tables_on(time.device)
        low, high = _at(tables.low, time, off), _at(tables.high, time, off)
        share = (variance + 1) / 2
        log_variance = share * high + (1 - share) * low  # Eq. 15
        apart = _at(tables.apart, time, off) * off
        square = apart.square() * torch.exp(-log_variance)
        divergence = 0.5 * (log_variance - low + torch.exp(low - log_variance) - 1 + square)  # Eq. 6
        density = 0.5 * (math.log(2 * math.pi) + log_variance + square)  # Eq. 5
        return torch.where(per_sample(time, off) == 0, density, divergence) / math.log(2)

    def _tables_on(self, device: torch.device) -> Tables:
        if device not in self._tables:
            alphas = 1 - self.betas
            kept = alphas.cumprod(0)
            before = torch.cat([kept.new_ones(1), kept[:-1]])
            # Nichol and Dhariwal Eq. 10; it is 0 at time 0, where the value of time 1 replaces it before the logarithm
            posterior = self.betas * (1 - before) / (1 - kept)
            low = torch.cat([posterior[1:2], posterior[1:]]).log()
            # Eq. 11 with x expressed by the noise: the distance of the two means, at time 0 that of the mean from x
            apart = self.betas / ((1 - kept) * alphas).sqrt()
            tables = kept.sqrt(), (1 - kept).sqrt(), low, self.betas.log(), apart
            self._tables[device] = Tables(*(table.float().to(device) for table in tables))
        return self._tables[device]


def _refuse_flow_settings(tokens: int | None, weighting: Weighting) -> None:
    for name, value, off in (("flow_shift_tokens", tokens, None), ("loss_weighting", weighting, "none")):
        if value != off:
            raise ConfigError(
                f"{name} is {value!r}, but the model is no flow model: leave it out, or set snr_gamma, which weighs "
                "the times of models that predict noise or v."
            )


def _evenly(u: Tensor, count: int) -> Tensor:
    """u in (0, 1) -> 0..count-1, each for an equal share of u."""
    return (u * count).long().clamp(max=count - 1)


def _at(table: Tensor, time: Tensor, like: Tensor) -> Tensor:
    return per_sample(table[time], like.float())
