"""Take measurements one by one: each is saved before the next begins, and none begins that would exceed the budget.

- Steps are timed as they run in training: blocks of several steps between two synchronisations, after warm-up steps of
  the same plan, so that nothing is compiled or captured in them. Compilation happens before, in a first step of each
  plan with its own progress bar, so that the remaining time shown for timing is that of steps alone.
- For the fit, all plans are timed in three rounds, the second in reverse, so that a device that slows down affects all
  of them; the minimum of the three counts, because disturbances only add time. A round that the budget cut off does not
  count: the plans that it reached would look faster than the others.
- A finalist is timed right beside dense, three times, in alternating order, so that a clock that drifts moves both; its
  speed-up is the median over these pairs.
- A measurement is expected to take as long as the last one of the same stage; those that do not fit into the budget are
  left out, and the search uses the rest.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Pair = Mapping[str, float]
"""Seconds of a `dense` and a `routed` step, timed one right after the other by the process with the index `start`."""


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
    took: dict[str, float] = field(init=False, default_factory=dict)
    """Seconds of the last measurement of each stage."""

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (self.clock() - self._begin)

    def fitting(self, items: Sequence[Any], what: str, *, expected: float = 0.0) -> Iterator[Any]:
        """Iterate over the items with a progress bar, until the next would exceed the budget.

        `expected` are the seconds of the first one of a stage.
        """
        if not items:
            return
        with tqdm(items, desc=what, unit="measurement", mininterval=0.5) as bar:
            for index, item in enumerate(bar):
                begin = self.left
                if begin <= self.took.get(what, expected):
                    bar.write(f"{what}: the budget ends here, {len(items) - index} of {len(items)} are left out")
                    return
                yield item
                self.took[what] = begin - self.left


def measure_kept(subject: Subject, store: Store, ratios: Iterable[float]) -> dict[float, int]:
    """Measure the number of tokens that routes of these ratios keep."""
    counts = {}
    for ratio in ratios:
        kept = subject.kept(ratio)  # even if it is stored: the handle needs a forward first
        store.facts["kept"][f"{ratio}"] = kept
        counts[ratio] = kept
    store.write()
    return counts


def measure_seconds(
    subject: Subject, store: Store, plans: Sequence[Routes], timer: Timer, budget: Budget
) -> dict[Routes, float]:
    """The time of a step under each plan, the minimum over rounds; plans beyond the budget are missing."""
    orders = [list(plans) if number % 2 == 0 else list(plans)[::-1] for number in range(ROUNDS)]
    visits = [(number, routes) for number, order in enumerate(orders) for routes in order]
    due = [(number, routes) for number, routes in visits if len(store.get("seconds", key_of(routes)) or ()) <= number]
    _compile(subject, [routes for _, routes in due], budget)
    due = [(number, routes) for number, routes in due if not subject.uncompiled([routes])]
    for _, routes in budget.fitting(due, "timing steps"):
        seconds = _time(subject, routes, timer)
        store.add("seconds", key_of(routes), [*(store.get("seconds", key_of(routes)) or ()), seconds])
    subject.release()
    times = {routes: rounds for routes in plans if (rounds := store.get("seconds", key_of(routes)))}
    whole = min(map(len, times.values()), default=0)
    return {routes: min(rounds[:whole]) for routes, rounds in times.items()}


def measure_pairs(
    subject: Subject, store: Store, plans: Sequence[Routes], timer: Timer, budget: Budget, *, afresh: bool = False
) -> dict[str, list[Pair]]:
    """The last pairs of each plan, by its key; `afresh`, all by this process. Plans beyond the budget are missing."""

    def pairs(routes: Routes) -> list[Pair]:
        stored = store.get("paired", key_of(routes)) or []
        return [pair for pair in stored if pair["start"] == store.start] if afresh else stored

    due = [(number, routes) for number in range(ROUNDS) for routes in plans if len(pairs(routes)) <= number]
    _compile(subject, [one for _, routes in due for one in ((), routes)], budget)
    due = [(number, routes) for number, routes in due if not subject.uncompiled([(), routes])]
    expected = 2 * budget.took.get("timing steps", 0.0)
    for number, routes in budget.fitting(due, "timing finalists", expected=expected):
        order: list[Routes] = [(), routes] if number % 2 == 0 else [routes, ()]
        times = {one: _time(subject, one, timer) for one in order}
        pair = {"start": store.start, "dense": times[()], "routed": times[routes]}
        store.add("paired", key_of(routes), [*(store.get("paired", key_of(routes)) or ()), pair])
    subject.release()
    return {key_of(routes): found[-ROUNDS:] for routes in plans if (found := pairs(routes))}


def paired_speedup(pairs: Sequence[Pair]) -> float:
    """Dense over routed seconds, the median over pairs.

    >>> paired_speedup([{"dense": 2.0, "routed": 1.0}, {"dense": 9.0, "routed": 6.0}, {"dense": 4.0, "routed": 1.0}])
    2.0
    """
    return statistics.median(pair["dense"] / pair["routed"] for pair in pairs)


def _compile(subject: Subject, plans: Sequence[Routes], budget: Budget) -> None:
    """Compile the layers of some plans, as far as the budget allows."""
    for routes in budget.fitting(subject.uncompiled(plans), "compiling"):
        subject.compile(routes)


def _time(subject: Subject, routes: Routes, timer: Timer) -> float:
    subject.release()
    with subject.routed(routes):
        return timer(subject.stepping())


def measure_losses(
    subject: Subject, store: Store, plans: Sequence[Routes], budget: Budget, what: str = "sensitivity"
) -> dict[str, Any]:
    """Dense and routed losses of each plan, by its key; plans beyond the budget are missing."""
    due = [routes for routes in plans if store.get("losses", key_of(routes)) is None]
    if due:
        with subject.evaluating():
            for routes in budget.fitting(due, what):
                store.add("losses", key_of(routes), subject.losses(routes))
    return stored_losses(store, plans)


def stored_losses(store: Store, plans: Sequence[Routes]) -> dict[str, Any]:
    """The losses of those plans that are measured, by key."""
    every = {key_of(routes): store.get("losses", key_of(routes)) for routes in plans}
    return {key: losses for key, losses in every.items() if losses is not None}
