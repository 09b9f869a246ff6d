"""Each test trains on the CPU as if it were alone."""

from tests.training.conftest import one_process

__all__ = ["one_process"]
