"""The order: every epoch a permutation, ranks and resumes slices of one and the same sequence."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tread.data.order import Groups, Order, StepSampler, Visited, positions, split
from tread.errors import ConfigError


def sampler(order: Order, **changes: Any) -> StepSampler:
    settings = {"batch": 12, "micro_steps": 1, "rank": 0, "world": 1, "start_step": 0, "steps": 5}
    return StepSampler(order, **{**settings, **changes})


@given(st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 3))
def test_every_epoch_visits_each_sample_once(n: int, seed: int, epoch: int) -> None:
    order = Order(n, seed)
    seen = order.indices(torch.arange(epoch * n, (epoch + 1) * n))
    assert sorted(seen.tolist()) == list(range(n))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = [Order(100, seed).indices(torch.arange(200)).split(100) for seed in (0, 1)]
    permutations = [tuple(epoch.tolist()) for epochs in orders for epoch in epochs]
    assert len({*permutations, tuple(range(100))}) == 5


def test_a_sample_lands_anywhere_with_equal_chance() -> None:
    counts = torch.zeros(5, 5)
    for seed in range(2000):
        counts[torch.arange(5), Order(5, seed).indices(torch.arange(5))] += 1
    chi_squared = 4 / 5 * ((counts - 400) ** 2 / 400).sum().item()  # rows and columns both sum to 2000
    assert chi_squared < 39.3  # 16 degrees of freedom, p = 0.001


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 10), st.integers(0, 9))
def test_windows_hold_so_many_groups_and_every_sample_once(sizes: list[int], window: int, seed: int) -> None:
    groups = Groups(torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)]), window)
    n = sum(sizes)
    order = Order(n, seed, groups)
    for epoch in range(2):
        left = order.indices(torch.arange(epoch * n, (epoch + 1) * n)).tolist()
        assert sorted(left) == list(range(n))
        position = epoch * n
        while left:
            following = order.following(position)
            met: list[int] = []
            while len(met) < min(window, len({int(groups.of_sample[i]) for i in left} | set(met))) or (
                left and int(groups.of_sample[left[0]]) in met
            ):
                group = int(groups.of_sample[left.pop(0)])
                met += [group] * (group not in met)
                position += 1
            if left:
                assert int(groups.of_sample[left[0]]) in following
            assert len(met) == window or not left


def test_each_window_is_announced_once_while_the_one_before_is_read() -> None:
    """Over nearly three epochs: a batch reads nothing but the first window and what was announced before it."""
    groups = Groups(torch.arange(60) // 6, 2)  # ten groups, five windows an epoch
    announced: list[list[int]] = []
    slices = {"batch": 6, "micro_steps": 1, "rank": 0, "world": 1, "start_step": 0, "steps": 28}
    sampler = StepSampler(Order(60, 1, groups), announced.append, **slices)
    read: list[set[int]] = []
    for visits in sampler:
        read.append({int(groups.of_sample[visit.sample]) for visit in visits})
        windows = [read[0], *announced]
        if len(read) > 2:
            assert read[-1] <= {*windows[-2]}, "of the window before the one announced last"
    assert len(announced) == 14
    assert [sorted(groups) for groups in announced[:-1]] == [
        sorted(read[2 * i] | read[2 * i + 1]) for i in range(1, 14)
    ]


def test_one_window_of_everything_is_the_plain_order() -> None:
    where, groups = torch.arange(200), torch.arange(100) % 7
    assert torch.equal(Order(100, 3, Groups(groups, 7)).indices(where), Order(100, 3).indices(where))
    assert not torch.equal(Order(100, 3, Groups(groups, 3)).indices(where), Order(100, 3).indices(where))


def test_held_out_samples_lie_in_few_groups() -> None:
    groups = Groups(torch.arange(100) // 10, 2)
    train, held_out = split(100, 25, 0, groups)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(100))
    assert len({i // 10 for i in held_out.tolist()}) == 3
    assert not torch.equal(held_out, split(100, 25, 1, groups)[1])
    assert torch.equal(groups.at(train).of_sample, train // 10)


def test_the_order_is_the_same_on_every_machine() -> None:
    expected = [2, 7, 3, 0, 1, 5, 6, 4, 3, 0, 6, 5, 7, 4, 2, 1]
    assert Order(8, seed=3).indices(torch.arange(16)).tolist() == expected


def test_the_answer_does_not_depend_on_what_was_asked_before() -> None:
    order, far = Order(7, seed=0), torch.tensor([70, 3, 35, 8, 71])
    for where in (torch.arange(30), torch.arange(60, 90)):
        order.indices(where)
    assert torch.equal(order.indices(far), Order(7, seed=0).indices(far))


@given(
    n=st.integers(1, 30),
    world=st.integers(1, 4),
    micro_steps=st.integers(1, 3),
    size=st.integers(1, 4),
    start=st.integers(0, 4),
)
def test_ranks_and_micro_steps_and_resume_slice_one_sequence(
    n: int, world: int, micro_steps: int, size: int, start: int
) -> None:
    order, batch, steps = Order(n, seed=5), world * micro_steps * size, 6
    alone = list(sampler(order, batch=batch, steps=steps))
    visits = list(itertools.chain(*alone))
    assert [visit.sample for visit in visits] == order.indices(torch.arange(steps * batch)).tolist()
    assert [visit.position for visit in visits] == list(range(steps * batch))

    ranks = [
        list(sampler(order, batch=batch, steps=steps, micro_steps=micro_steps, world=world, rank=rank))
        for rank in range(world)
    ]
    merged = [i for micro_step in zip(*ranks, strict=True) for part in micro_step for i in part]
    assert merged == list(itertools.chain(*alone))

    resumed = sampler(
        order, batch=batch, steps=steps, micro_steps=micro_steps, world=world, rank=world - 1, start_step=start
    )
    assert list(resumed) == ranks[-1][start * micro_steps :]
    assert len(resumed) == (steps - start) * micro_steps


def test_positions_are_what_the_sampler_reads() -> None:
    order = Order(10, seed=0)
    split_ = {"batch": 12, "micro_steps": 2, "rank": 1, "world": 3}
    read = iter(sampler(order, **split_, start_step=4, steps=6))
    for step, micro_step in ((4, 0), (4, 1), (5, 0), (5, 1)):
        where = positions(step, micro_step, **split_)
        assert next(read) == list(zip(order.indices(where).tolist(), where.tolist(), strict=True))
    assert positions(4, 1, **split_).tolist() == [48 + 6 + 2, 48 + 6 + 3]


def test_a_loader_takes_the_sampler() -> None:
    order = Order(10, seed=1)
    dataset: Any = [(10 * n, n % 3) for n in range(10)]
    batches = list(torch.utils.data.DataLoader(Visited(dataset), batch_sampler=sampler(order, batch=4, steps=3)))
    x, labels, where = (torch.cat(column) for column in zip(*batches, strict=True))
    chosen = order.indices(torch.arange(12))
    assert torch.equal(x, 10 * chosen)
    assert torch.equal(labels, chosen % 3)
    assert torch.equal(where, torch.arange(12))


@given(st.integers(1, 60), st.data(), st.integers(0, 9))
def test_split_is_a_partition(n: int, data: st.DataObject, seed: int) -> None:
    held_out = data.draw(st.integers(0, n - 1))
    train, validation = split(n, held_out, seed)
    assert len(validation) == held_out
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(n))
    assert train.tolist() == sorted(train.tolist())


def test_split_is_seeded_and_not_the_order_of_an_epoch() -> None:
    assert torch.equal(split(100, 10, 0)[1], split(100, 10, 0)[1])
    assert not torch.equal(split(100, 10, 0)[1], split(100, 10, 1)[1])
    assert not torch.equal(split(100, 10, 0)[1], Order(100, 0).indices(torch.arange(10)).sort().values)


def test_impossible_settings_say_so() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size is 10; it must be a multiple of 4, that is 2 proc"):
        sampler(Order(10, 0), batch=10, micro_steps=2, world=2)
    with pytest.raises(ConfigError, match=r"train\.batch_size is 0"):
        sampler(Order(10, 0), batch=0)
    with pytest.raises(ConfigError, match=r"at least 1 sample to train on, there are 0"):
        Order(0, 0)
    with pytest.raises(ConfigError, match=r"cannot hold out 10 of 10 samples .* allowed is 0\.\.9"):
        split(10, 10, 0)
