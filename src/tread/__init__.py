"""Token routing that makes diffusion-transformer training faster (TREAD, arXiv 2501.04765).

`import tread` needs torch alone; trainers, samplers and data load when they are used.
"""

from tread.attach.attach import Attachment, attach
from tread.attach.family import Family, Rotary, Side, Stack
from tread.errors import ConfigError
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.risks import RiskWarning
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
