"""Training objectives: the loss that a network is trained on, and the field that a solver integrates.

A new one is a file with a frozen dataclass that follows `objective.Objective`, and a line in `OBJECTIVES`. The package
imports torch and `tread.errors` only.
"""

from collections.abc import Mapping
from dataclasses import fields

from tread.errors import check_choice, check_keys
from tread.objectives.edm import EDM
from tread.objectives.flow import Flow
from tread.objectives.objective import Field, Net, Objective

__all__ = ["EDM", "OBJECTIVES", "Field", "Flow", "Net", "Objective", "build"]

OBJECTIVES: dict[str, type[EDM] | type[Flow]] = {"edm": EDM, "flow": Flow}


def build(name: str, settings: Mapping[str, object]) -> Objective:
    """The objective called `name`, with `settings` checked.

    >>> build("flow", {"shift": 3.0})
    Flow(time='uniform', logit_mean=0.0, logit_std=1.0, shift=3.0)
    """
    objective = OBJECTIVES[check_choice(name, "objective.name", OBJECTIVES)]
    check_keys(settings, (field.name for field in fields(objective)), f"objective {name!r}")
    return objective(**settings)  # pyright: ignore[reportArgumentType]  (each value is checked by the class)
