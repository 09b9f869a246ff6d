"""A terminal that is closed."""

import os
import pty

from tread.training.signals import leave_terminal


def test_what_is_printed_after_the_terminal_was_closed_is_dropped() -> None:
    """A child whose output is a terminal that goes away, as when a window is closed."""
    master, terminal = pty.openpty()
    child = os.fork()
    if child == 0:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(master)
        try:
            os.write(1, b"before")
        except OSError:
            leave_terminal()
            os._exit(os.write(1, b"after"))
        os._exit(0)
    os.close(terminal)
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(b"after")
