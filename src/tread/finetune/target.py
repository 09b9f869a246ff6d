"""Training targets of released models: the predicted quantity, the distribution of times, and the elementwise loss.

- `FlowTarget`: the velocity noise - x on the straight path, time in (0, 1); FLUX, SD3, AuraFlow, Wan, Lumina2, Qwen.
- `VelocityTarget`: v of a discrete diffusion, time 0..999; CogVideoX.
- `EpsilonTarget`: the noise of a discrete diffusion, time 0..999, and the learned variance beside it; PixArt.
- A time is the quantile function at u in (0, 1): validation spaces u evenly, an expert is trained on an interval of u.
- `adjusted` sets another density of times and time-dependent loss weights; validation uses the unweighted target, so
  that its losses can be compared between weightings.
- The loss is computed in float32, also under autocast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

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
"""Times are clamped to this in sigma_sqrt: the lowest noise level of the stock schedulers."""


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """What a config changes about a model's target."""

    density: Density | None = None
    """The density of times; None: the target's own."""
    tokens: int | None = None
    """Tokens at which the shift of a flow model holds; None: it has one shift for all sizes, or its own rule."""
    weighting: Weighting = "none"
    """Weight of a flow model's loss by time."""
    snr_gamma: float | None = None
    """Min-SNR weights, of models that predict noise or v."""


class Target(Protocol):
    """The training objective of a model."""

    def times(self, u: Tensor, tokens: int) -> Tensor:
        """The quantile function of training times, u (B,) -> times (B,), for samples of `tokens` tokens."""
        ...

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The noisy state at `time` (B,), (B, C, ...)."""
        ...

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The loss of every element, (B, C, ...) float32."""
        ...

    def adjusted(self, by: Adjustments) -> Self:
        """The target with these adjustments; raises a ConfigError for those that it does not support."""
        ...

    def unweighted(self) -> Self:
        """The target without time-dependent loss weights."""
        ...


def distance(a: Tensor, b: Tensor, kind: Distance) -> Tensor:
    """The elementwise loss between two tensors, in float32 (reduction "none")."""
    if kind == "huber":
        return F.huber_loss(a.float(), b.float(), reduction="none")
    return F.mse_loss(a.float(), b.float(), reduction="none")


def is_linear(scheduler: Mapping[str, Any]) -> bool:
    """Whether a stock scheduler of this config shifts times by mu itself, not by its exponential."""
    return scheduler.get("time_shift_type") == "linear"


@dataclass(frozen=True, kw_only=True)
class FlowTarget:
    """Rectified flow, with logit-normal times unless another density is given (Esser et al. 2024)."""

    shift: float = 1.0
    """A shift above 1 moves times towards noise; ignored if `dynamic` is set."""
    dynamic: tuple[float, float, int, int] | None = None
    """(base_shift, max_shift, base_seq_len, max_seq_len): the shift grows with the number of tokens, as in FLUX."""
    linear: bool = False
    """The mu that a stock pipeline computes is the shift itself (time_shift_type linear), not its logarithm."""
    tokens: int | None = None
    """Tokens at which `shift` holds; it scales with the square root of their number (Eq. 23). None: constant."""
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
            base, top, base_len, max_len = (config.get(name, value) for name, value in zip(names, usual, strict=True))
            return cls(dynamic=(base, top, base_len, max_len), linear=is_linear(config), distance=distance)
        return cls(shift=config.get("shift") or config.get("flow_shift") or 1.0, distance=distance)

    def adjusted(self, by: Adjustments) -> Self:
        if by.snr_gamma is not None:
            raise ConfigError(
                f"snr_gamma is {by.snr_gamma}, but the model is a flow model, and min-SNR is for models that predict "
                "noise or v: leave it out, or set loss_weighting."
            )
        if by.tokens is not None and (self.dynamic is not None or type(self) is not FlowTarget):
            raise ConfigError(
                f"flow_shift_tokens is {by.tokens}, but the model's own sampler already shifts by the number of "
                "tokens: leave it out, or set flow_schedule_shift to the shift at that number."
            )
        return replace(self, density=by.density or self.density, tokens=by.tokens, weighting=by.weighting)

    def unweighted(self) -> Self:
        return replace(self, weighting="none")

    def shift_of(self, tokens: int) -> float:
        """The shift for samples of `tokens` tokens."""
        if self.dynamic is None:  # Esser et al. Eq. 23
            return self.shift * (1.0 if self.tokens is None else math.sqrt(tokens / self.tokens))
        base, top, base_len, max_len = self.dynamic
        return self.from_mu(base + (top - base) * (tokens - base_len) / (max_len - base_len))

    def from_mu(self, mu: float) -> float:
        """The shift that the stock scheduler makes of a pipeline's mu."""
        return mu if self.linear else math.exp(mu)

    def times(self, u: Tensor, tokens: int) -> Tensor:
        return shifted(self.density.quantile(at_least_float32(u)), self.shift_of(tokens))

    def cdf(self, time: float, tokens: int) -> float:
        """The share of training times below `time`: the inverse of `times`."""
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
        if self.weighting == "cosmap":  # the CosMap density of Esser et al. as a weight
            return 2 / (math.pi * (1 - 2 * time + 2 * time.square()))
        return torch.ones_like(time)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiscreteTarget:
    """Base class of discrete-diffusion targets: noise levels and a density of times 0..T-1, and min-SNR weights."""

    kept: Tensor
    """alphas_cumprod, (T,) float64: the squared coefficient of x in the noisy state."""
    density: Density = UNIFORM
    snr_gamma: float | None = None
    """The SNR is clipped to this in the loss weights (min-SNR, Hang et al. 2023); None: unweighted."""
    distance: Distance = "l2"
    _on_device: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)
    """Tables in float32 by name and device: a copy in each step would synchronise."""

    def adjusted(self, by: Adjustments) -> Self:
        for name, value, off in (("flow_shift_tokens", by.tokens, None), ("loss_weighting", by.weighting, "none")):
            if value != off:
                raise ConfigError(
                    f"{name} is {value!r}, but the model is no flow model: leave it out, or set snr_gamma, which "
                    "weighs the times of models that predict noise or v."
                )
        return replace(self, density=by.density or self.density, snr_gamma=by.snr_gamma)

    def unweighted(self) -> Self:
        return replace(self, snr_gamma=None)

    def times(self, u: Tensor, tokens: int) -> Tensor:
        steps = len(self.kept)
        return (self.density.quantile(u) * steps).long().clamp(max=steps - 1)  # equal intervals of the quantile

    # Ho et al. Eq. 4
    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return self._at("signal", time, x) * x + self._at("noise", time, x) * noise

    def _tables(self) -> dict[str, Tensor]:
        """Coefficients by time, (T,) float64 each: those of x and of the noise in the noisy state."""
        return {"signal": self.kept.sqrt(), "noise": (1 - self.kept).sqrt()}

    def _at(self, table: str, time: Tensor, like: Tensor) -> Tensor:
        """A coefficient at the times (B,), in a shape that broadcasts against `like`."""
        key = table, time.device
        if key not in self._on_device:
            self._on_device[key] = self._tables()[table].float().to(time.device)
        return per_sample(self._on_device[key][time], like.float())


def _discrete_scheduler(config: Mapping[str, Any], shift: float | None) -> Any:
    """The stock scheduler of a config; refuses a shift, which only flow models have."""
    import diffusers

    if shift is not None:
        raise ConfigError(
            f"flow_schedule_shift is {shift}, but the model is no flow model: times are uniform; leave it out."
        )
    return getattr(diffusers, config["_class_name"]).from_config(config)


@dataclass(frozen=True, kw_only=True, eq=False)
class VelocityTarget(DiscreteTarget):
    """v of a discrete diffusion (Salimans and Ho 2022, arXiv 2202.00512) at a time drawn uniformly from 0..T-1.

    Its squared error is the squared error of x divided by the noise's variance, the loss CogVideoX was trained with.
    """

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any], *, shift: float | None, distance: Distance) -> "VelocityTarget":
        """The target with the noise levels of a stock scheduler's config; its prediction_type must be v_prediction."""
        scheduler, kind = _discrete_scheduler(config, shift), config.get("prediction_type")
        if kind != "v_prediction":
            raise ConfigError(f"prediction_type of the scheduler is {kind!r}; a model that predicts v is needed here.")
        return cls(kept=scheduler.alphas_cumprod.double(), distance=distance)

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        of_x, of_noise = self._at("signal", time, x), self._at("noise", time, x)
        error = distance(prediction, of_x * noise - of_noise * x, self.distance)
        if self.snr_gamma is None:
            return error
        # min(SNR, gamma) / (SNR + 1), with SNR = of_x^2 / of_noise^2 and of_x^2 + of_noise^2 = 1
        return error * torch.minimum(of_x.square(), self.snr_gamma * of_noise.square())


@dataclass(frozen=True, kw_only=True, eq=False)
class EpsilonTarget(DiscreteTarget):
    """The noise of a discrete diffusion (Ho et al. 2020, arXiv 2006.11239) at a time drawn uniformly from 0..T-1.

    A model with twice the channels predicts its variance too, and is trained by L_hybrid of Nichol and Dhariwal
    (2021, arXiv 2102.09672): the variational bound is in bits, its sum over T times is weighted by 0.001 as in the
    paper, and the mean is detached in it, so that it trains the variance alone. At time 0 the term is the negative
    log-likelihood of continuous latents, where the paper discretises it to bins of pixel values. Min-SNR does not
    weigh the bound.
    """

    betas: Tensor
    """(T,) float64: the variances of the forward process."""

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any], *, shift: float | None, distance: Distance) -> "EpsilonTarget":
        """The target with the betas of a stock scheduler's config."""
        betas = _discrete_scheduler(config, shift).betas.double()
        return cls(kept=(1 - betas).cumprod(0), betas=betas, distance=distance)

    def error(self, prediction: Tensor, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        channels = x.shape[1]
        epsilon = prediction[:, :channels]  # (B, C, ...)
        error = distance(epsilon, noise, self.distance)
        if self.snr_gamma is not None:  # Hang et al. 2023 (arXiv 2303.09556): min(SNR, gamma) / SNR
            ratio = self._at("noise", time, x).square() / self._at("signal", time, x).square()  # 1 / SNR
            error = error * (self.snr_gamma * ratio).clamp(max=1)
        if prediction.shape[1] == channels:
            return error
        bound = self._bound(epsilon.detach().float() - noise.float(), prediction[:, channels:].float(), time)
        return error + 0.001 * len(self.betas) * bound

    def _bound(self, off: Tensor, variance: Tensor, time: Tensor) -> Tensor:
        """One term of the variational bound in bits, elementwise; `off` is the error of the predicted noise.

        Equations are those of Nichol and Dhariwal.
        """
        low, high = self._at("low", time, off), self._at("high", time, off)
        v = (variance + 1) / 2
        log_variance = v * high + (1 - v) * low  # Eq. 15
        mean_error = self._at("apart", time, off) * off
        square = mean_error.square() * torch.exp(-log_variance)
        divergence = 0.5 * (log_variance - low + torch.exp(low - log_variance) - 1 + square)  # Eq. 6
        likelihood = 0.5 * (math.log(2 * math.pi) + log_variance + square)  # Eq. 5, negative log
        return torch.where(per_sample(time, off) == 0, likelihood, divergence) / math.log(2)

    def _tables(self) -> dict[str, Tensor]:
        """Adds the bounds of the log-variance, and the factor from an error of the noise to one of the mean."""
        alphas, previous = 1 - self.betas, torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        # Nichol and Dhariwal Eq. 10; it is 0 at time 0, so its logarithm there is taken from time 1
        posterior = self.betas * (1 - previous) / (1 - self.kept)
        low = torch.cat([posterior[1:2], posterior[1:]]).log()
        # Eq. 11 with x replaced by the noise; at time 0 it is the distance of the mean from x
        apart = self.betas / ((1 - self.kept) * alphas).sqrt()
        return super()._tables() | {"low": low, "high": self.betas.log(), "apart": apart}
