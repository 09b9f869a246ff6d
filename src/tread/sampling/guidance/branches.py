"""Guidance settings: the strong and the weak branch.

- `kind` names what the weak branch lacks: `cfg` the label, `sg` tokens, `ag` training (another network, such as an
  earlier checkpoint), `cfg+sg` and `ag+sg` both. There are always two branches, so at most two evaluations per step.
- The strong ratio applies to every branch that is not sparser by its kind, so a routed network can be sampled cheaply
  under any kind.
- The cosine schedule lowers both ratios to 0 during sampling: coarse structure with few tokens, detail with all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tread.errors import ConfigError, check_choice, check_fraction
from tread.objectives.objective import Field, Net, Objective
from tread.routing.handle import Handle
from tread.sampling.guidance import fields

KINDS = ("cfg", "sg", "cfg+sg", "ag", "ag+sg")
SCHEDULES = ("constant", "cosine")
WEAK_RATIO = 0.7
"""Default ratio of a sparse weak branch."""


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The strong and the weak branch of guidance."""

    kind: str = "cfg"
    """One of KINDS: what the weak branch lacks."""
    strong_ratio: float = 0.0
    """The fraction of tokens that the strong branch drops; 0 is dense."""
    weak_ratio: float | None = None
    """The fraction that a sparse weak branch drops, with `sg` only; None: WEAK_RATIO."""
    schedule: str = "constant"
    """One of SCHEDULES: how the ratios change during sampling."""

    def __post_init__(self) -> None:
        check_choice(self.kind, "guidance kind", KINDS)
        check_choice(self.schedule, "ratio schedule", SCHEDULES)
        check_fraction(self.strong_ratio, "strong ratio", closed=False)
        if self.weak_ratio is not None and not self.sparser:
            raise ConfigError(
                f"weak ratio is {self.weak_ratio}, but the guidance kind {self.kind!r} has no sparse branch; leave it "
                "out, or choose sg, cfg+sg or ag+sg."
            )
        fields.check_nested(self.strong_ratio, check_fraction(self.dropped_by_weak, "weak ratio", closed=False))
        if self.schedule != "constant" and self.dropped_by_weak == 0:
            raise ConfigError(f"ratio schedule is {self.schedule!r}, but both ratios are 0; leave it out.")

    @property
    def sparser(self) -> bool:
        """Whether the weak branch drops more tokens than the strong one."""
        return self.kind.endswith("sg")

    @property
    def dropped_by_weak(self) -> float:
        """The ratio of the weak branch."""
        if not self.sparser:
            return self.strong_ratio
        return WEAK_RATIO if self.weak_ratio is None else self.weak_ratio

    @property
    def needs_routes(self) -> bool:
        """Whether any branch drops tokens."""
        return self.dropped_by_weak > 0

    @property
    def needs_null_label(self) -> bool:
        """Whether the weak branch has no label."""
        return self.kind.startswith("cfg")

    @property
    def needs_weak(self) -> bool:
        """Whether the weak branch is another network."""
        return self.kind.startswith("ag")

    def field(
        self,
        objective: Objective,
        net: Net,
        *,
        weak: Net | None,
        scale: float,
        interval: tuple[float, float] | None,
        null_label: int | None,
        levels: Sequence[float],
        seed: int | Tensor,
        samples: Tensor,
    ) -> Field:
        """The guided field of `net` for the samples with indices `samples` (B,); `weak` is the other network.

        `seed` is one for all samples or one for each, (B,).
        """
        if (weak is not None) != self.needs_weak:
            lacks = "needs a weak model, such as an earlier checkpoint: give `weak`."
            fix = lacks if weak is None else "has no use for a weak model: leave `weak` out."
            raise ConfigError(f"guidance kind {self.kind!r} {fix}")

        def branch(network: Net, ratio: float) -> Field:
            if ratio == 0:
                return objective.field(network)
            changing = fields.cosine(ratio, 0.0, levels) if self.schedule == "cosine" else fields.constant(ratio)
            return fields.sparse(objective.field(network), routing_of(network), changing, seed=seed, samples=samples)

        strong = branch(net, self.strong_ratio)
        if self.kind == "cfg":
            return fields.classifier_free(strong, scale=scale, null_label=null_label, interval=interval)
        lesser = branch(net if weak is None else weak, self.dropped_by_weak)
        if self.kind == "cfg+sg" and scale != 1:
            lesser = fields.unconditional(lesser, fields.check_null_label(null_label, scale))
        return fields.away_from(lesser, strong, scale=scale, interval=interval)


def routing_of(net: Net) -> Handle:
    """The handle of a routed network."""
    handle = getattr(net, "routing", None)
    if not isinstance(handle, Handle):
        raise ConfigError(
            "a branch of guidance drops tokens, but the model has no routes; sample a run trained with routes, or set "
            "the branch's ratio to 0."
        )
    return handle
