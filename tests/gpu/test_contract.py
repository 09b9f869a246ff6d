"""The contract on compiled layers, in float32 as it is and in bf16 by what bf16 costs the dense model.

- In float32 the contract's own functions run, with their own tolerance, on a model that lies on the device and whose
  layers are compiled; the oracle they compare with is eager.
- In bf16 the dense model says how far bf16 may be from float32: the routed one may be at most 1.5 times as far from the
  float32 oracle, in the relative Frobenius norm of the output and of all gradients together.
"""

from contextlib import nullcontext
from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import tread
from tests.attach import test_contract as contract
from tests.tiny.placed import MEDIUM, TINY, Placed, attach_or_route

Bf16 = Literal["weights", "autocast"]
FACTOR = 1.5
STOCK, OWN = TINY[-2:]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def own_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("tread.attach.attach"), "attach", attach_or_route(tread.attach))


def inner(case: Any) -> None:
    """A window that leaves the first and the last layer dense."""
    contract.test_output_and_gradients_equal_the_oracle(case, 1)


def one_length(case: Any) -> None:
    """What needs one length beside the dense one, in a test of its own because compiling takes the time."""
    for which in (0, 1, 3):
        contract.test_output_and_gradients_equal_the_oracle(case, which)
    contract.test_all_forced_and_ratio_zero_equal_dense(case)
    contract.test_checkpointing_and_two_forwards_change_nothing(case)


def other_lengths(case: Any) -> None:
    """Two windows of other ratios, and batches of one."""
    contract.test_output_and_gradients_equal_the_oracle(case, 2)
    contract.test_a_batch_equals_its_samples(case)


CHECKS = (one_length, other_lengths)


def in_float32(case: Any, check: Any, device: str, backend: str) -> None:
    placed = Placed(case, device, backend=backend)
    check(placed)
    assert placed.compiler is not None
    assert placed.compiler.frame_count > 0, "nothing was compiled"


@pytest.mark.parametrize("check", [one_length, pytest.param(other_lengths, marks=pytest.mark.contract)])
def test_our_own_dit(check: Any) -> None:
    in_float32(OWN, check, "cpu", "aot_eager")


def test_a_stock_model() -> None:
    in_float32(STOCK, inner, "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_tiny_models_on_the_gpu(case: Any, check: Any) -> None:
    in_float32(case, check, "cuda", "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("case", MEDIUM, ids=lambda case: case.name)
def test_medium_models_on_the_gpu(case: Any) -> None:
    in_float32(case, inner, "cuda", "inductor")


def errors(rough: tuple[Tensor, Any], exact: tuple[Tensor, Any]) -> dict[str, float]:
    """How far an output and its gradients are from better ones, relative to those."""
    names = [name for name, value in exact[1].items() if value is not None]
    return {
        "output": _error([rough[0]], [exact[0]]),
        "gradients": _error([rough[1][name] for name in names], [exact[1][name] for name in names]),
    }


def _error(rough: list[Tensor], exact: list[Tensor]) -> float:
    far = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(rough, exact, strict=True))
    return (far / sum(float(b.double().square().sum()) for b in exact)) ** 0.5


def in_bf16(case: Any, how: Bf16, device: str, backend: str) -> dict[str, float]:
    """The errors of the routed model over those of the dense one, all checked."""
    exact = Placed(case, device)
    rough = Placed(case, device, backend=backend, dtype=torch.bfloat16 if how == "weights" else torch.float32)

    def run(one: Placed, autocast: bool = False) -> tuple[Tensor, Any]:
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            output = one.call(one.model(), one.inputs(one.batch))
        return output.detach(), contract.gradients(output, one.model())

    dense = errors(run(rough, how == "autocast"), run(exact))
    with tread.attach(rough.model(), {"routes": contract.windows_of(case.depth)[1]}) as handle:
        routed = run(rough, how == "autocast")
        (route,), (selection,) = handle.plan.routes, handle.selections
    kept = contract.kept_mask(selection, case.tokens)
    windows = [(route.start_layer_idx, route.end_layer_idx, kept)]
    with contract.oracle(exact, exact.model(), windows):  # pyright: ignore[reportArgumentType]
        found = errors(routed, run(exact))
    assert rough.compiler is not None
    assert rough.compiler.frame_count > 0, "nothing was compiled"
    assert min(dense.values()) > 1e-4, "this was not bf16"
    ratios = {name: found[name] / dense[name] for name in found}
    assert max(ratios.values()) <= FACTOR, f"routed {found}, dense {dense}"
    return ratios


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bf16(how: Bf16) -> None:
    in_bf16(OWN, how, "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "how"),
    [*((case, "weights") for case in MEDIUM), (MEDIUM[-1], "autocast"), (MEDIUM[0], "autocast")],
    ids=lambda value: getattr(value, "name", value),
)
def test_bf16_on_the_gpu(case: Any, how: Bf16) -> None:
    in_bf16(case, how, "cuda", "inductor")
