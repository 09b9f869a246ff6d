"""Budget, scores and the indices they give, each against a slow and independent computation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tread.routing import noise
from tread.routing.budget import kept_count
from tread.routing.selection import l1_rank, mixed_score, select


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_budget_without_mask(tokens, ratio):
    kept = kept_count(tokens, ratio)
    assert kept == tokens - int(tokens * ratio)
    assert 1 <= kept <= tokens


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.data())
def test_budget_with_mask(tokens, ratio, data):
    forced = data.draw(st.integers(0, tokens))
    kept = kept_count(tokens, ratio, forced)
    exact = tokens - int((tokens - forced) * ratio)
    level = math.ceil(tokens / 16)
    assert exact <= kept <= min(tokens, exact + level - 1)
    assert kept == tokens or kept % level == 0


@pytest.mark.parametrize("tokens", [16, 64, 100, 4096])
def test_masks_of_any_size_give_at_most_sixteen_shapes(tokens):
    assert len({kept_count(tokens, 0.5, forced) for forced in range(tokens + 1)}) <= 16


def test_half_a_mask_leaves_half_the_budget_for_the_rest():
    """Existing systems let forced tokens eat the budget: a 50 % mask at ratio 0.5 kept nothing outside it."""
    assert kept_count(64, 0.5, forced=32) == 48


def test_selection_is_ascending_distinct_and_holds_the_highest_scores():
    score = noise.bits(1, torch.arange(5)[:, None], torch.arange(40))
    ids = select(score, 13)
    for row, chosen in zip(score.tolist(), ids.tolist(), strict=True):
        best = sorted(range(40), key=lambda token: -row[token])[:13]
        assert chosen == sorted(best)


def test_ties_go_to_the_earlier_token():
    assert select(torch.zeros(1, 5000, dtype=torch.int64), 3000).tolist() == [list(range(3000))]


def test_forced_tokens_always_stay_and_the_rest_stays_random():
    score = noise.bits(2, torch.arange(200)[:, None], torch.arange(32))
    force = torch.zeros(200, 32, dtype=torch.bool)
    force[:, :8] = True
    force[0] = True
    kept = torch.zeros(200, 32).scatter(1, select(score, 20, force)[:, :], 1.0)
    assert kept[1:, :8].all(), "forced"
    assert kept[0].sum() == 20, "a sample that forces more than K would lose some: the budget prevents it"
    share = kept[1:, 8:].mean(0)
    assert (share - 12 / 24).abs().max() < 0.15, "every other token has the same chance"


def test_rank_follows_the_l1_norm_in_float32():
    x = torch.randn(3, 50, 7, dtype=torch.float64)
    rank = l1_rank(x)
    for row, norms in zip(rank, x.abs().sum(-1), strict=True):
        assert row.tolist() == [int((norms < norm).sum()) for norm in norms]
    # in bf16 the sum itself would round: neighbouring norms must still be told apart
    x = torch.ones(1, 64, 512, dtype=torch.bfloat16)
    x[0, :, 0] += torch.arange(63, -1, -1) / 64
    assert l1_rank(x)[0].tolist() == list(range(63, -1, -1))


def test_importance_one_keeps_exactly_the_most_important():
    """Regression: importance was inverted, keeping the least important tokens."""
    x = torch.arange(1, 17.0).view(1, 16, 1)
    score = mixed_score(noise.bits(0, torch.arange(16))[None], l1_rank(x), 1.0)
    assert select(score, 4).tolist() == [[12, 13, 14, 15]]


@pytest.mark.parametrize("importance", [0.25, 0.5, 0.9])
def test_mixed_score_is_the_stated_formula(importance):
    tokens = 100
    bits = noise.bits(3, torch.arange(4)[:, None], torch.arange(tokens))
    rank = l1_rank(torch.randn(4, tokens, 3))
    formula = (1 - importance) * bits.double() / 2**32 + importance * rank.double() / tokens
    torch.testing.assert_close(mixed_score(bits, rank, importance).double() / 2**48, formula, atol=2e-5, rtol=0)


def test_more_importance_keeps_more_important_tokens():
    x = torch.arange(1, 65.0).view(1, 64, 1).expand(100, -1, -1)
    bits = noise.bits(4, torch.arange(100)[:, None], torch.arange(64))
    mean_rank = [
        select(mixed_score(bits, l1_rank(x), importance), 32).float().mean() for importance in (0, 0.25, 0.5, 1)
    ]
    assert mean_rank == sorted(mean_rank)
    assert abs(mean_rank[0] - 31.5) < 1
    assert mean_rank[-1] == 47.5


def test_compiled_equals_eager():
    x = torch.randn(2, 64, 8)

    def run(x, step):
        bits = noise.bits(1, step, torch.arange(2)[:, None], torch.arange(64))
        return select(mixed_score(bits, l1_rank(x), 0.5), 32)

    compiled = torch.compile(run, fullgraph=True, backend="inductor")
    for step in range(3):
        assert compiled(x, torch.tensor(step)).equal(run(x, torch.tensor(step)))
