"""The fit of step times against a known law."""

import random

import numpy as np
import pytest

from tread.autotune.cost import Cost, Routes, Stack, Tokens, fit, key_of, probes, ratios_of, routes_of, terms
from tread.routing.budget import kept_count
from tread.routing.route import Route

STACKS = (Stack(name="joint", first=0, last=6), Stack(name="single", first=7, last=18))
RATIOS = (0.25, 0.4, 0.5, 0.6, 0.75)
LAYER = {"joint": (0.011, 0.004), "single": (0.006, 0.0015)}
FIXED, WINDOW = 0.031, 0.0007


def true_seconds(routes: Routes, tokens: Tokens) -> float:
    """The law, layer by layer."""
    total = FIXED + WINDOW * len(routes)
    for stack in STACKS:
        linear, square = LAYER[stack.name]
        for layer in range(stack.first, stack.last + 1):
            inside = [r for r in routes if r.start_layer_idx <= layer <= r.end_layer_idx]
            count = tokens.count
            if inside:
                count = kept_count(count, inside[0].selection_ratio, tokens.forced, tokens.always)
            total += linear * count / tokens.count + square * (count / tokens.count) ** 2
    return total


def route(ratio: float, start: int, end: int) -> Route:
    return Route(selection_ratio=ratio, start_layer_idx=start, end_layer_idx=end)


UNSEEN: list[Routes] = [
    (),
    (route(0.33, 2, 15),),
    (route(0.5, 5, 9),),
    (route(0.75, 0, 3), route(0.1, 4, 18)),
    (route(0.6, 1, 6), route(0.45, 8, 8), route(0.25, 12, 17)),
]


@pytest.mark.parametrize(
    "tokens",
    [Tokens(count=1024), Tokens(count=1000, forced=130), Tokens(count=768, always=256), Tokens(count=7)],
    ids=["plain", "mask", "references", "few"],
)
def test_a_known_law_is_recovered_and_predicts_plans_that_were_not_timed(tokens: Tokens) -> None:
    timed = {routes: true_seconds(routes, tokens) for routes in probes(STACKS, RATIOS, first=2, last=17)}
    cost = fit(timed, STACKS, tokens)
    assert cost.error < 1e-9
    for routes in UNSEEN:
        assert cost.seconds(routes) == pytest.approx(true_seconds(routes, tokens), rel=1e-9), routes
        assert cost.speedup(routes) == pytest.approx(true_seconds((), tokens) / true_seconds(routes, tokens))


def test_the_coefficients_are_those_of_the_law() -> None:
    tokens = Tokens(count=4096)
    cost = fit(
        {routes: true_seconds(routes, tokens) for routes in probes(STACKS, RATIOS, first=2, last=17)}, STACKS, tokens
    )
    assert cost.window == pytest.approx(WINDOW, rel=1e-6)
    assert cost.fixed == pytest.approx(FIXED, rel=1e-6)
    assert cost.linear == pytest.approx([LAYER[stack.name][0] for stack in STACKS], rel=1e-6)
    assert cost.square == pytest.approx([LAYER[stack.name][1] for stack in STACKS], rel=1e-6)


def test_a_stack_that_no_window_may_have_is_part_of_the_fixed_time() -> None:
    tokens, stacks = Tokens(count=4096), (*STACKS, Stack(name="last", first=19, last=20))
    plans = probes(stacks, RATIOS, first=2, last=18)
    cost = fit({routes: true_seconds(routes, tokens) for routes in plans}, stacks, tokens)
    assert (cost.linear[2], cost.square[2]) == (0, 0)
    assert cost.fixed == pytest.approx(FIXED, rel=1e-6)


def test_savings_of_windows_add_up() -> None:
    tokens = Tokens(count=1024)
    cost = fit(
        {routes: true_seconds(routes, tokens) for routes in probes(STACKS, RATIOS, first=2, last=17)}, STACKS, tokens
    )
    for routes in UNSEEN:
        together = sum(cost.saving(one) for one in routes)
        assert cost.seconds(()) - cost.seconds(routes) == pytest.approx(together, abs=1e-12)


def test_three_lengths_are_timed_whatever_the_model() -> None:
    """Each is compiled for every class of layer; layers that no window may have are never routed."""
    more = (*STACKS, Stack(name="last", first=19, last=20))
    for ratios, lengths in ((RATIOS, [0.25, 0.75]), ([0.5], [0.5])):
        plans = probes(more, ratios, first=2, last=18)
        assert ratios_of(plans) == lengths
        routed = {layer for routes in plans for r in routes for layer in range(r.start_layer_idx, r.end_layer_idx + 1)}
        assert routed == set(range(2, 19))
        assert len(plans) == len(set(plans)) == 1 + 2 * (len(lengths) + 2)


@pytest.mark.parametrize(
    ("last", "windows"), [(0, []), (1, [(0, 0), (1, 1)]), (2, [(0, 0), (1, 2)]), (3, [(0, 1), (2, 3)])]
)
def test_a_stack_of_two_layers_and_more_is_timed_in_halves_too(last: int, windows: list[tuple[int, int]]) -> None:
    plans = probes([Stack(name="few", first=0, last=last)], RATIOS, first=0, last=last)
    whole = [(route(ratio, 0, last),) for ratio in (0.25, 0.75)]
    assert plans == [(), *whole, *((route(0.75, start, end),) for start, end in windows)]


def test_no_coefficient_is_negative_and_no_nonnegative_fit_is_better() -> None:
    """Noise, and a law that the terms do not have: steps that cost less at more tokens."""
    number = random.Random(3)
    tokens = Tokens(count=1024)
    timed = {
        routes: (2 - true_seconds(routes, tokens)) * number.uniform(0.9, 1.1)
        for routes in probes(STACKS, RATIOS, first=2, last=17)
    }
    cost = fit(timed, STACKS, tokens)
    found = np.array([cost.fixed, cost.window, *cost.linear, *cost.square])
    assert found.min() >= 0
    rows = np.stack([terms(routes, STACKS, tokens) for routes in timed])

    def error(coefficients: np.ndarray) -> float:
        return float(((rows @ coefficients / np.array(list(timed.values())) - 1) ** 2).sum())

    for _ in range(2000):
        step = 10 ** number.uniform(-5, -1)
        other = np.maximum(0, found + np.array([number.gauss(0, step) for _ in found]))
        assert error(other) >= error(found) - 1e-12
    assert cost.error == pytest.approx(max(abs(cost.seconds(r) / seconds - 1) for r, seconds in timed.items()))


def test_one_ratio_is_enough_for_windows_of_that_ratio() -> None:
    tokens = Tokens(count=1024)
    cost = fit(
        {routes: true_seconds(routes, tokens) for routes in probes(STACKS, [0.5], first=2, last=17)}, STACKS, tokens
    )
    for routes in [(route(0.5, 2, 9),), (route(0.5, 1, 3), route(0.5, 8, 17))]:
        assert cost.seconds(routes) == pytest.approx(true_seconds(routes, tokens), rel=1e-9)


def test_kept_tokens_are_those_that_were_seen() -> None:
    tokens = Tokens(count=100, forced=10, always=3, measured={0.5: 61})
    assert tokens.kept(0.5) == 61
    assert tokens.kept(0.25) == kept_count(100, 0.25, 10, 3)


def test_names_of_plans() -> None:
    for routes in [*UNSEEN, (route(1 / 3, 2, 4),), (route(1e-7, 2, 4),)]:
        assert routes_of(key_of(routes)) == routes


def test_the_figures_go_into_a_file() -> None:
    tokens = Tokens(count=64)
    cost = fit(
        {routes: true_seconds(routes, tokens) for routes in probes(STACKS, RATIOS, first=2, last=17)}, STACKS, tokens
    )
    assert isinstance(cost, Cost)
    assert cost.to_config()["layers"]["single"]["linear"] == cost.linear[1]
