"""Run `tread ARGUMENTS` in a process that SIGKILL ends just before a file or folder gets its name the n-th time.

`python killed.py NAME N ARGUMENTS ...`: everything that a run writes is renamed into place when it is complete, so the
name chosen is the moment of the kill.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tread.cli import main

name, times, *arguments = sys.argv[1:]
left, replace = int(times), os.replace


def kill_or_replace(source: Any, target: Any, **options: Any) -> None:
    global left
    left -= Path(target).name == name
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target, **options)


os.replace = kill_or_replace
main(arguments)
