"""The Pareto front of plans, by exact dynamic programming over layers.

- Both objectives of a plan are sums over its windows: seconds saved (`cost.py`), and the loss gap of each window
  measured alone (`sensitivity.py`). So a plan within the first layers that is dominated stays dominated whatever
  follows, and one pass over the layers yields the whole front without listing all combinations.
- The number of layers in all windows is a third coordinate, because the rules limit it.
- Savings are compared to the nanosecond: sums of floats in another order differ by less, and a plan that is faster by
  rounding alone would stay on the front at any gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tread.autotune.cost import Routes
from tread.routing.route import Route


@dataclass(frozen=True, kw_only=True)
class Window:
    """A measured window."""

    route: Route
    saving: float
    """Seconds that it saves per step."""
    gap: float
    """The loss gap of this window alone: routed over dense loss, minus 1."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan with its objectives; without routes it is dense."""

    routes: Routes
    saving: float
    gap: float

    @property
    def layers(self) -> int:
        """Number of layers in all its windows."""
        return sum(len(route.layers) for route in self.routes)


DENSE = Plan(routes=(), saving=0.0, gap=0.0)


def front(windows: Sequence[Window], *, depth: int, longest: int, most: int) -> list[Plan]:
    """The unbeaten plans of at most `most` disjoint windows with at most `longest` layers, the fastest first.

    A plan is beaten by one that saves as much or more at a gap as small or smaller, and is not equal to it.
    """
    ending: dict[int, list[Window]] = {}
    for window in windows:
        ending.setdefault(window.route.end_layer_idx, []).append(window)
    # fronts[n][layer]: plans of n windows within the layers before it
    fronts: list[list[list[Plan]]] = [[[DENSE] for _ in range(depth + 1)]]
    for count in range(1, most + 1):
        by_layer: list[list[Plan]] = [[]]
        for layer in range(1, depth + 1):
            candidates = list(by_layer[layer - 1])
            for window in ending.get(layer - 1, ()):
                candidates += [
                    joined
                    for before in fronts[count - 1][window.route.start_layer_idx]
                    if (joined := _with(before, window)).layers <= longest
                ]
            by_layer.append(_unbeaten(candidates, by_layers=True))
        fronts.append(by_layer)
    # fewest windows first: of equal plans, these are kept
    return _unbeaten([plan for some in fronts for plan in some[depth]], by_layers=False)


def _with(plan: Plan, window: Window) -> Plan:
    return Plan(routes=(*plan.routes, window.route), saving=plan.saving + window.saving, gap=plan.gap + window.gap)


def _unbeaten(plans: list[Plan], *, by_layers: bool) -> list[Plan]:
    """The Pareto front in saving, gap and, `by_layers`, layers; of equal plans, the first: the sort is stable."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (-round(plan.saving, 9), plan.gap)):
        if not any(other.gap <= plan.gap and (not by_layers or other.layers <= plan.layers) for other in kept):
            kept.append(plan)  # plans already in `kept` save as much or more
    return kept


def at_speed(plans: Sequence[Plan], dense: float, target: float) -> list[Plan]:
    """The plans of a front at least `target` times as fast as a step of `dense` seconds, the smallest gap first."""
    return [plan for plan in reversed(plans) if dense / (dense - plan.saving) >= target]


def within_gap(plans: Sequence[Plan], most: float) -> list[Plan]:
    """The plans of a front whose gap is at most `most`, the fastest first."""
    return [plan for plan in plans if plan.gap <= most]


def from_knee(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of a front from its knee on: the one farthest below the line between its ends, then its neighbours."""
    if not plans:
        return []
    high, low = plans[0], plans[-1]
    across, up = high.saving - low.saving, high.gap - low.gap

    def below(plan: Plan) -> float:
        share = (plan.saving - low.saving) / across if across else 0.0
        return share - ((plan.gap - low.gap) / up if up else 0.0)

    return sorted(plans, key=lambda plan: (-below(plan), plan.gap))
