"""A package, so that its tests may have the names of others: `from .tiny import TINY`."""
