"""Cases of models that live outside diffusers: one file per layout, each with small models of the same signatures."""

import importlib
import pkgutil

OUTSIDE = [
    case
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for case in importlib.import_module(f"{__name__}.{module}").CASES
]
