"""Token routing that makes diffusion-transformer training faster (TREAD, arXiv 2501.04765).

- `import tread` needs torch alone, and imports it when a name is first used: `tread --help` is there at once. Trainers,
  samplers and data load when they are used.
- `tread.attach` is the function, although a package has that name too: importing the package does not replace it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread.attach.attach import Attachment, attach
    from tread.attach.family import Family, Rotary, Side, Stack
    from tread.errors import ConfigError, RiskWarning
    from tread.routing.handle import Handle
    from tread.routing.plan import RoutePlan
    from tread.routing.route import Route
    from tread.routing.router import TREADRouter
    from tread.routing.schedule import Schedule

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "ConfigError",
    "Family",
    "Handle",
    "RiskWarning",
    "Rotary",
    "Route",
    "RoutePlan",
    "Schedule",
    "Side",
    "Stack",
    "TREADRouter",
    "attach",
]
_HOMES = {
    "attach.attach": ("Attachment",),
    "attach.family": ("Family", "Rotary", "Side", "Stack"),
    "errors": ("ConfigError", "RiskWarning"),
    "routing.handle": ("Handle",),
    "routing.plan": ("RoutePlan",),
    "routing.route": ("Route",),
    "routing.router": ("TREADRouter",),
    "routing.schedule": ("Schedule",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tread.{home}"), name)
    raise AttributeError(f"module 'tread' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Tread(ModuleType):
    @property
    def attach(self) -> Any:
        return import_module("tread.attach.attach").attach

    @attach.setter
    def attach(self, package: ModuleType) -> None:
        """Importing the package `tread.attach` sets this attribute; the function stays."""


sys.modules[__name__].__class__ = _Tread
