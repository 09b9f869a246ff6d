"""What the contexts of a handle set: forced tokens, given selections, another ratio, step and places in the batch."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.routing.identity import PLAN, TWO, X, run
from tread import ConfigError, Handle, RiskWarning
from tread.routing.mode import Forced


def test_forced_tokens_stay_and_the_mask_is_checked():
    handle = Handle(PLAN, depth=12)
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[0, :20] = True
    mask[3, 50:] = True
    with handle.force_keep(mask):
        kept = torch.zeros(4, 64, dtype=torch.bool).scatter(1, run(handle)[0], True)
    assert kept[mask].all()
    assert kept.sum(1).tolist() == [44] * 4, "64 - int((64 - 20) * 0.5) = 42, rounded up to a multiple of 4"
    assert len(run(handle)[0][0]) == 32
    with pytest.raises(ConfigError, match=r"force_keep has shape \(4, 64\).*2 samples"), handle.force_keep(mask):
        run(handle, X[:2])
    with pytest.raises(ConfigError, match="bool"), handle.force_keep(mask.float()):
        pass


def test_all_forced_runs_the_machinery_with_every_token():
    handle = Handle(PLAN, depth=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RiskWarning)
        with handle.force_keep(torch.ones(4, 64, dtype=torch.bool)):
            assert run(handle)[0].equal(torch.arange(64).expand(4, -1))


def test_given_selections_are_used_as_they_are():
    handle, ids = Handle(PLAN, depth=12), torch.tensor([[0, 5, 63]] * 4)
    with handle.routed(selections=[ids]):
        assert run(handle)[0].equal(ids)
    with pytest.raises(ConfigError, match="2 selections for 1 routes"), handle.routed(selections=[ids, ids]):
        pass


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [[1, 5, 64]],
            "selections[0] is for 4 samples, with indices up to 64; this forward has 4 samples of 64 tokens.",
        ),
        ([[-1, 5, 9]], "selections[0] has the index -1; tokens count from 0."),
        ([[5, 1, 9]], "selections[0] is not ascending; sort each sample's indices, each of them once."),
        ([[1, 1, 9]], "selections[0] is not ascending; sort each sample's indices, each of them once."),
        ([[1.0]], "selections[0] is torch.float32 of shape (4, 1); it must be int64 (B, K), K at least 1."),
        ([[]], "selections[0] is torch.float32 of shape (4, 0); it must be int64 (B, K), K at least 1."),
    ],
)
def test_selections_that_are_no_tokens_are_refused(ids: list[list[float]], message: str):
    handle = Handle(PLAN, depth=12)
    with pytest.raises(ConfigError) as error, handle.routed(selections=[torch.tensor(ids * 4)]):
        run(handle)
    assert str(error.value) == message


def test_selections_of_another_batch_are_refused():
    handle = Handle(PLAN, depth=12)
    with (
        pytest.raises(ConfigError, match=r"selections\[0\] is for 2 samples, .* has 4 samples"),
        handle.routed(selections=[torch.tensor([[1, 5, 9]] * 2)]),
    ):
        run(handle)
    with pytest.raises(ConfigError, match=r"selections\[0\] is a list"), handle.routed(selections=[[[1]]]):  # pyright: ignore[reportArgumentType]
        pass


def test_other_selections_do_not_recompile():
    handle, frames = Handle(PLAN, depth=12), CompileCounter()

    @torch.compile(backend=frames, fullgraph=True)
    def forward(x):
        state = handle.begin(training=True)
        return state.enter(2, x)

    for last in (9, 20, 63):
        with handle.routed(selections=[torch.tensor([[1, 5, last]] * 4)]):
            assert forward(X).equal(X[:, [1, 5, last]])
    assert frames.frame_count == 1


def test_a_given_step_and_given_samples_replace_the_handles_own():
    handle = Handle(PLAN, depth=12)
    handle.set_step(5)
    (training,) = run(handle)
    handle.set_step(0)
    with handle.routed(step=5):
        (first,), (again,) = run(handle), run(handle)
    assert first.equal(training)
    assert again.equal(training), "no micro-step is counted"
    assert handle.state_dict() == {"step": 0, "micro_step": 0}
    with handle.routed(step=5, samples=torch.tensor([2, 0, 0, 9])):
        (other,) = run(handle)
    assert other[:3].equal(training[[2, 0, 0]])
    assert not other[3].equal(training[3])
    with handle.routed(step=5, samples=torch.tensor([2])):
        (same,) = run(handle)
    assert same.equal(training[2].expand_as(same)), "one place for the whole batch"
    with (
        handle.routed(samples=torch.arange(3)),
        pytest.raises(ConfigError, match=r"samples has shape \(3,\); this for"),
    ):
        run(handle)


def test_a_step_may_be_a_tensor_one_for_all_or_one_for_each():
    handle = Handle(PLAN, depth=12)
    found = []
    for step in (5, torch.tensor(5), torch.tensor([5]), torch.tensor([5] * 4)):
        with handle.routed(step=step):
            found.append(run(handle)[0])
    assert all(ids.equal(found[0]) for ids in found)
    with (
        pytest.raises(ConfigError, match=r"float32 of shape \(\); it must be whole"),
        handle.routed(step=torch.tensor(5.0)),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="step has 3 values; this forward has 4 samples"),
        handle.routed(step=torch.arange(3)),
    ):
        run(handle)


def test_samples_and_masks_on_the_host_do_not_make_it_wait():
    """The meta device stands for a GPU, to which a copy waits unless it is told not to."""
    copies: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten._to_copy and args[0].device.type == "cpu":
                copies.append(kwargs.get("non_blocking", False))
            return func(*args, **(kwargs or {}))

    handle, x = Handle(PLAN, depth=12), X.to("meta")
    with handle.routed(step=5, samples=torch.zeros(1, dtype=torch.int64)), Copies():
        run(handle, x)
    with handle.force_keep(torch.zeros(4, 64, dtype=torch.bool)), Copies():
        run(handle, x)
    assert copies == [True, True]


def test_a_step_of_its_own_does_not_look_where_the_handle_keeps_its():
    """Networks of shapes, which count FLOPs, run with the handle of one on a GPU."""
    here, elsewhere = Handle(TWO, depth=8), Handle(TWO, depth=8)
    elsewhere.to(torch.device("meta"))
    with here.routed(step=5), elsewhere.routed(step=5):
        for one, other in zip(run(here), run(elsewhere), strict=True):
            assert one.equal(other)


def test_permuted_tokens_are_all_kept_in_an_order_for_each_sample():
    handle = Handle(PLAN, depth=12)
    with handle.permuted():
        handle.begin(training=False, forced=Forced(pinned=8)).enter(2, X)
    (order,) = handle.selections
    assert order.sort(dim=1).values.equal(torch.arange(64).expand(4, -1))
    assert order[:, :8].equal(torch.arange(8).expand(4, -1)), "layers address them by index"
    assert len({tuple(row) for row in order.tolist()}) == 4
    assert (order[:, 8:].diff(dim=1) < 0).any(dim=1).all()


def test_the_share_of_kept_tokens_weighs_each_route_by_its_layers():
    handle = Handle(TWO, depth=8)
    assert handle.kept_share == 1
    run(handle, depth=8)
    assert handle.kept_share == (3 * 32 + 2 * 48) / (5 * 64)
    with handle.dense():
        run(handle, depth=8)
    assert handle.kept_share == 1


def test_a_forward_is_repeatable_where_its_signature_says_everything():
    handle, mask = Handle(PLAN, depth=12), torch.zeros(4, 64, dtype=torch.bool)
    for context in (nullcontext(), handle.dense(), handle.routed(), handle.routed(0.75)):
        with context:
            assert handle.repeatable
    given: list[dict[str, Any]] = [{"step": 3}, {"samples": torch.arange(4)}, {"selections": [torch.tensor([[0]] * 4)]}]
    for context in (handle.force_keep(mask), *(handle.routed(**one) for one in given)):
        with context:
            assert not handle.repeatable


def test_the_record_of_an_earlier_forward_comes_back():
    handle = Handle(PLAN, depth=12)
    run(handle)
    seen, kept, share = handle.seen, handle.kept, handle.kept_share
    assert kept is not None
    handle.begin(training=True).enter(2, X[:2, :40])
    handle.recall(seen)
    assert handle.kept is not None
    assert handle.kept.equal(kept)
    assert handle.kept_share == share == 0.5


def test_ratios_say_what_a_forward_would_drop():
    handle = Handle(TWO, depth=8)
    assert handle.ratios(training=True) == (0.5, 0.25)
    assert handle.ratios(training=False) == (0.0, 0.0)
    with handle.routed(0.75):
        assert handle.ratios(training=False) == (0.75, 0.75)
    with handle.dense():
        assert handle.ratios(training=True) == (0.0, 0.0)


def test_kinds_are_what_the_host_decides():
    handle = Handle(TWO, depth=8)
    kinds = [handle.signature(training=True), handle.signature(training=False)]
    for context in (handle.routed(0.75), handle.routed(0.0)):
        with context:
            kinds.append(handle.signature(training=True))
    assert len(set(kinds)) == 4
    with handle.dense():
        assert handle.signature(training=True) == handle.signature(training=False)
