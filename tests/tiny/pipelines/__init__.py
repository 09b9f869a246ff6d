"""Tiny random pipelines of every family, found by looking: one file per family, each with a list `CASES`."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny.pipelines.case import Tiny

TINY: dict[str, Tiny] = {
    case.name: case
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "case")
    for case in importlib.import_module(f"{__name__}.{module}").CASES
}
"""By name; `TINY[name](folder)` writes the pipeline there."""

FIRST = tuple({case.family: case.name for case in reversed(TINY.values())}.values())[::-1]
"""The first pipeline of every family."""

EVERY = [*FIRST, *(pytest.param(name, marks=pytest.mark.contract) for name in TINY if name not in FIRST)]
"""Every pipeline, for tests that cost seconds each: further ones of a family run in `make contract`."""

_UNLIKE = ("flux", "hidream", "ltxvideo2", "wan")
SOME = [name if name in _UNLIKE else pytest.param(name, marks=pytest.mark.contract) for name in TINY]
"""Every pipeline, for tests of what the families share: those that are least alike run always."""

PipelineFolder = Callable[[str], Path]
"""The fixture `pipeline_folder`: the folder that a tiny pipeline was written to, by its name."""
