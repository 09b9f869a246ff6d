"""Each test trains on the CPU as if it were alone, and may run a program in Triton's interpreter."""

from collections.abc import Callable

import pytest

from tests.programs import run
from tests.training.conftest import one_process

__all__ = ["one_process"]


@pytest.fixture(scope="session")
def interpret() -> Callable[[str, str], None]:
    """`interpret(module, what)`: run it in Triton's interpreter, which Triton chooses when it is imported."""

    pytest.importorskip("triton")
    return lambda module, what: print(run("-m", module, what, TRITON_INTERPRET="1"))
