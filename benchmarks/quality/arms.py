"""The table of the experiment: which runs there are, what each of them asks, and how large everything is.

- Runs of one seed start from the same weights and see the same images, noise and times at the same steps. The rate is
  constant, so a run that is looked at half way is the shorter run: what was measured of the dense arm on its way is
  what shorter arms are compared with.
- The rate is six times the paper's: its 1e-4 is for 400,000 steps, these runs have some thousands. The study `rate`
  asks each of the headline's arms for its own: an arm of another rate has it in its name.
- A run may be annealed at its end: it trains on while the rate falls to zero, and is looked at once more. What came
  before is the run of a constant rate, and is compared as such.
- The order is that of importance: an experiment that is cut short has answered the main questions.
- Any other windows are an arm by their name, such as `0.4@2..5+0.6@6..9`: what `tread autotune` chose, for example.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tread.config.schema import parse
from tread.errors import ConfigError
from tread.objectives import Flow
from tread.pretrain.settings import PretrainConfig
from tread.routing.cost import LayerShape, plan_cost
from tread.routing.plan import RoutePlan
from tread.sampling.guidance import Branches

PAPER = (2, 8)
"""The paper's 2..B-4 on 12 layers."""
ENDLESS = 10**9
"""Configured steps of a run that ends by wall-clock time."""
RATES = (1.2e-3, 3e-4)
"""Twice and half the scale's 6e-4; 3e-4 is also the paper's 1e-4, tuned at width 1,152, for a rate that goes as
1 / width."""
Study = Literal["headline", "rate", "ratio", "selector", "cool-down", "placement", "size", "windows"]
Window = tuple[float, int, int]
"""Ratio, first and last layer."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train; ratio 0 is dense."""

    name: str
    study: Study
    ratio: float = 0.5
    layers: tuple[int, int] = PAPER
    more: tuple[Window, ...] = ()
    """The windows after the one of `ratio` and `layers`."""
    importance: float | None = None
    """The importance of selector `l1`; None selects `random`."""
    cooldown: float = 0.0
    """The share of steps at the end of the run that are dense."""
    size: Literal["S", "B"] = "S"
    learning_rate: float | None = None
    """None takes the scale's."""

    @property
    def is_guided(self) -> bool:
        """Whether its weights are saved for guided sampling, which only some studies' tables show."""
        return self.study in ("headline", "rate")

    @property
    def needs_steps(self) -> bool:
        """Whether its number of steps must be known before it begins."""
        return self.cooldown > 0

    @property
    def windows(self) -> tuple[Window, ...]:
        """All windows; none of a dense arm."""
        return ((self.ratio, *self.layers), *self.more) if self.is_routed else ()

    @property
    def is_routed(self) -> bool:
        """Whether any step drops tokens."""
        return self.ratio > 0

    def tread_config(self) -> dict[str, Any] | None:
        """The routing of this arm."""
        if not self.is_routed:
            return None
        selector = {"selector": "random"} if self.importance is None else {"selector": "l1"}
        return {
            "routes": [
                {"selection_ratio": ratio, "start_layer_idx": start, "end_layer_idx": end}
                for ratio, start, end in self.windows
            ],
            **selector,
            "importance": self.importance,
            "schedule": {"cooldown_fraction": self.cooldown} if self.cooldown else None,
        }

    def ideal_speedup(self, config: PretrainConfig, tokens: int) -> float:
        """Dense FLOPs over this arm's, over all steps."""
        routing = self.tread_config()
        if routing is None:
            return 1.0
        plan = RoutePlan.from_config(routing | {"schedule": None}).resolve(config.model.depth or 0)
        routed = plan_cost(plan, LayerShape(width=config.model.width or 0), tokens=tokens).speedup
        return 1 / ((1 - self.cooldown) / routed + self.cooldown)


def _placement(start: int, end: int) -> Arm:
    return Arm(name=f"layers-{start}-{end}", study="placement", layers=(start, end))


ARMS = (
    Arm(name="dense", study="headline", ratio=0.0),
    Arm(name="routed", study="headline"),
    *(
        Arm(name=f"{name}-{rate:g}", study="rate", ratio=ratio, learning_rate=rate)
        for rate in RATES
        for name, ratio in (("dense", 0.0), ("routed", 0.5))
    ),
    Arm(name="ratio-0.25", study="ratio", ratio=0.25),
    Arm(name="ratio-0.6", study="ratio", ratio=0.6),
    Arm(name="ratio-0.75", study="ratio", ratio=0.75),
    Arm(name="l1-0.5", study="selector", importance=0.5),
    Arm(name="l1-1", study="selector", importance=1.0),
    Arm(name="l1-0.25", study="selector", importance=0.25),
    Arm(name="cooldown-10", study="cool-down", cooldown=0.1),
    Arm(name="cooldown-20", study="cool-down", cooldown=0.2),
    _placement(1, 7),  # early and late, as long as the paper's
    _placement(5, 11),
    Arm(name="b2-dense", study="size", size="B", ratio=0.0),
    Arm(name="b2-routed", study="size", size="B"),
    *(_placement(start, end) for start in (1, 2, 4) for end in (6, 8, 10) if (start, end) != PAPER),
)
BY_NAME = {arm.name: arm for arm in ARMS}


def arm_of(name: str) -> Arm:
    """The arm of the table with this name or these windows, or a new one with the windows that the name lists."""
    if name in BY_NAME:
        return BY_NAME[name]
    matches = [re.fullmatch(r"(0?\.\d+)@(\d+)\.\.(\d+)", window) for window in name.split("+")]
    windows = [(float(one[1]), int(one[2]), int(one[3])) for one in matches if one is not None]
    if len(windows) < len(matches):
        raise ConfigError(f"arm {name!r}: give {', '.join(BY_NAME)}, or windows such as 0.4@2..5+0.6@6..9.")
    (ratio, *layers), *more = windows = sorted(windows, key=lambda window: window[1])
    name = "+".join(f"{ratio:g}@{start}..{end}" for ratio, start, end in windows)
    found = Arm(name=name, study="windows", ratio=ratio, layers=(layers[0], layers[1]), more=tuple(more))
    return next((arm for arm in ARMS if arm == replace(found, name=arm.name, study=arm.study)), found)


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One way to sample; the settings of `tread.sampling.guidance`."""

    name: str
    kind: str = "cfg"
    scale: float = 1.5
    weak_ratio: float | None = None

    @property
    def branches(self) -> Branches:
        """The guidance branches; the weak model, if one is needed, is the same run at its first mark."""
        return Branches(kind=self.kind, weak_ratio=self.weak_ratio)


UNGUIDED = Guide(name="unguided", scale=1.0)
GUIDES = (
    Guide(name="cfg", kind="cfg"),
    Guide(name="sg", kind="sg", weak_ratio=0.7),
    Guide(name="cfg+sg", kind="cfg+sg", weak_ratio=0.7),
    Guide(name="ag", kind="ag"),
    Guide(name="ag+sg", kind="ag+sg", weak_ratio=0.7),
)
GUIDE_BY_NAME = {guide.name: guide for guide in GUIDES}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of models, data and evaluation."""

    sizes: Mapping[str, Mapping[str, int]]
    """Layers of the model by the arm's size."""
    patch: int
    batch: int
    learning_rate: float
    warmup_steps: int
    validated: int
    validate_seconds: float
    """Seconds of training between two points of the loss curve."""
    check_steps: int
    """Steps between two device synchronisations."""
    samples: int
    few: int
    """Number of first samples with separate figures, comparable with older results that drew no more at marks."""
    shown: int
    """Reference images for precision, recall and the kernel distance."""
    sample_batch: int
    solver_steps: int
    compile: bool
    graphs: bool

    def __post_init__(self) -> None:
        assert self.samples % self.sample_batch == 0
        assert self.few <= self.samples


SCALES = {
    "full": Scale(
        sizes={"S": {"depth": 12, "width": 384, "heads": 6}, "B": {"depth": 12, "width": 768, "heads": 12}},
        patch=2, batch=256, learning_rate=6e-4, warmup_steps=200, validated=5000, validate_seconds=15, check_steps=50,
        samples=10_000, few=5000, shown=10_000, sample_batch=500, solver_steps=25, compile=True, graphs=True,
    ),
    "smoke": Scale(
        sizes={"S": {"depth": 12, "width": 16, "heads": 2}, "B": {"depth": 12, "width": 32, "heads": 2}},
        patch=8, batch=4, learning_rate=1e-3, warmup_steps=2, validated=8, validate_seconds=0.1, check_steps=2,
        samples=200, few=100, shown=50, sample_batch=40, solver_steps=2, compile=False, graphs=False,
    ),
}  # fmt: skip
# compiles the full scale's shapes and runs every code path once
SCALES["rehearsal"] = replace(SCALES["full"], validated=500, samples=1000, few=500, shown=1000)


def config_of(arm: Arm, seed: int, scale: Scale, data: Path, *, steps: int) -> PretrainConfig:
    """An arm as the product's config: the shipped defaults and what the experiment says."""
    rate = scale.learning_rate if arm.learning_rate is None else arm.learning_rate
    raw = {
        "model": {
            "name": "dit",
            "size": f"{arm.size}/2",
            "patch": scale.patch,
            **scale.sizes[arm.size],
            "tread_config": arm.tread_config(),
        },
        "data": {"name": "cifar10", "path": str(data)},
        "objective": {"name": "flow", **asdict(Flow())},
        "output_dir": str(data),
        "train": {
            "steps": steps,
            "batch_size": scale.batch,
            "seed": seed,
            "compile": scale.compile,
            "graphs": scale.graphs,
        },
        "optimizer": {
            "learning_rate": rate,
            "warmup_steps": scale.warmup_steps,
            "schedule": "constant",
        },
        "validation": {"samples": 0},  # the test images are held out instead
        "log": {"trackers": "none"},
    }
    return parse(PretrainConfig, raw)
