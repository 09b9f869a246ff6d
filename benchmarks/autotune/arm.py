"""An arm: one way to train, with the figures of its long runs."""

from dataclasses import dataclass

from tread.routing.route import Route


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, with the means over its seeds."""

    name: str
    routes: tuple[Route, ...]
    depth: int
    distance: float
    speed: float
    """Steps per second, or another figure that is proportional to it."""
    seeds: int
