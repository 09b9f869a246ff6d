"""The terminal of a command: our warnings are a line each, what libraries say is not there."""

import ast
import logging
import os
import textwrap
import warnings

import pytest

from tests.programs import ROOT, finished
from tread.cli import COMMANDS, main
from tread.errors import RiskWarning, TreadWarning

NOISY = """
import logging
import sys
import warnings

from tread import cli
from tread.errors import RiskWarning, TreadWarning


def noisy(arguments):
    import diffusers, transformers, torch
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    warnings.warn("LIBRARY at our line")  # as libraries do with stacklevel=2, when our code calls them
    warnings.warn_explicit("LIBRARY is deprecated", FutureWarning, "/elsewhere/library.py", 1)
    of_diffusers.get_logger("diffusers.models").warning("LIBRARY diffusers")
    of_transformers.get_logger("transformers.models").warning("LIBRARY transformers")
    for name in ("torchao", "huggingface_hub", "torch._dynamo.convert_frame", "accelerate.tracking", "any.other"):
        logging.getLogger(name).warning("LIBRARY %s", name)
    torch._C._warn()  # TORCH_WARN of C++, which becomes a Python warning
    warnings.warn("a file was left out", TreadWarning)
    warnings.warn("a ratio is high", RiskWarning)
    logging.getLogger("any.other").error("LIBRARY cannot go on")


cli.COMMANDS["plan"] = noisy
noisy.__code__ = noisy.__code__.replace(co_filename=cli.__file__)
cli.main(["plan"])
"""


def said(**changes: str) -> list[str]:
    ended = finished("-c", textwrap.dedent(NOISY), cwd=None, **changes)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.splitlines()


def test_warnings_are_ours_alone() -> None:
    assert said() == ["warning: a file was left out", "warning: a ratio is high", "LIBRARY cannot go on"]


def test_one_variable_shows_those_of_libraries_too() -> None:
    shown = "\n".join(said(TREAD_WARNINGS="all"))
    for words in ("at our line", "is deprecated", "diffusers", "transformers", "torchao", "any.other"):
        assert f"LIBRARY {words}" in shown
    assert "warning: a file was left out\nwarning: a ratio is high\n" in shown


def test_a_torch_log_that_was_asked_for_is_shown() -> None:
    assert "LIBRARY torch._dynamo.convert_frame" in "\n".join(said(TORCH_LOGS="recompiles"))


def test_what_a_program_set_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library user who calls the command keeps his settings."""
    monkeypatch.delenv("DIFFUSERS_VERBOSITY", raising=False)
    before = warnings.showwarning, logging.root.manager.disable, dict(os.environ)
    seen = []
    monkeypatch.setitem(
        COMMANDS, "plan", lambda _: seen.append((logging.root.manager.disable, os.environ["DIFFUSERS_VERBOSITY"]))
    )
    main(["plan"])
    assert seen == [(logging.WARNING, "error")]
    assert (warnings.showwarning, logging.root.manager.disable, dict(os.environ)) == before


def test_every_warning_of_ours_has_a_category_of_ours() -> None:
    """A line of ours is no sign of a warning of ours: libraries blame their caller."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                names = {ast.unparse(one) for one in node.args[1:2]}
                assert names in ({"RiskWarning"}, {"TreadWarning"}), f"{path}:{node.lineno}"
    assert issubclass(RiskWarning, TreadWarning)
