"""Token routing that makes diffusion-transformer training faster (TREAD, arXiv 2501.04765).

`import tread` needs torch alone; trainers, samplers and data load when they are used.
"""

from tread.routing.errors import ConfigError
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.risks import RiskWarning
from tread.routing.route import Route
from tread.routing.router import TREADRouter
from tread.routing.schedule import Schedule

__version__ = "0.1.0"
__all__ = ["ConfigError", "Handle", "RiskWarning", "Route", "RoutePlan", "Schedule", "TREADRouter"]
