"""Take measurements one by one: each is saved before the next begins, and none begins that would exceed the budget.

- Steps are timed as they run in training: blocks of several steps between two synchronisations, after warm-up steps of
  the same plan, so that nothing is compiled or captured in them. Compilation happens before, in a first step of each
  plan with its own progress bar, so that the remaining time shown for timing is that of steps alone.
- All plans are timed in three rounds, the second in reverse, so that a device that slows down affects all of them; the
  minimum of the three counts, because disturbances only add time.
- A measurement is expected to take as long as the last one of the same stage; those that do not fit into the budget are
  left out, and the search uses the rest.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tqdm import tqdm

from tread.autotune.cost import Routes, key_of
from tread.autotune.store import Store
from tread.autotune.subject import Subject
from tread.training.trial import WARM_UPS

ROUNDS = 3
BLOCKS = 3
BLOCK_SECONDS, LONGEST_BLOCK = 0.3, 20
"""Approximate duration of a block of steps between two synchronisations, and its most steps."""


class Timer(Protocol):
    """Measures the seconds of one step, running it as often as needed."""

    def __call__(self, step: Callable[[], Any]) -> float: ...


def steady(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """A timer of steps on a device: the median over blocks after warm-up steps."""

    def block(step: Callable[[], Any], count: int) -> float:
        _wait(device)
        begin = clock()
        for _ in range(count):
            step()
        _wait(device)
        return (clock() - begin) / count

    def timer(step: Callable[[], Any]) -> float:
        for _ in range(WARM_UPS.get(device.type, 1)):
            step()
        length = max(1, min(LONGEST_BLOCK, round(BLOCK_SECONDS / max(block(step, 1), 1e-6))))
        return statistics.median(block(step, length) for _ in range(BLOCKS))

    return timer


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class Budget:
    """A time budget for measurements, which starts when it is created."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)
    _took: dict[str, float] = field(init=False, default_factory=dict)
    """Seconds of the last measurement of each stage."""

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (self.clock() - self._begin)

    def fitting(self, items: Sequence[Any], what: str) -> Iterator[Any]:
        """Iterate over the items with a progress bar, until the next would exceed the budget."""
        with tqdm(items, desc=what, unit="measurement", mininterval=0.5) as bar:
            for index, item in enumerate(bar):
                begin = self.left
                if begin <= self._took.get(what, 0.0):
                    bar.write(f"{what}: the budget ends here, {len(items) - index} of {len(items)} are left out")
                    return
                yield item
                self._took[what] = begin - self.left


def measure_kept(subject: Subject, store: Store, ratios: Iterable[float]) -> dict[float, int]:
    """Measure the number of tokens that routes of these ratios keep."""
    counts = {}
    for ratio in ratios:
        kept = subject.kept(ratio)  # even if it is stored: the handle needs a forward first
        store.facts["kept"][f"{ratio:g}"] = kept
        counts[ratio] = kept
    store.write()
    return counts


def measure_seconds(
    subject: Subject, store: Store, plans: Sequence[Routes], timer: Timer, budget: Budget, *, rounds: int = ROUNDS
) -> dict[Routes, float]:
    """The time of a step under each plan, the minimum over rounds; plans beyond the budget are missing."""
    orders = [list(plans) if number % 2 == 0 else list(plans)[::-1] for number in range(rounds)]
    visits = [(number, routes) for number, order in enumerate(orders) for routes in order]
    due = [(number, routes) for number, routes in visits if len(store.get("seconds", key_of(routes)) or ()) <= number]
    step = subject.stepping()
    if fresh := subject.uncompiled(routes for _, routes in due):
        for routes in budget.fitting(fresh, "compiling"):
            subject.compile(routes)
    for _, routes in budget.fitting(due, "timing steps"):
        subject.release()
        with subject.routed(routes):
            seconds = timer(step)
        store.add("seconds", key_of(routes), [*(store.get("seconds", key_of(routes)) or ()), seconds])
    subject.release()
    times = {routes: store.get("seconds", key_of(routes)) for routes in plans}
    return {routes: min(per_round) for routes, per_round in times.items() if per_round}


def measure_losses(
    subject: Subject, store: Store, plans: Sequence[Routes], budget: Budget, what: str = "sensitivity"
) -> dict[str, Any]:
    """Dense and routed losses of each plan, by its key; plans beyond the budget are missing."""
    due = [routes for routes in plans if store.get("losses", key_of(routes)) is None]
    if due:
        with subject.evaluating():
            for routes in budget.fitting(due, what):
                store.add("losses", key_of(routes), subject.losses(routes))
    every = {key_of(routes): store.get("losses", key_of(routes)) for routes in plans}
    return {key: losses for key, losses in every.items() if losses is not None}
