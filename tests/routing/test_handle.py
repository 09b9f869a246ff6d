"""When a handle routes, what it selects, and that nothing but (seed, step, position) decides it."""

import copy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from tests.routing.identity import PLAN, TWO, X, run
from tread import ConfigError, Handle, RiskWarning, RoutePlan
from tread.routing.state import State


def test_routes_only_in_training_with_gradients():
    handle = Handle(PLAN, depth=12)
    assert handle.begin(training=True).enter(2, X).shape[1] == 32
    assert handle.begin(training=False).enter(2, X).shape[1] == 64
    with torch.no_grad():
        assert handle.begin(training=True).enter(2, X).shape[1] == 64
        with handle.routed():
            assert handle.begin(training=False).enter(2, X).shape[1] == 32
        with handle.routed(selection_ratio=0.75):
            assert handle.begin(training=False).enter(2, X).shape[1] == 16
    with handle.dense():
        assert handle.begin(training=True).enter(2, X).shape[1] == 64
    assert handle.begin(training=True).enter(2, X).shape[1] == 32


def test_windows_are_inclusive_and_touching_routes_draw_anew():
    handle, x, lengths = Handle(TWO, depth=8), X, []
    state = handle.begin(training=True)
    for layer in range(8):
        x = state.enter(layer, x)
        lengths.append(x.shape[1])
        x = state.exit(layer, x)
    assert lengths == [64, 64, 32, 32, 32, 48, 48, 64]
    assert x.equal(X), "identity layers give the stream back"
    assert len(handle.selections) == 2


def test_selections_depend_on_step_micro_step_route_sample_and_seed():
    handle = Handle(TWO, depth=8)
    handle.set_step(0)
    first = run(handle, depth=8)
    second = run(handle, depth=8)
    handle.set_step(1)
    next_step = run(handle, depth=8)
    other_seed = run(Handle(TWO, depth=8, seed=43), depth=8)
    for other in (second, next_step, other_seed):
        assert not first[0].equal(other[0])
    assert len({tuple(row.tolist()) for row in first[0]}) == 4, "each sample has its own"
    assert set(first[1][0].tolist()) != set(first[0][0].tolist())
    handle.set_step(0)
    assert all(a.equal(b) for a, b in zip(first, run(handle, depth=8), strict=True)), "and on nothing else"


def test_routes_of_the_same_ratio_select_differently():
    routes = [{"selection_ratio": 0.5, "start_layer_idx": i, "end_layer_idx": i} for i in (2, 3)]
    first, second = run(Handle(RoutePlan.from_config({"routes": routes}), depth=8), depth=8)
    assert not first.equal(second)


def test_the_step_may_be_numpys():
    handle = Handle(PLAN, depth=12)
    handle.set_step(np.int64(7))  # pyright: ignore[reportArgumentType]
    assert handle.state_dict() == {"step": 7, "micro_step": 0}
    assert repr(handle) == "<Handle: route 2..8 at 0.5 of 12 layers, step 7>"
    with pytest.raises(ConfigError, match=r"step is tensor\(3\); it must be a whole number\. Convert a tensor"):
        handle.set_step(torch.tensor(3))  # pyright: ignore[reportArgumentType]


def test_a_loop_without_set_step_advances_and_resumes():
    """Regression: generator state was not saved, so a resumed run replayed its masks."""
    handle = Handle(PLAN, depth=12)
    course = [run(handle)[0] for _ in range(4)]
    assert len({tuple(s.flatten().tolist()) for s in course}) == 4
    handle = Handle(PLAN, depth=12)
    for _ in range(2):
        run(handle)
    resumed = Handle(PLAN, depth=12)
    resumed.load_state_dict(handle.state_dict())
    with pytest.raises(ConfigError, match=r"^the state has steps; it must be what state_dict\(\) returned\.$"):
        resumed.load_state_dict({"steps": 3})
    with pytest.raises(ConfigError, match=r"^micro_step of the state is 'two'; it must be a whole number\.$"):
        resumed.load_state_dict({"step": 3, "micro_step": "two"})  # pyright: ignore[reportArgumentType]
    assert run(resumed)[0].equal(course[2])
    assert run(resumed)[0].equal(course[3])


def test_state_is_per_forward():
    handle = Handle(PLAN, depth=12)
    a, b = handle.begin(training=True), handle.begin(training=True)
    xa, xb = a.enter(2, X), b.enter(2, X + 1)
    assert a.exit(8, xa).equal(X)
    assert b.exit(8, xb).equal(X + 1)


def test_no_global_rng_no_change_to_the_stream():
    before = torch.get_rng_state()
    run(Handle(PLAN, depth=12))
    assert torch.get_rng_state().equal(before)


def test_l1_importance_looks_at_the_stream_at_window_entry():
    plan = RoutePlan.from_config({"preset": "paper", "selector": "l1", "importance": 1.0})
    x = torch.rand(2, 64, 8)
    x[:, ::2] += 10
    assert run(Handle(plan, depth=12), x)[0].equal(torch.arange(0, 64, 2).expand(2, -1))


def test_schedule_scales_the_ratio_and_needs_the_step():
    schedule = {"warmup_steps": 4, "levels": 2, "cooldown_fraction": 0.5, "total_steps": 10}
    handle = Handle(RoutePlan.from_config({"preset": "paper", "schedule": schedule}), depth=12)
    with pytest.raises(ConfigError, match=r"handle\.set_step"):
        handle.begin(training=True)
    lengths = []
    for step in range(10):
        handle.set_step(step)
        lengths.append(handle.begin(training=True).enter(2, X).shape[1])
    assert lengths == [64, 64, 48, 48, 32, 64, 64, 64, 64, 64]


def test_risky_settings_warn_once_with_the_reason():
    with pytest.warns(RiskWarning) as caught:
        handle = Handle(RoutePlan.from_config({"preset": "max-speed"}), depth=12)
        for _ in range(2):
            run(handle)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 3
    assert "the last of 12 layers" in texts[0]
    assert "a dropped token passes 1 of 12 layers" in texts[1]
    assert "keeps 20 of 64 tokens" in texts[2]
    with pytest.warns(RiskWarning, match="forces 60 of 64") as caught:
        mask = torch.zeros(4, 64, dtype=torch.bool)
        mask[0, :60] = True
        with Handle(PLAN, depth=12).force_keep(mask):
            pass
    assert caught[0].filename == __file__, "the user's line, not contextlib's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Handle(PLAN, depth=12))


def test_deepcopy_and_reset_after_an_error():
    handle = Handle(PLAN, depth=12)
    with pytest.raises(RuntimeError), handle.dense():
        raise RuntimeError
    assert len(copy.deepcopy(handle).begin(training=True).enter(2, X)[0]) == 32


def test_sides_follow_the_selection():
    handle = Handle(PLAN, depth=12)
    table, per_sample = torch.randn(64, 3), torch.randn(4, 64, 3)
    state = handle.begin(training=True)
    assert state.side("rope", table) is table
    state.enter(2, X)
    ids = handle.selections[0]
    rows = state.side("rope", table)
    assert rows is not None
    assert rows.equal(torch.stack([table[row] for row in ids]))
    assert state.side("rope", table) is rows, "gathered once per window"
    assert torch.equal(
        state.side("mod", per_sample, dim=1),  # pyright: ignore[reportArgumentType]
        torch.stack([sample[row] for sample, row in zip(per_sample, ids, strict=True)]),
    )
    assert state.side("none", None) is None
    with pytest.raises(ConfigError, match=r"'mod2' of shape \(4, 64, 3\) has fewer than 64 tokens on axis 0; name its"):
        state.side("mod2", per_sample)


def test_a_state_without_routes_is_transparent():
    state = State()
    assert state.enter(0, X) is X
    assert state.exit(0, X) is X


def test_step_changes_do_not_recompile():
    handle = Handle(PLAN, depth=12)
    frames = CompileCounter()

    @torch.compile(backend=frames, fullgraph=True)
    def forward(x):
        state = handle.begin(training=True)
        for layer in range(12):
            x = state.exit(layer, state.enter(layer, x) * 2)
        return x

    eager = Handle(PLAN, depth=12)
    for step in range(3):
        for h in (handle, eager):
            h.set_step(step)
        out = forward(X)
        assert handle.selections[0].equal(run(eager)[0])
        assert out.shape == X.shape
    assert frames.frame_count == 1


WORKER = """
import sys, torch, torch.distributed as dist
from tread import Handle, RoutePlan
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
handle = Handle(RoutePlan.from_config({"preset": "paper", "seed": 1}), depth=12)
handle.set_step(5)
x = torch.zeros(2, 64, 8)
handle.begin(training=True).enter(2, x)
both = [None, None]
dist.all_gather_object(both, handle.selections[0].tolist())
if dist.get_rank() == 0:
    print(both[0] + both[1])
dist.destroy_process_group()
"""


def test_two_processes_select_what_one_would(tmp_path):
    """Regression: every rank drew the same masks."""
    command = [sys.executable, "-c", WORKER, str(tmp_path / "store")]
    workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    printed = workers[0].communicate()[0]
    assert workers[1].wait() == 0
    handle = Handle(PLAN, depth=12)
    handle.set_step(5)
    assert printed.strip() == str(run(handle)[0].tolist())


def test_kept_is_what_no_route_dropped() -> None:
    """Against sets; None before a routed forward and after a dense one."""
    plan = RoutePlan.from_config(
        {
            "routes": [
                {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 0},
                {"selection_ratio": 0.25, "start_layer_idx": 2, "end_layer_idx": 2},
            ]
        }
    )
    handle = Handle(plan, depth=3)
    assert handle.kept is None
    state, x = handle.begin(training=True), torch.randn(2, 8, 4)
    for layer in range(3):
        x = state.exit(layer, state.enter(layer, x))
    assert handle.kept is not None
    for row, first, second in zip(handle.kept, *handle.selections, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(first.tolist()) & set(second.tolist())
    with handle.dense():
        handle.begin(training=True)
    assert handle.kept is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", ["enter", "side", "exit"])
def test_a_state_used_again_in_backward_is_refused(what: str, reentrant: bool):
    """A model's own code holds the state of its forward, which is at its end by then."""
    state, table = Handle(PLAN, depth=12).begin(training=True), torch.randn(64, 8)

    def again(x: torch.Tensor) -> torch.Tensor:
        if what == "enter":
            x = state.enter(2, x)
        elif what == "side":
            x = x * state.side("rope", table)  # pyright: ignore[reportOperatorIssue]
        else:
            x = state.exit(8, x)
        return x.square()

    x = X.clone().requires_grad_()
    x = checkpoint(again, x if what == "enter" else state.enter(2, x), use_reentrant=reentrant)
    (x if what == "exit" else state.exit(8, x)).sum()
    with pytest.raises(ConfigError, match=rf"state\.{what} runs again in backward.*Checkpoint the block alone"):
        x.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_dense_state_may_be_used_again_in_backward(reentrant: bool):
    handle = Handle(PLAN, depth=12)
    with handle.dense():
        state = handle.begin(training=True)
    x = X.clone().requires_grad_()
    out = checkpoint(lambda x: state.exit(2, state.enter(2, x)).square(), x, use_reentrant=reentrant)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(2 * X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_is_recomputed_inside_checkpointed_functions_alone(reentrant: bool):
    """Compiled layers ask it; a log that stayed would also take the calls after its function."""
    handle = Handle(PLAN, depth=12)
    handle.state = state = handle.begin(training=True)
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(handle.state.recomputed)
        return x.square()

    assert not state.recomputed
    x = checkpoint(function, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert seen == [True]
    assert not state.recomputed
    assert handle.repeatable
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert seen[2:] == [not reentrant] * 2, "a reentrant recomputation is not compared with the first pass"
    assert not state.recomputed
    assert handle.repeatable
