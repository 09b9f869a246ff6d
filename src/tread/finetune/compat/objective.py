"""Rules for other trainers' keys of the loss: the density of times, loss weights and noise offset."""

from collections.abc import Mapping
from typing import Any

from tread.finetune.compat.rules import OFF, Outcome, Rule, is_theirs, reworded, there

NO_FLOW = ("cogvideox", "pixart_sigma")
"""Families that predict noise or v."""


def uniform_times(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Times with a uniform density."""
    return Outcome.ignored("off") if value in OFF else Outcome.translated({"time_density": "uniform"})


def beta_times(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Times with a beta density, whose shape parameters are separate keys."""
    if value in OFF:
        return Outcome.ignored("off")
    if there(config, "flow_use_uniform_schedule"):
        return Outcome.ignored("flow_use_uniform_schedule is there too, and is read instead")
    shapes = {name: there(config, f"flow_beta_schedule_{name.removeprefix('beta_')}") for name in _SHAPES}
    return Outcome.translated({"time_density": "beta", **shapes})


_SHAPES = ("beta_alpha", "beta_beta")


def sigmoid_scale(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The scale of the sigmoid is the standard deviation of logit-normal times."""
    if value in (1, *OFF) or any(there(config, f"flow_use_{name}_schedule") for name in ("uniform", "beta")):
        return Outcome.ignored("off")
    return Outcome.translated({"time_density": "logit-normal", "logit_std": value})


def min_snr(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Min-SNR weighting, only for models that predict noise or v."""
    if value is None:
        return Outcome.runs(snr_gamma=None)
    if value == 0:
        return Outcome.ignored("off")
    if config.get("model_family") not in NO_FLOW:
        return Outcome.unsupported("leave it out, or write loss_weighting: min-SNR is for models of noise or v")
    return Outcome.runs(snr_gamma=value)


def offset_noise(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The switch of the noise offset; here noise_offset 0 turns it off."""
    if value in OFF:
        return Outcome.ignored("off")
    return Outcome.translated({name: there(config, name) for name in ("noise_offset", "noise_offset_probability")})


def offset(name: str) -> Rule:
    """The rule of the offset and its probability, which `offset_noise` turns on in a config of the existing trainer."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if config.get("offset_noise") not in OFF:
            return Outcome(verdict="translated", text="with offset_noise")
        if is_theirs(config) or "offset_noise" in config:
            return Outcome.ignored("an option of offset_noise")
        return Outcome.runs(**{name: value})

    return rule


def loss(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The distance between prediction and target; the Huber threshold here is 1 at every time."""
    if value == "huber" and is_theirs(config):
        c, schedule = there(config, "huber_c"), there(config, "huber_schedule")
        return Outcome.differs({"loss_type": value}, f"threshold 1; there huber_c {c} with huber_schedule {schedule}")
    return reworded("loss_type", {"mse": "l2"}, {"smooth_l1": "write huber"})(value, config)


def huber(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The options of loss_type huber, which has one threshold here."""
    if config.get("loss_type") != "huber":
        return Outcome.ignored("an option of loss_type huber")
    return Outcome.differs({}, "the threshold of huber is 1 at every time")
