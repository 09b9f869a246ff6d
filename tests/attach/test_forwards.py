"""One forward after another: the step, what is forced in each, layers that a forward skips, errors inside it."""

import json
import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import tread
from tests.attach.attached import BY_NAME, FLUX, KONTEXT, ROUTES, Attach, routed
from tests.attach.selected import route

pytestmark = pytest.mark.filterwarnings("ignore")


def test_state_dict_goes_on_where_it_stopped(attach: Attach):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    handle.set_step(5)
    FLUX.call(model, FLUX.inputs(2))
    state = handle.state_dict()
    assert state == {"step": 5, "micro_step": 1}
    FLUX.call(model, FLUX.inputs(2))
    went_on = handle.selections[0]
    again = attach(model, ROUTES)
    again.load_state_dict(json.loads(json.dumps(state)))
    FLUX.call(model, FLUX.inputs(2))
    assert again.selections[0].equal(went_on)


def test_a_loop_that_never_says_the_step_draws_anew_each_time(attach: Attach):
    model = FLUX.model()
    handle, drawn = attach(model, ROUTES), []
    for _ in range(3):
        FLUX.call(model, FLUX.inputs(2))
        drawn.append(handle.selections[0])
    assert not drawn[0].equal(drawn[1])
    assert not drawn[1].equal(drawn[2])


def test_the_documented_line_for_accumulated_gradients(attach: Attach):
    """docs/attach.md: each micro-batch of an optimizer step selects anew, and the next step starts over."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = FLUX.model()
    handle = attach(model, ROUTES)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    global_step, states, drawn = 0, [], []
    for _ in range(5):
        if accelerator.sync_gradients:
            handle.set_step(global_step)
        with accelerator.accumulate(model):
            states.append((handle.state_dict()["step"], handle.state_dict()["micro_step"]))
            accelerator.backward(FLUX.call(model, FLUX.inputs(2)).mean())
            drawn.append(handle.selections[0])
            optimizer.step()
        global_step += accelerator.sync_gradients
    assert states == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert not any(drawn[i].equal(drawn[j]) for i in range(5) for j in range(i))


def with_references(count: int) -> dict[str, Any]:
    """Kontext's 24 tokens, of which the last `count` belong to the reference image."""
    arguments = KONTEXT.inputs(2)
    ids = arguments["img_ids"].clone()
    ids[:, 0] = (torch.arange(24) >= 24 - count).float()
    return {**arguments, "img_ids": ids}


def test_reference_tokens_are_never_counted_wrong(attach: Attach):
    """Their number is read once per number of tokens; a forward that disagrees is an error, not a wrong selection."""
    model = KONTEXT.model()
    handle = attach(model, ROUTES)
    KONTEXT.call(model, with_references(8))
    assert handle.selections[0].shape[1] == 24 - 8
    with pytest.raises(RuntimeError, match=r"set handle\.references before each"):
        KONTEXT.call(model, with_references(12))
    before = handle.signature(training=True)
    handle.references = 12
    assert handle.signature(training=True) != before
    KONTEXT.call(model, with_references(12))
    assert handle.selections[0].shape[1] == 24 - 6
    handle.references = None
    with handle.dense():
        KONTEXT.call(model, with_references(12))
    with handle.force_keep(torch.zeros(2, 12, dtype=torch.bool)):
        KONTEXT.call(model, with_references(12))
        assert all(set(range(12, 24)) <= set(ids) for ids in handle.selections[0].tolist())
        with pytest.raises(RuntimeError, match="does not cover just the target's tokens"):
            KONTEXT.call(model, with_references(8))
    with (
        handle.force_keep(torch.zeros(2, 25, dtype=torch.bool)),
        pytest.raises(tread.ConfigError, match=r"^force_keep has shape \(2, 25\); this forward has 24 tokens\.$"),
    ):
        KONTEXT.call(model, with_references(12))


def test_a_force_mask_of_the_wrong_size_says_so(attach: Attach):
    model = BY_NAME["sd3"].model()
    handle = attach(model, {"routes": [route(0, -1)]})
    with (
        handle.force_keep(torch.ones(2, 5, dtype=torch.bool)),
        pytest.raises(tread.ConfigError, match="force_keep has"),
    ):
        BY_NAME["sd3"].call(model, BY_NAME["sd3"].inputs(2))


def test_captions_beyond_the_images_are_left_out_as_in_the_stock_model(attach: Attach):
    """Z-Image pairs images with captions until one list ends; an official script passes more captions than images."""
    case = BY_NAME["z-image"]
    model, arguments = case.model(), case.inputs(2)
    handle = attach(model, {"routes": [route(0, -1)]})
    expected = routed(case, model, handle)
    more = {**arguments, "cap_feats": [*arguments["cap_feats"], torch.randn(9, 10)]}
    handle.set_step(0)
    assert case.call(model, more).equal(expected)


class Skipping(nn.Module):
    """Four layers, of which a forward may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return x


SKIPPING = tread.Family(models=("Skipping",), stacks=(tread.Stack(name="blocks", stream="input"),))


def by_hand(model: Skipping, x: torch.Tensor, ids: torch.Tensor, inside: tuple[int, ...], after: tuple[int, ...]):
    short = torch.stack([sample[rows] for sample, rows in zip(x, ids, strict=True)])
    for index in inside:
        short = model.blocks[index](short)
    x = torch.stack([sample.index_copy(0, rows, kept) for sample, rows, kept in zip(x, ids, short, strict=True)])
    for index in after:
        x = model.blocks[index](x)
    return x


def test_a_skipped_layer_that_ends_a_window():
    """Skip-layers shifts no route. The window closes before the next layer, or with the forward: an error."""
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(2, 6, 4)
    with tread.attach(model, {"routes": [route(0, 2)]}, family=SKIPPING) as handle:
        output = model(x, skip=(2,))
        torch.testing.assert_close(output, by_hand(model, x, handle.selections[0], (0, 1), (3,)))
        output = model(x, skip=(0,))
        torch.testing.assert_close(output, by_hand(model, x, handle.selections[0], (1, 2), (3,)))
        with pytest.raises(tread.ConfigError, match="the forward ended inside a window"):
            model(x, skip=(2, 3))
        torch.testing.assert_close(model(x), by_hand(model, x, handle.selections[0], (0, 1, 2), (3,)))


def test_an_error_inside_a_forward_leaves_the_next_one_right(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)

    def fail(*_: Any) -> None:
        raise RuntimeError("inside the window")

    hook = model.single_transformer_blocks[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="inside the window"), warnings.catch_warnings():
        warnings.simplefilter("error")
        FLUX.call(model, FLUX.inputs(2))
    hook.remove()
    assert not handle.state.routed, "the tensors of the failed forward are not held"
    assert routed(FLUX, model, handle).equal(expected)
    with handle.dense():
        assert FLUX.call(model, FLUX.inputs(2)).equal(FLUX.call(FLUX.model(), FLUX.inputs(2)))
