"""Layers in host memory on a GPU: page-locked, copied in a stream of their own, and the same gradients.

Kernels that sleep put the copies and the computation out of step, so that a missing wait would show.
"""

from typing import Any

import pytest
import torch

import tread
from tests.attach.attached import FLUX, ROUTES
from tests.attach.steps import adapted, inputs_of, step
from tread.attach.registry import layers_of
from tread.kernels.offload.ring import Ring, Slot

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CYCLES = 2_000_000
STEPS = 4


def gradients(device: str, layers: int | None, **compile_options: Any) -> list[Any]:
    model, inputs = adapted(FLUX, device), inputs_of(FLUX, device)
    with tread.attach(model, ROUTES) as handle:
        if layers is not None:
            handle.offload(layers)
            assert handle.offloaded is not None
            assert all(call.host is not None and call.host.pinned for call in handle.offloaded.calls)
        if compile_options:
            handle.compile(**compile_options)
        return [step(FLUX, model, handle, inputs, number) for number in range(STEPS)]


def assert_close(found: list[Any], expected: list[Any], tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=tolerance)
        assert one[1].keys() == other[1].keys()
        for name in one[1]:
            scale = float(other[1][name].abs().max())
            torch.testing.assert_close(one[1][name], other[1][name], rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("late", ["copy", "layer", "neither"])
def test_the_gradients_are_those_of_the_model_on_the_gpu(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients("cuda", None)
    copy, release = Ring.copy, Slot.release

    def slow_copy(self: Ring, slot: Slot, host: Any) -> None:
        torch.cuda._sleep(CYCLES)
        copy(self, slot, host)

    def slow_release(self: Slot) -> None:  # the layer's last kernels are still to run when the host goes on
        torch.cuda._sleep(CYCLES)
        release(self)

    if late == "copy":
        monkeypatch.setattr(Ring, "copy", slow_copy)
    if late == "layer":
        monkeypatch.setattr(Slot, "release", slow_release)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_close(gradients("cuda", len(layers_of(FLUX.model()))), expected, 1e-5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_layers() -> None:
    found = gradients("cuda", len(layers_of(FLUX.model())), attention="math")
    assert_close(found, gradients("cuda", None), 2e-3)


def test_offloaded_weights_take_no_memory_of_the_gpu() -> None:
    model: Any = adapted(FLUX, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with tread.attach(model, ROUTES).offload(len(layers_of(model))) as handle:
        assert handle.offloaded is not None
        away = sum(call.host.size for call in handle.offloaded.calls if call.host is not None)
        slots = sum(slot.block.nbytes for slot in handle.offloaded.ring.slots)
        assert torch.cuda.memory_allocated() <= before - away + slots + 2**20
    assert next(model.parameters()).is_cuda
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_auto_brings_layers_back_that_fit() -> None:
    """The tiny model fits many times, so `auto` leaves it; offloaded all the same, it all comes back after a step."""
    model, inputs = adapted(FLUX, "cuda"), inputs_of(FLUX, "cuda")
    expected = gradients("cuda", None)
    told: list[str] = []
    with tread.attach(model, ROUTES).offload("auto", say=told.append) as handle:
        assert "0 of 5 layers" in told[0]
        handle.offload(len(layers_of(model)), say=told.append)
        assert handle.offloaded is not None
        handle.offloaded._settled = False
        found = [step(FLUX, model, handle, inputs, number) for number in range(STEPS)]
        assert "0 of 5 layers offloaded" in told[-1]
        assert all(parameter.is_cuda for parameter in model.parameters())
    assert_close(found, expected, 1e-5)


def test_graphs_are_left_out() -> None:
    model, told = adapted(FLUX, "cuda"), list[str]()
    with tread.attach(model, ROUTES).offload(2) as handle:
        handle.compile(graphs=True, say=told.append, attention="math")
        assert handle.fast is not None
        assert handle.fast.graphs is None
        assert any("cannot replay the copies of offloaded layers" in line for line in told)
