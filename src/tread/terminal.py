"""What reaches the terminal of a command: our own warnings, a line each, and of libraries only errors.

- Warnings and log lines of stock libraries are for their developers: a fallback of an unused class, a deprecation in
  code that calls them. TREAD_WARNINGS=all in the environment shows them; TORCH_LOGS shows torch's, as ever.
- Our warnings are known by their category, not by the file: libraries blame the line that called them.
- A program that calls `tread.cli.main` has its own settings back afterwards.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tread.errors import TreadWarning

LEVELS = {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables by which libraries choose what they print, read when they are imported; one that is set stays."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, warnings and log lines of libraries are not shown, and our warnings are a line on stderr."""
    all_of_them = bool(os.environ.get("TREAD_WARNINGS"))
    shown, level = warnings.showwarning, logging.root.manager.disable

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, TreadWarning):
            if all_of_them:
                shown(message, category, filename, lineno, file, line)
        elif os.environ.get("RANK", "0") == "0":  # once for all processes
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    unset = [] if all_of_them else [name for name in LEVELS if name not in os.environ]
    os.environ |= {name: LEVELS[name] for name in unset}
    if not all_of_them and "TORCH_LOGS" not in os.environ:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(level)
        for name in unset:
            os.environ.pop(name, None)


def no_loading_bars() -> None:
    """Turn off the bars of stock libraries that load models, one for each part of a pipeline."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
