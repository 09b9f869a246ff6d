"""Running out of memory: an allocator's error becomes advice, anything else stays what it is."""

import pytest
import torch

from tread.errors import OutOfMemory
from tread.training.memory import out_of_memory


def test_an_allocator_that_fails_ends_in_advice() -> None:
    with pytest.raises(OutOfMemory, match=r"^not enough memory on .*\. Use less\.$"), out_of_memory("Use less."):
        torch.empty(2**60, dtype=torch.uint8)  # more than there is anywhere


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory("Use less."):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
