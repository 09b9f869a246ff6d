"""The command `tread`: one table from subcommand to function.

A mistake of the user's ends in one sentence on stderr and exit code 2; with TREAD_DEBUG=1 in the environment the
traceback is shown. A run that a signal stopped ends with 128 plus the signal's number.
"""

import os
import sys
from collections.abc import Callable, Sequence

from tread import __version__
from tread.commands.common import autotune, doctor, families, plan, report
from tread.commands.finetuning import data, export, finetune, init
from tread.commands.pretraining import encode, evaluate, sample, train
from tread.errors import USER_ERRORS, Stopped, nearest, shown
from tread.terminal import quiet_libraries

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "finetune": finetune,
    "init": init,
    "data": data,
    "export": export,
    "sample": sample,
    "eval": evaluate,
    "encode": encode,
    "plan": plan,
    "report": report,
    "families": families,
    "doctor": doctor,
    "autotune": autotune,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `tread COMMAND ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tread COMMAND ...\n\nToken routing that makes diffusion-transformer training faster.\n")
        for name, function in COMMANDS.items():
            print(f"  {name:<10}{function.__doc__}")
        print("\n`tread COMMAND --help` says more. In the environment, TREAD_DEBUG=1 shows tracebacks and")
        print("TREAD_WARNINGS=all the warnings of libraries.")
        return
    if arguments[0] in ("-V", "--version"):
        print(f"tread {__version__}")
        return
    command, *rest = arguments
    if command not in COMMANDS:
        close = nearest(command, COMMANDS)
        _fail(f"tread: there is no command {shown(command)}{close} Choose one of: {', '.join(COMMANDS)}.")
    try:
        with quiet_libraries():
            COMMANDS[command](rest)
        sys.stdout.flush()
    except BrokenPipeError:  # `tread families | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except USER_ERRORS as error:
        if os.environ.get("TREAD_DEBUG"):
            raise
        _fail(f"tread {command}: {error}")
    except Stopped as error:  # it has said how to go on
        sys.exit(128 + error.number)
    except KeyboardInterrupt:
        _fail(f"tread {command}: interrupted", 130)


def _fail(message: str, code: int = 2) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
