"""A terminal that is closed."""

import os
import pty
import signal
import sys
import termios
from pathlib import Path

from tests.programs import environment
from tests.tiny.runs import TINY, go_on, losses
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints, read_whole


def test_a_run_whose_terminal_is_closed_is_saved(tmp_path: Path) -> None:
    """The kernel hangs up on the process, and everything that it prints from then on is an error."""
    folder = tmp_path / "run"
    long = ["train.steps=2000", "log.every=1", "checkpoint.every=2000", f"output_dir={folder}"]
    command = [sys.executable, "-m", "tread", "train", *TINY, *long]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
        termios.tcsetwinsize(0, (24, 120))  # a terminal without columns has no progress bar
        os.execve(sys.executable, command, environment())
    shown = b""
    while b"loss " not in shown:
        shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 128 + signal.SIGHUP, shown[-2000:]
    (saved,) = list_checkpoints(folder / CHECKPOINTS)
    step = read_whole(saved)["step"]
    assert len(losses(folder)) == step > 0
    assert len(losses(go_on(folder, f"train.steps={step + 1}", "log.every=1"))) == step + 1
