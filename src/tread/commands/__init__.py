"""The commands of `tread`: each reads its options and calls the function that does the work; `cli.py` has their table.

A command may import every package but `cli`, and does so lazily, when it runs, so that `--help` is fast.
"""

import argparse
from collections.abc import Callable


def make_parser(name: str, function: Callable[[list[str]], None]) -> argparse.ArgumentParser:
    """The parser of `tread NAME`, described by the first line of its function."""
    about = function.__doc__ or ""
    return argparse.ArgumentParser(prog=f"tread {name}", description=f"{about[:1].upper()}{about[1:]}.")
