"""The low-level class: its fields describe one selection, and every call draws anew."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from tread import ConfigError, TREADRouter

X = torch.randn(4, 64, 8)


def test_fields_describe_one_selection():
    info = TREADRouter(seed=3).get_mask(X, mask_ratio=0.25)
    assert info.ids_keep.shape == (4, 48)
    assert info.ids_mask.shape == (4, 16)
    for b in range(4):
        assert info.mask[b].nonzero().flatten().tolist() == info.ids_mask[b].tolist()
        assert info.ids_shuffle[b].tolist() == info.ids_keep[b].tolist() + info.ids_mask[b].tolist()
        assert info.ids_shuffle[b][info.ids_restore[b]].tolist() == list(range(64))


def test_start_and_end_route():
    router = TREADRouter()
    info = router.get_mask(X, mask_ratio=0.5)
    out = router.end_route(router.start_route(X, info) * 0, info, original_x=X)
    assert out[info.mask].equal(X[info.mask])
    assert (out[~info.mask] == 0).all()


def test_without_an_original_dropped_tokens_become_the_mask_token():
    router = TREADRouter()
    info = router.get_mask(X, mask_ratio=0.5)
    kept = router.start_route(X, info)
    out = router.end_route(kept, info)
    assert out.shape == X.shape
    assert out[~info.mask].equal(X[~info.mask])
    assert (out[info.mask] == 0).all()
    assert (router.end_route(kept, info, mask_token=2.0)[info.mask] == 2).all()
    learned = torch.nn.Parameter(torch.arange(8.0))
    router.mask_token = learned
    out = router.end_route(kept, info)
    assert (out[info.mask] == learned).all()
    out.sum().backward()
    assert learned.grad is not None
    assert learned.grad.equal(torch.full((8,), float(info.mask.sum()))), "once for every dropped token"


def test_the_processed_tokens_by_keyword():
    router = TREADRouter()
    info = router.get_mask(X, mask_ratio=0.5)
    kept = router.start_route(X, info) * 2
    expected = router.end_route(kept, info, X)
    assert router.end_route(routed_x=kept, info=info, original_x=X).equal(expected)
    assert router.end_route(x=kept, info=info, original_x=X).equal(expected)
    wrong: list[dict[str, Any]] = [{"info": info}, {"x": kept, "routed_x": kept, "info": info}, {"routed_x": kept}]
    for given in wrong:
        with pytest.raises(
            ConfigError, match="end_route needs the processed tokens once, as x or as routed_x, and the"
        ):
            router.end_route(**given)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.array, torch.tensor], ids=lambda number: number.__name__)
def test_numbers_of_numpy_and_torch(number: Any):
    expected = TREADRouter().get_mask(X, 0.25, l1_reg=0.5).ids_keep
    assert TREADRouter().get_mask(X, number(0.25), l1_reg=number(0.5)).ids_keep.equal(expected)
    with pytest.raises(ConfigError, match=r"^mask_ratio is 1\.5; allowed is 0 <= value < 1\.$"):
        TREADRouter().get_mask(X, number(1.5))


def test_what_is_no_number_is_refused():
    for ratio in (torch.tensor([0.5, 0.5]), np.bool_(True), "0.5", None):
        with pytest.raises(ConfigError, match="it must be a number with 0 <= value < 1"):
            TREADRouter().get_mask(X, ratio)  # pyright: ignore[reportArgumentType]


def test_every_call_draws_anew_and_the_seed_decides():
    a, b = TREADRouter(seed=3), TREADRouter(seed=3)
    first = a.get_mask(X, 0.5).ids_keep
    assert first.equal(b.get_mask(X, 0.5).ids_keep)
    assert not first.equal(a.get_mask(X, 0.5).ids_keep)
    assert not first.equal(TREADRouter(seed=4).get_mask(X, 0.5).ids_keep)


def test_importance_inverse_and_force_keep():
    x = torch.arange(1, 65.0).view(1, 64, 1)
    router = TREADRouter()
    assert router.get_mask(x, 0.5, l1_reg=1.0).ids_keep.tolist() == [list(range(32, 64))]
    assert router.get_mask(x, 0.5, l1_reg=1.0, inverse=True).ids_keep.tolist() == [list(range(32))]
    force = torch.zeros(1, 64, dtype=torch.bool)
    force[0, :8] = True
    kept = router.get_mask(x, 0.5, l1_reg=1.0, force_keep=force).ids_keep[0].tolist()
    assert kept == list(range(8)) + list(range(36, 64)), "36 of 64: the mask's 8 and the 28 most important"


def test_a_mask_is_made_on_the_device_that_was_asked_for():
    """The meta device stands for a GPU: no operation may mix it with another."""
    x, force = X.to("meta"), torch.zeros(4, 64, dtype=torch.bool)
    info = TREADRouter(device="meta").get_mask(X, 0.5, l1_reg=0.5)
    assert {field.device.type for field in vars(info).values()} == {"meta"}
    router = TREADRouter(device="cpu")
    info = router.get_mask(x, 0.5, force_keep=force)
    assert {field.device.type for field in vars(info).values()} == {"cpu"}
    kept = router.start_route(x, info)
    assert kept.device.type == router.end_route(kept, info, x).device.type == "meta"


def test_ratios_outside_the_range_are_refused():
    for ratio in (1.0, -0.1):
        with pytest.raises(ConfigError, match="mask_ratio"):
            TREADRouter().get_mask(X, ratio)
    with pytest.raises(ConfigError, match=r"^seed is -1; .*at least 0"):
        TREADRouter(seed=-1)


def test_a_force_mask_that_does_not_fit_is_refused():
    for mask, message in (
        (torch.zeros(2, 3, dtype=torch.bool), r"^force_keep has shape \(2, 3\); x has \d+ samples of \d+ tokens\.$"),
        (torch.zeros(X.shape[:2]), r"^force_keep is torch\.float32 of shape .*; it must be bool \(B, S\)\.$"),
        ([True], r"^force_keep is a list; it must be a tensor, bool \(B, S\)\.$"),
    ):
        with pytest.raises(ConfigError, match=message):
            TREADRouter().get_mask(X, 0.5, force_keep=mask)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_mask_drawn_again_in_backward_is_refused(reentrant: bool):
    """The recomputation would drop other tokens than the forward: wrong gradients, without an error of torch's."""
    router = TREADRouter()

    def route(x: torch.Tensor) -> torch.Tensor:
        info = router.get_mask(x, 0.5)
        return router.end_route(router.start_route(x, info).square(), info, original_x=x)

    out = checkpoint(route, X.clone().requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(ConfigError, match=r"get_mask runs again in backward.*outside the checkpointed function"):
        out.sum().backward()


def test_compiled_calls_draw_anew_without_recompiling():
    counter = CompileCounter()
    router, stock = TREADRouter(), TREADRouter()
    compiled = torch.compile(lambda x: router.get_mask(x, 0.5).ids_keep, backend=counter)
    for _ in range(4):
        assert compiled(X).equal(stock.get_mask(X, 0.5).ids_keep)
    assert counter.frame_count == 1
