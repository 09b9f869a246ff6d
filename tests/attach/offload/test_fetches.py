"""Which layers are fetched and when: twice a step, ahead of use, and as few as `auto` finds room for."""

from typing import Any
from weakref import ref

import pytest
import torch

from tests.attach.attached import FLUX, ROUTES, Attach
from tests.attach.offload.offloaded import DEPTH, STEPS, assert_equal, count_runs, train
from tests.attach.steps import adapted, inputs_of, step
from tread.attach.registry import layers_of
from tread.kernels.offload import offload as offloading
from tread.kernels.offload.call import is_offloaded
from tread.kernels.offload.ring import SLOTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_fetches_each_layer_twice_less_what_the_slots_hold(checkpointed: bool, attach: Attach) -> None:
    """Backward begins with the last layers of forward, and the next forward with the first ones."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES).offload(DEPTH)
    assert handle.offloaded is not None
    ring, counts, runs = handle.offloaded.ring, [], count_runs(model)
    for number in range(4):
        before = ring.fetches
        step(FLUX, model, handle, inputs, number)
        counts.append(ring.fetches - before)
    assert counts[1:] == [2 * (DEPTH - SLOTS)] * 3
    assert len(runs) == 4 * 2 * DEPTH, "once in forward and once in backward, checkpointed or not"
    with torch.no_grad():
        before = ring.fetches
        FLUX.call(model, inputs)
    assert ring.fetches - before <= DEPTH


def test_layers_are_fetched_ahead_from_the_second_step_on(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's turn comes its copy has been asked for already."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    handle = attach(model, ROUTES).offload(DEPTH)
    assert handle.offloaded is not None
    ring, late = handle.offloaded.ring, []
    visit = ring.visit

    def watched(how: Any, host: Any) -> Any:
        late.append(ring._held(host) is None)
        return visit(how, host)

    monkeypatch.setattr(ring, "visit", watched)
    step(FLUX, model, handle, inputs, 0)
    assert any(late)
    late.clear()
    step(FLUX, model, handle, inputs, 1)
    assert not any(late)


def test_auto_leaves_a_cpu_alone(attach: Attach) -> None:
    model = adapted(FLUX)
    told: list[str] = []
    attach(model, ROUTES).offload("auto", say=told.append)
    assert not any(is_offloaded(layer) for layer in layers_of(model))
    assert told == ["0 of 5 layers offloaded: 0.00 GiB in host memory, 0.00 GiB of slots on cpu."]


@pytest.mark.parametrize(("room", "stay"), [(0.0, 5), (2.5, 3), (9.0, 0)])
def test_auto_brings_back_what_the_first_step_left_room_for(
    room: float, stay: int, attach: Attach, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a GPU are given here: `room` is what its fullest moment left, in layers."""
    plain, model = adapted(FLUX), adapted(FLUX)
    expected = train(FLUX, plain, attach(plain, ROUTES))
    monkeypatch.setattr(offloading, "would_be_free", lambda model, device: 0)
    handle = attach(model, ROUTES).offload("auto")
    assert handle.offloaded is not None
    largest = max(call.host.size for call in handle.offloaded.calls if call.host is not None)
    monkeypatch.setattr(offloading, "peak_left", lambda device, margin: room * largest)
    blocks = {ref(call.host.block) for call in handle.offloaded.calls if call.host is not None}
    recomputed = count_runs(model)
    assert_equal(train(FLUX, model, handle), expected)
    offloaded = sum(is_offloaded(layer) for layer in layers_of(model))
    assert offloaded <= stay
    assert (offloaded > 0) == (stay > 0)
    assert sum(block() is not None for block in blocks) == offloaded
    # a layer that came back is computed again as before, or a step would take more memory than the first one showed
    assert len(recomputed) == 2 * STEPS * DEPTH
