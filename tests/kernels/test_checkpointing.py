"""What checkpointing saves: by operator, by the handles of the model, and as torch caches and reports it."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tread.kernels import checkpointing
from tread.kernels.attention.cudnn import attention
from tread.kernels.checkpointing import LEAST, recomputed_now, recomputing
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan


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
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        F.scaled_dot_product_attention,
        [a(1, 1, 4, 8) for _ in range(3)],
        True,
    ),
    ("attention", lambda *inputs: attention(*inputs, None, None)[0], [a(1, 1, 4, 8) for _ in range(3)], True),
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


def test_a_model_with_two_handles_saves_everything_where_both_route() -> None:
    plan = RoutePlan.from_config({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 5}]})
    one, other = Handle(plan, depth=8), Handle(plan, depth=8)
    assert recomputed_now("dense", [one, other]) is False
    with other.dense():
        assert recomputed_now("dense", [one, other]) is True
        assert recomputed_now("dense", [one]) is False


def test_compiled_code_is_cached_by_its_policy() -> None:
    """Without a hash torch caches nothing; with equal ones it would load the code of the other policy."""
    hashes = [getattr(one, "cache_hash", None) for one in (checkpointing._save_expensive, checkpointing._save_nothing)]
    assert None not in hashes
    assert len(set(hashes)) == 2


def test_only_the_warning_about_in_place_operations_is_silenced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("torch._higher_order_ops.wrap")
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # torch 2.11 turns it off
    with caplog.at_level(logging.WARNING, log.name):
        for message in ("Detected that context_fn is passed to torch.utils.checkpoint", "something else"):
            log.warning(message)
    assert set(caplog.messages) == {"something else"}
