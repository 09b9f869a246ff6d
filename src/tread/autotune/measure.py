"""The measurements, one after the other: each is kept before the next begins, and none begins that has no time left.

- Steps are timed as they run in training: several between two synchronisations, after others of their kind, so that
  nothing is compiled or captured in them. Layers are compiled before that, by a first step of each plan behind a bar of
  its own: the time that timing still takes is then that of steps alone.
- All plans are gone through three times, the second time backwards, so that a device that slows down slows all of them;
  the least of the three counts, because what disturbs a step only adds to it.
- The time that a measurement takes is that of the last one of its kind; what does not fit into the budget is left out,
  and the search goes over what there is.
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
"""A block of steps between two synchronisations takes about so long, and has at most so many."""


class Timer(Protocol):
    """Seconds of one step, which may be run as often as needed."""

    def __call__(self, step: Callable[[], Any]) -> float: ...


def steady(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """A timer of steps on a device: the median of some blocks after warm-ups."""

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
    """The time that measurements may take, from now on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)
    _took: dict[str, float] = field(init=False, default_factory=dict)
    """Seconds of the last measurement of each kind."""

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (self.clock() - self._begin)

    def fitting(self, items: Sequence[Any], what: str) -> Iterator[Any]:
        """The items, behind a bar that tells the time they still take, until the next would not fit."""
        with tqdm(items, desc=what, unit="measurement", mininterval=0.5) as bar:
            for index, item in enumerate(bar):
                begin = self.left
                if begin <= self._took.get(what, 0.0):
                    bar.write(f"{what}: the budget ends here, {len(items) - index} of {len(items)} are left out")
                    return
                yield item
                self._took[what] = begin - self.left


def measure_kept(subject: Subject, store: Store, ratios: Iterable[float]) -> dict[float, int]:
    """Tokens that routes of these ratios keep."""
    found = {}
    for ratio in ratios:
        kept = subject.kept(ratio)  # also where it is known: the handle must have seen a forward
        store.facts["kept"][f"{ratio:g}"] = kept
        found[ratio] = kept
    store.write()
    return found


def measure_seconds(
    subject: Subject, store: Store, plans: Sequence[Routes], timer: Timer, budget: Budget, *, rounds: int = ROUNDS
) -> dict[Routes, float]:
    """The time of a step under each plan: the least of the rounds; plans that no time was left for are missing."""
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
    return {routes: min(some) for routes, some in times.items() if some}


def measure_losses(
    subject: Subject, store: Store, plans: Sequence[Routes], budget: Budget, what: str = "sensitivity"
) -> dict[str, Any]:
    """Dense and routed losses of each plan, by its name; plans that no time was left for are missing."""
    due = [routes for routes in plans if store.get("losses", key_of(routes)) is None]
    if due:
        with subject.evaluating():
            for routes in budget.fitting(due, what):
                store.add("losses", key_of(routes), subject.losses(routes))
    every = {key_of(routes): store.get("losses", key_of(routes)) for routes in plans}
    return {key: found for key, found in every.items() if found is not None}
