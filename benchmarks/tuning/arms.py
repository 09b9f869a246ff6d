"""The arms of the experiment, and how large everything is.

- All arms of a seed start from the same weights and see the same samples, noise and times at the same steps.
- Warm-up and cool-down are those that `tread finetune` gives to adapters by default, and so is the loss on kept tokens.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from tread.errors import ConfigError
from tread.finetune.settings import SCHEDULE
from tread.kernels.checkpointing import Checkpointing
from tread.routing.plan import RoutePlan

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TUNED = (CLASSES.index("horse"), CLASSES.index("ship"))
"""Classes that the base never saw."""
GUIDANCE = (1.0, 1.5)
"""Scales that samples are drawn at; 1 is unguided."""
Kind = Literal["lora", "full"]
LONG = (2, -2)
"""The window that the speed rows have; it leaves a dropped token three of the twelve layers."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One fine-tune; ratio 0 is dense."""

    kind: Kind
    ratio: float
    layers: tuple[int, int] = LONG
    recomputed: Literal["", "all", "dense"] = ""
    """Steps that are checkpointed: none, all of them, or those that drop less than the plan says."""

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """An arm by its name: `lora-dense`, `full-0.5`, `lora-0.25@3..-4`, `lora-0.5+dense`."""
        found = re.fullmatch(r"(lora|full)-(?:dense|(0?\.\d+)(?:@(-?\d+)\.\.(-?\d+))?)(?:\+(all|dense))?", name)
        if found is None:
            raise ConfigError(
                f"arm {name!r}: give lora or full, then dense or a ratio, such as lora-0.25@3..-4; +all or +dense "
                "after it checkpoints all steps or those of the schedule."
            )
        kind, ratio, start, end, recomputed = found.groups()
        layers = LONG if start is None else (int(start), int(end))
        return cls(kind=kind, ratio=float(ratio or 0), layers=layers, recomputed=recomputed or "")  # pyright: ignore[reportArgumentType]  (the pattern has these words alone)

    @property
    def name(self) -> str:
        """The kind, the ratio, a window that is not the long one, and the checkpointed steps."""
        window = "" if self.layers == LONG else "@{}..{}".format(*self.layers)
        routes = f"{self.ratio:g}{window}" if self.ratio else "dense"
        return f"{self.kind}-{routes}{'+' * bool(self.recomputed)}{self.recomputed}"

    @property
    def checkpointing(self) -> Checkpointing:
        """What `handle.compile` is told."""
        return "dense" if self.recomputed == "dense" else self.recomputed == "all"

    def plan(self, steps: int) -> RoutePlan:
        """The routes of a run of `steps` steps; a dense arm has some too and never uses them."""
        start, end = self.layers
        route = {"selection_ratio": self.ratio or 0.5, "start_layer_idx": start, "end_layer_idx": end}
        schedule = SCHEDULE.of(steps)
        given: dict[str, Any] = {"routes": [route]}
        if self.ratio and schedule is not None:
            given["schedule"] = schedule.to_config()
        return RoutePlan.from_config(given).with_total_steps(steps)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    double_layers: int
    single_layers: int
    heads: int
    head_axes: tuple[int, int, int]
    """Channels of a head on each rotary axis: image, row, column."""
    side: int
    """Pixels, which are tokens, of a side; images are averaged down to it."""
    batch: int
    base_rate: float
    rank: int
    rate_warmup: int
    """Steps over which the learning rate rises."""
    timed: int
    """Steps that a level of the ratio is timed over before the run."""
    samples: int
    sample_batch: int
    solver_steps: int
    compile: bool


SCALES = {
    "full": Scale(
        double_layers=4, single_layers=8, heads=6, head_axes=(8, 28, 28), side=32, batch=128, base_rate=3e-4, rank=16,
        rate_warmup=50, timed=12, samples=2000, sample_batch=500, solver_steps=25, compile=True,
    ),
    "smoke": Scale(
        double_layers=2, single_layers=5, heads=2, head_axes=(4, 6, 6), side=8, batch=4, base_rate=1e-3, rank=4,
        rate_warmup=2, timed=2, samples=8, sample_batch=8, solver_steps=2, compile=False,
    ),
}  # fmt: skip
