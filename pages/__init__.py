"""The documentation pages and config files that repeat the code: `make docs` writes them.

They are for a clone; an installed tread neither has nor needs them. Everything in the package may be imported here.
"""
