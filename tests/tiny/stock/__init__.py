"""Every case, found by looking: one file per family, each with a list `CASES`."""

import importlib
import pkgutil

CASES = [
    case
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for case in importlib.import_module(f"{__name__}.{module}").CASES
]
