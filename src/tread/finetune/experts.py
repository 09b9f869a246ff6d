"""The transformers of one model, each for its own range of times: one in most families, two in Wan 2.2 A14B.

- A micro-batch goes to one expert, drawn in proportion to the training times in its range, so that over the run each
  time is trained as often as a single model's would be.
- Times are quantiles of u, so an expert's range is an interval of u.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from tread.finetune.family import TuneFamily
from tread.finetune.target import FlowTarget, Target


class Experts(nn.Module):
    """Several transformers; a call names one of them."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, part: str, **arguments: Any) -> Any:
        """What the transformer `part` answers."""
        return self.models[part](**arguments)


def joined(models: Mapping[str, nn.Module]) -> nn.Module:
    """The transformers, by part, as the one model that a checkpoint names the parameters of."""
    return Experts(models) if len(models) > 1 else next(iter(models.values()))


@dataclass(frozen=True)
class Range:
    """A transformer and the interval of quantiles of u that it is trained on."""

    expert: str
    low: float
    high: float

    def spread(self, u: Tensor) -> Tensor:
        """u in (0, 1) -> the range."""
        return self.low + u * (self.high - self.low)


def ranges(family: TuneFamily, target: Target, parts: Sequence[str], tokens: int) -> list[Range]:
    """The range of each of the `parts` for images of `tokens` tokens, the noisiest first."""
    found = []
    for part, low, high in family.experts:
        if part in parts:
            whole = low <= 0 and high >= 1
            assert whole or isinstance(target, FlowTarget)
            quantiles = (0.0, 1.0) if whole else (_quantile(target, low, tokens), _quantile(target, high, tokens))
            found.append(Range(part, *quantiles))
    return found


def _quantile(target: Any, time: float, tokens: int) -> float:
    return time if time in (0.0, 1.0) else target.quantile(time, tokens)


def choose(found: Sequence[Range], u: float) -> Range:
    """The range that u, uniform in (0, 1), falls into when each has its share."""
    total = sum(span.high - span.low for span in found)
    for span in found:
        u -= (span.high - span.low) / total
        if u < 0:
            return span
    return found[-1]


def caller(model: nn.Module, part: str, several: bool) -> Callable[..., Any]:
    """What a family calls: the model itself, or one expert of it; `model` may be a wrapper."""
    return partial(model, part) if several else model
