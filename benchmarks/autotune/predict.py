"""The error of predicted step times on plans that were not timed for the fit.

The goal is 5 % on a GPU and 10 % on a CPU at tiny size. Everything runs as in `tread autotune`: the same probes, the
same timer, the same fit. The five plans have windows and, but for one, ratios that no probe has; dense is timed again
beside them, and what is judged is the speed-up, because the load of a machine changes between two rounds of timing.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tread.autotune.cost import Routes, fit, key_of, routes_of
from tread.autotune.jobs.job import read_job
from tread.autotune.measure import Budget, Timer, measure_kept, measure_seconds, steady
from tread.autotune.rules import RATIOS
from tread.autotune.run import measured_device
from tread.autotune.store import Store
from tread.autotune.subject import Subject

GOALS = {"cuda": 0.05, "cpu": 0.1}
TRIED = (0.25, 0.3, 0.35, 0.5, 0.65, 0.7, 0.75)
"""All ratios that are timed: compiled layers get code for each."""


def unseen(depth: int) -> list[Routes]:
    """Five plans, by shares of the depth: short, long and several windows, low and high ratios."""

    def window(ratio: float, first: float, last: float) -> str:
        return f"{round(first * (depth - 1))}..{round(last * (depth - 1))}@{ratio:g}"

    return [
        routes_of(key)
        for key in (
            window(0.5, 0.2, 0.7),
            window(0.3, 0.1, 0.9),
            window(0.65, 0.4, 0.8),
            f"{window(0.35, 0.1, 0.3)} {window(0.65, 0.5, 0.9)}",
            window(0.7, 0.6, 0.95),
        )
    ]


def measure(config: str | None, settings: Sequence[str], *, timer: Timer | None = None) -> dict[str, Any]:
    """Fit on this machine, then time the unseen plans; predicted and timed seconds and speed-ups of each."""
    device = measured_device()
    timer = timer or steady(device)
    with tempfile.TemporaryDirectory(prefix="tread-autotune-") as name:
        job, folder = read_job(config, settings), Path(name)
        subject = Subject(job.open(folder, TRIED))
        store, budget = Store(folder, job.identity(), {}), Budget(float("inf"))
        tokens = subject.tokens(measure_kept(subject, store, TRIED))
        cost = fit(measure_seconds(subject, store, subject.probes(RATIOS), timer, budget), subject.stacks, tokens)
        again = Store(folder / "again", job.identity(), {})
        again.path.parent.mkdir()
        plans = [(), *unseen(subject.rules.depth)]
        timed = measure_seconds(subject, again, plans, timer, budget)
        subject.loop.close()
        rows = {
            key_of(routes): {
                "predicted_seconds": cost.seconds(routes),
                "timed_seconds": timed[routes],
                "predicted_speedup": cost.speedup(routes),
                "timed_speedup": timed[()] / timed[routes],
                "error": cost.speedup(routes) / (timed[()] / timed[routes]) - 1,
                "error_of_seconds": cost.seconds(routes) / timed[routes] - 1,
            }
            for routes in plans
        }
        return {
            "subject": subject.summary(),
            "goal": GOALS.get(device.type, GOALS["cpu"]),
            "worst": max(abs(row["error"]) for row in rows.values()),
            "fit": cost.to_config(),
            "probes": store.facts["seconds"],
            "plans": rows,
        }
