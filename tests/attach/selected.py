"""The cases that `make test` runs the costly tests on; all others run them in `make contract`."""

from collections.abc import Iterable

import pytest

from tests.tiny.stock import CASES

MISSION = ("flux", "flux-kontext", "wan", "wan-ti2v", "auraflow", "pixart", "sd3", "lumina2", "qwenimage")


def route(start: int, end: int, ratio: float = 0.5) -> dict:
    """One route of a config."""
    return {"selection_ratio": ratio, "start_layer_idx": start, "end_layer_idx": end}


TOY_CONFIG = {"routes": [route(1, 4)]}
"""One window inside the toy of six layers."""


def inner(depth: int) -> list[dict]:
    """One route that leaves the first and the last layer dense, where there are enough layers."""
    return [route(min(1, depth - 1), max(depth - 2, min(1, depth - 1)))]


def cases_of(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test on these cases, and on all others in `make contract`."""
    marks = {name: [] for name in names}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks.get(case.name, [pytest.mark.contract])) for case in CASES]
    )


mission_cases = cases_of(MISSION)
