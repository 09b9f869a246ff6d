"""A known cost of a step, plans by brute force, and tiny jobs that are tuned."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.tiny.runs import TINY, forget
from tread.autotune.cost import routes_of
from tread.autotune.rules import Rules
from tread.autotune.subject import Subject
from tread.cli import main

SCRATCH = [
    *[*TINY, "model.depth=8", "train.batch_size=4", "validation.samples=4"],
    *["optimizer.learning_rate=0.03", "optimizer.warmup_steps=0"],
]
"""A `tread train` job of eight layers and 64 tokens; after few large steps its layers matter to its predictions."""
FAST = ["--start-steps", "6", "--ratios", "0.25,0.5"]
OUT = Path("autotune/train")
"""Where the tuning of such a job is written."""


@dataclass
class Law:
    """Seconds of a step: a fixed part, one for each window, and per layer what the tokens that it saw cost."""

    fixed: float = 0.25
    window: float = 0.01
    linear: float = 0.1
    square: float = 0.05
    slow: float = 1.0
    """Factor on all of it, by which a device slows down."""
    steps: int = 1
    """Steps that are run for each timing; a CUDA graph is captured after some."""
    calls: int = 0
    """Plans that were timed."""
    asked: int = 0
    """Plans whose losses were measured."""
    interrupt: int | None = None
    """The call at which the user presses Ctrl-C."""
    watch: Callable[[], None] = lambda: None
    """Called before each timing."""
    subject: Subject | None = None

    def clock(self) -> float:
        """A clock by which each measurement takes a second, and nothing else any time."""
        return float(self.calls + self.asked)

    def seconds(self) -> float:
        """What the last forward cost, by what its handle says that it dropped."""
        assert self.subject is not None
        handle = self.subject.handles[0]
        selections = handle.selections
        tokens, depth = handle.seen.tokens, handle.plan.depth or 0
        shares = [1.0] * depth
        if selections:
            for route, kept in zip(handle.plan.routes, selections, strict=True):
                for layer in range(route.start_layer_idx, route.end_layer_idx + 1):
                    shares[layer] = kept.shape[1] / tokens
        layers = sum(self.linear * share + self.square * share**2 for share in shares)
        return self.slow * (self.fixed + self.window * len(selections) + layers)

    def of(self, plan: str, depth: int = 8) -> float:
        """What a step of a plan costs a model of 64 tokens that drops as many as the ratio says, on a quick device."""
        seconds = self.fixed + depth * (self.linear + self.square)
        for route in routes_of(plan):
            kept, layers = 1 - route.selection_ratio, route.end_layer_idx - route.start_layer_idx + 1
            seconds += self.window - layers * (self.linear * (1 - kept) + self.square * (1 - kept**2))
        return seconds


def tune_cli(*arguments: str) -> int:
    """The exit status of `tread autotune`."""
    forget()
    try:
        main(["autotune", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def measurements(folder: Path) -> dict[str, Any]:
    """What a tuning has kept."""
    return json.loads((folder / "measurements.json").read_text())


def written(folder: Path) -> list[dict[str, Any]]:
    """The routes that a tuning has written."""
    return json.loads((folder / "tread_config.json").read_text())["tread_config"]["routes"]


def config_file(config: dict[str, Any], name: str = "c.json") -> str:
    """A config of `tread finetune` as a file."""
    Path(name).write_text(json.dumps(config))
    return name


def gap_of(losses: Sequence[Sequence[float]]) -> float:
    """Routed over dense loss, less 1."""
    return sum(routed for _, routed in losses) / sum(dense for dense, _ in losses) - 1


def plans_by_hand(facts: dict[str, Any], law: Law) -> list[tuple[float, float, str]]:
    """Speed-up by the law, sum of measured gaps, and name, of every plan that can be made of measured windows."""
    rules = Rules(depth=8, tokens=64, adapts=False)
    windows = [name for name in facts["losses"] if " " not in name]
    found = []
    for some in [*combinations(windows, 1), *combinations(windows, 2)]:
        routes = sorted((routes_of(name)[0] for name in some), key=lambda route: route.start_layer_idx)
        overlap = len(routes) == 2 and routes[0].end_layer_idx >= routes[1].start_layer_idx
        if overlap or rules.broken(routes):
            continue
        plan = " ".join(sorted(some, key=lambda name: int(name.split("..")[0])))
        gap = sum(max(0.0, gap_of(facts["losses"][name])) for name in some)
        found.append((law.of("dense") / law.of(plan), gap, plan))
    return found
