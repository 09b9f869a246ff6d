"""Every family, one file each, and the classes that cannot be routed."""

from tread.attach.families.flux import FLUX
from tread.attach.family import Family

FAMILIES: tuple[Family, ...] = (FLUX,)

REFUSED: dict[str, str] = {}
"""Class name -> the reason."""
