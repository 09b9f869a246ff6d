"""Picks: the same visits whatever the number of processes, captions dropped and drawn by position."""

from typing import Any

import pytest
import torch

from tread.data.captioned.buckets import BucketOrder
from tread.data.order import positions
from tread.errors import ConfigError
from tread.finetune.data.picks import Pick, PickSampler

GROUPS = ["wide"] * 9 + ["tall"] * 5


def sampler(**changes: Any) -> PickSampler:
    settings = {"batch": 8, "micro_steps": 2, "rank": 0, "world": 1, "start_step": 0, "steps": 30}
    settings = {**settings, "caption_dropout": 0.3, "seed": 7, **changes}
    order = BucketOrder(GROUPS, [1] * 14, batch=settings["batch"] // settings["micro_steps"], seed=1)
    return PickSampler(order, **settings)


def test_ranks_and_resumes_are_slices_of_one_run() -> None:
    alone = list(sampler())
    ranks = [list(sampler(rank=rank, world=2)) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == alone
    assert list(sampler(start_step=11)) == alone[22:]
    assert len(sampler(start_step=11)) == 38
    assert all(len({GROUPS[pick.sample] for pick in batch}) == 1 for batch in alone)


def test_captions_are_dropped_as_often_as_asked_and_drawn_evenly() -> None:
    picks = [pick for batch in sampler(steps=500) for pick in batch]
    assert abs(sum(pick.dropped for pick in picks) / len(picks) - 0.3) < 0.03
    assert abs(sum(pick.caption % 2 for pick in picks) / len(picks) - 0.5) < 0.03
    assert not any(pick.dropped for batch in sampler(caption_dropout=0.0) for pick in batch)
    assert all(pick.dropped for batch in sampler(caption_dropout=1.0) for pick in batch)
    assert [p.dropped for p in picks] != [p.dropped for batch in sampler(steps=500, seed=8) for p in batch]


def test_the_positions_of_the_noise_are_those_of_the_picks() -> None:
    order = BucketOrder(GROUPS, [1] * 14, batch=4, seed=1)
    slices = {"batch": 8, "micro_steps": 2, "rank": 1, "world": 2}
    batches = iter(sampler(rank=1, world=2))
    for step in range(3):
        for micro_step in range(2):
            where = positions(step, micro_step, **slices)
            together = torch.cat([order.batch(index) for index in range(6)])
            picks = next(batches)
            assert [pick.sample for pick in picks] == together[where].tolist()
            assert [pick.position for pick in picks] == where.tolist()


def test_a_pick_is_a_plain_visit_by_default() -> None:
    assert Pick(3) == (3, False, 0, 0, False)


def test_batches_that_do_not_fit_the_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 samples per micro-step; with 3 micro-steps the batch is 12, not 8"):
        PickSampler(
            BucketOrder(GROUPS, [1] * 14, batch=4, seed=1),
            **{"batch": 8, "micro_steps": 3, "rank": 0, "world": 1, "start_step": 0, "steps": 1},
            caption_dropout=0.0,
            seed=0,
        )
