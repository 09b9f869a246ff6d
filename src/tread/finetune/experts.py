"""Experts: the transformers of one model, each trained on its own range of times (one in most models, two in Wan A14B).

- A micro-batch goes to one expert, drawn with the probability mass of the training times in its range, so that over a
  run the distribution of times is the same as with a single transformer.
- A training time is the quantile function at a uniform u, so the range of an expert is an interval of u.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from tread.finetune.family import TuneFamily
from tread.finetune.target import FlowTarget, Target
from tread.kernels.offload.offload import DDP_IGNORED


class Experts(nn.Module):
    """Several transformers as one module; the first argument of a call names one of them."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)
        # DDP reads this attribute on the module it wraps only, so the offloaded experts' lists move up
        ignored = {part: getattr(model, DDP_IGNORED, ()) for part, model in models.items()}
        if any(ignored.values()):
            setattr(self, DDP_IGNORED, [f"models.{part}.{name}" for part, names in ignored.items() for name in names])

    def forward(self, part: str, **arguments: Any) -> Any:
        """The output of the transformer `part`."""
        return self.models[part](**arguments)


def joined(models: Mapping[str, nn.Module]) -> nn.Module:
    """One module with the parameters of all transformers, for the optimizer and checkpoints."""
    return Experts(models) if len(models) > 1 else next(iter(models.values()))


@dataclass(frozen=True)
class Range:
    """The interval of u, in (0, 1), that one transformer is trained on."""

    expert: str
    low: float
    high: float

    def spread(self, u: Tensor) -> Tensor:
        """Map u from (0, 1) into the interval."""
        return self.low + u * (self.high - self.low)


def ranges(family: TuneFamily, target: Target, parts: Sequence[str], tokens: int) -> list[Range]:
    """The range of each of the `parts` for samples of `tokens` tokens, the noisiest first."""
    return [
        Range(part, _share_below(target, low, tokens), _share_below(target, high, tokens))
        for part, low, high in family.experts
        if part in parts
    ]


def _share_below(target: Target, time: float, tokens: int) -> float:
    """The share of training times below `time`, without rounding at the ends, which every target has."""
    if time in (0.0, 1.0):
        return time
    assert isinstance(target, FlowTarget)
    return target.cdf(time, tokens)


def at_quantile(spans: Sequence[Range], u: float) -> tuple[Range, float]:
    """The range and the u at the u-quantile of all the ranges together; ranges follow each other without a gap."""
    low, high = min(span.low for span in spans), max(span.high for span in spans)
    at = low + (high - low) * u
    return next(span for span in spans if span.low <= at <= span.high), at


def choose(found: Sequence[Range], u: float) -> Range:
    """One of the ranges, drawn with a probability proportional to its length; u is uniform in (0, 1)."""
    total = sum(span.high - span.low for span in found)
    for span in found:
        u -= (span.high - span.low) / total
        if u < 0:
            return span
    return found[-1]


def caller(model: nn.Module, part: str, several: bool) -> Callable[..., Any]:
    """The callable for `TuneFamily.predict`: the model, or one of its experts; `model` may be wrapped in DDP."""
    return partial(model, part) if several else model
