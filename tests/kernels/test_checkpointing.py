"""What selective checkpointing saves: operators that backward does not run again."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tread.kernels.checkpointing import LEAST, recomputing


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def a(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def gradients(layer: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[tuple[Tensor, ...], Counter[str]]:
    """The gradients of the inputs, and the calls in backward."""
    output = layer(*inputs)
    with Calls() as backward:
        return torch.autograd.grad(output.sum(), inputs), backward.counts


ENOUGH, FEW = LEAST, LEAST - 1
OPERATORS: list[tuple[str, Callable[..., Tensor], list[Tensor], bool]] = [
    ("mm", torch.mm, [a(2, ENOUGH), a(ENOUGH, 3)], True),
    ("mm", torch.mm, [a(ENOUGH, FEW), a(FEW, ENOUGH)], False),
    ("addmm", torch.addmm, [a(3), a(2, ENOUGH), a(ENOUGH, 3)], True),
    ("addmm", torch.addmm, [a(ENOUGH), a(2, FEW), a(FEW, ENOUGH)], False),
    ("bmm", torch.bmm, [a(2, 3, ENOUGH), a(2, ENOUGH, 3)], True),
    ("bmm", torch.bmm, [a(2, ENOUGH, FEW), a(2, FEW, ENOUGH)], False),
    ("baddbmm", torch.baddbmm, [a(2, 3, 3), a(2, 3, ENOUGH), a(2, ENOUGH, 3)], True),
    ("baddbmm", torch.baddbmm, [a(2, 3, ENOUGH), a(2, 3, FEW), a(2, FEW, ENOUGH)], False),
    ("convolution", F.conv2d, [a(1, ENOUGH // 4, 2, 2), a(1, ENOUGH // 4, 2, 2)], True),
    ("convolution", F.conv2d, [a(1, 1, 20, 20), a(1, 1, 2, 2)], False),
    ("_scaled_dot_product_flash_attention_for_cpu", F.scaled_dot_product_attention, [a(1, 1, 4, 8)] * 3, True),
    ("gelu", F.gelu, [a(2, ENOUGH)], False),
]


@pytest.mark.parametrize(("name", "operator", "inputs", "saved"), OPERATORS)
def test_products_and_attention_are_saved(
    name: str, operator: Callable[..., Tensor], inputs: list[Tensor], saved: bool
) -> None:
    """Products of a short inner dimension, such as a LoRA's, are computed again."""

    def layer(*inputs: Tensor) -> Tensor:
        return operator(*(one * 1 for one in inputs)).sin()  # sin saves the operator's result

    expected, in_backward = gradients(layer, inputs)
    found, with_recomputation = gradients(partial(recomputing("selective"), layer), inputs)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    again = with_recomputation - in_backward
    assert again["mul"] >= len(inputs), "everything else is recomputed"
    assert again[name] == (0 if saved else 1)
