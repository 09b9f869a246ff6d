"""Finalists: plans of the front measured as wholes, in groups, until one of them reaches the goal.

The search adds up windows: gaps measured one by one, times by the fit. The goal is kept to by what is measured of the
whole plan, its gap and its time beside dense; where the budget has ended, what was predicted counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tread.autotune.cost import Cost, Routes, key_of
from tread.autotune.goal import Goal
from tread.autotune.measure import Pair, paired_speedup
from tread.autotune.search import Plan
from tread.autotune.sensitivity import Losses, gap

GROUP = 3
"""Plans that are measured as wholes together."""
Row = dict[str, Any]
"""A plan with its predicted and measured figures."""


def find_finalists(
    plans: Sequence[Plan],
    goal: Goal,
    cost: Cost,
    *,
    losses_of: Callable[[Sequence[Routes]], Mapping[str, Losses]],
    pairs_of: Callable[[Sequence[Routes]], Mapping[str, Sequence[Pair]]],
) -> tuple[list[Row], list[Row]]:
    """The finalists that reach the goal as wholes, the best first, and every plan that was measured for it.

    `plans` are those that reach it by what is predicted, the best first. `losses_of` and `pairs_of` measure some plans;
    those beyond the budget are missing.
    """
    rows: dict[str, Row] = {}
    for begin in range(0, len(plans), GROUP):
        group = plans[begin : begin + GROUP]
        losses = losses_of([plan.routes for plan in group])
        for plan in group:
            row = predicted(plan, cost)
            rows[row["plan"]] = row | {"whole_gap": gap(losses[row["plan"]]) if row["plan"] in losses else None}
        # plans that the gap rules out need no time
        pairs = pairs_of([plan.routes for plan in group if goal.allows(measured_gap(rows[key_of(plan.routes)]))])
        for plan in group:
            time_beside_dense(rows[key_of(plan.routes)], pairs.get(key_of(plan.routes), ()))
        if best := goal.best({name: (measured_speedup(row), measured_gap(row)) for name, row in rows.items()}):
            return [rows[name] for name in best], list(rows.values())
    return [], list(rows.values())


def predicted(plan: Plan, cost: Cost) -> Row:
    """The row of a plan with what is predicted of it."""
    routes = plan.routes
    return {"plan": key_of(routes), "seconds": cost.seconds(routes), "speedup": cost.speedup(routes), "gap": plan.gap}


def time_beside_dense(row: Row, pairs: Sequence[Pair]) -> None:
    """Enter the pairs of a plan into its row."""
    row |= {"pairs": list(pairs), "timed_speedup": paired_speedup(pairs) if pairs else None}


def measured_gap(row: Row) -> float:
    """The gap of the whole plan, at least 0; the predicted one if it was not measured."""
    return max(0.0, row["gap"] if row["whole_gap"] is None else row["whole_gap"])


def measured_speedup(row: Row) -> float:
    """The speed-up of the whole plan timed beside dense; the predicted one if it was not timed."""
    return row["speedup"] if row["timed_speedup"] is None else row["timed_speedup"]
