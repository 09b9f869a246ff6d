"""Tiny random pipelines of every family, found by looking: one file per family, each with a list `CASES`."""

import importlib
import pkgutil

from .parts import Tiny

TINY: dict[str, Tiny] = {
    case.name: case
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "parts")
    for case in importlib.import_module(f"{__name__}.{module}").CASES
}
"""By name; `TINY[name](folder)` writes the pipeline there."""
