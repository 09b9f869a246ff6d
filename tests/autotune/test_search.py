"""The search against all combinations of measured windows."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tread.autotune.goal import Goal, Options
from tread.autotune.rules import Rules
from tread.autotune.search import DENSE, Plan, Window, front
from tread.errors import ConfigError
from tread.routing.route import Route


def windows_of(number: random.Random, depth: int, count: int) -> list[Window]:
    """Windows with costs that sum exactly: small multiples of 1/64."""
    found = []
    for _ in range(count):
        start = number.randrange(2, depth - 1)
        end = number.randrange(start, depth - 1)
        route = Route(selection_ratio=number.choice([0.25, 0.5]), start_layer_idx=start, end_layer_idx=end)
        found.append(Window(route=route, saving=number.randint(1, 64) / 64, gap=number.randint(-2, 64) / 64))
    return found


def every_plan(windows: Sequence[Window], rules: Rules, most: int) -> Iterator[tuple[float, float]]:
    """Saving and gap of every combination that runs and that the rules allow."""
    yield 0.0, 0.0
    for count in range(1, most + 1):
        for some in itertools.combinations(windows, count):
            try:
                broken = rules.broken([window.route for window in some])
            except ConfigError:  # they overlap
                continue
            if not broken:
                yield sum(window.saving for window in some), sum(window.gap for window in some)


def unbeaten(plans: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    return {
        one for one in plans if not any(other != one and other[0] >= one[0] and other[1] <= one[1] for other in plans)
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_front_is_that_of_all_combinations(seed: int) -> None:
    number = random.Random(seed)
    depth, most = number.choice([8, 11, 14]), number.choice([1, 2, 3])
    rules = Rules(depth=depth, tokens=1024, adapts=False)
    windows = [w for w in windows_of(number, depth, 18) if not rules.broken([w.route])]
    plans = list(every_plan(windows, rules, most))
    found = front(windows, depth=depth, longest=rules.longest, most=most)
    assert {(plan.saving, plan.gap) for plan in found} == unbeaten(plans)
    for plan in found:
        assert not plan.routes or rules.broken(plan.routes) == []
        assert len(plan.routes) <= most
    assert [plan.saving for plan in found] == sorted((plan.saving for plan in found), reverse=True)

    dense, routed = 8.0, [plan for plan in found if plan.routes]
    for target in (1.05, 1.2, 1.5):
        reaching = [gap for saving, gap in plans if saving and dense / (dense - saving) >= target]
        chosen = Goal(speedup=target).ordered(routed, dense)
        assert (chosen[0].gap if chosen else None) == min(reaching, default=None)
    for most_gap in (0.05, 0.3):
        within = [saving for saving, gap in plans if saving and gap <= most_gap]
        chosen = Goal(gap=most_gap).ordered(routed, dense)
        assert (chosen[0].saving if chosen else None) == max(within, default=None)


def test_windows_that_leave_too_few_layers_are_not_joined() -> None:
    """Two windows of four layers each leave three of eleven: each is allowed, both are not."""
    rules = Rules(depth=11, tokens=1024, adapts=False)
    windows = [
        Window(route=Route(selection_ratio=0.5, start_layer_idx=a, end_layer_idx=a + 3), saving=1.0, gap=0.5)
        for a in (2, 6)
    ]
    assert all(not rules.broken([window.route]) for window in windows)
    assert rules.broken([window.route for window in windows])
    assert max(len(plan.routes) for plan in front(windows, depth=11, longest=rules.longest, most=2)) == 1
    assert max(len(plan.routes) for plan in front(windows, depth=11, longest=8, most=2)) == 2


def test_speeds_that_differ_by_rounding_alone_are_equal() -> None:
    """Where a window costs no time of its own, one of two layers and two of one save the same, but for the sums."""
    costs = {(2, 2): (0.1, 0.02), (3, 3): (0.2, 0.03), (2, 3): (0.30000000000000004 + 1e-16, 0.12)}
    windows = [
        Window(route=Route(selection_ratio=0.5, start_layer_idx=start, end_layer_idx=end), saving=saving, gap=gap)
        for (start, end), (saving, gap) in costs.items()
    ]
    (fastest, *_) = front(windows, depth=8, longest=4, most=2)
    assert fastest.gap == pytest.approx(0.05)


def test_of_equal_plans_the_one_with_the_fewest_windows_is_kept() -> None:
    windows = [
        Window(route=Route(selection_ratio=0.5, start_layer_idx=a, end_layer_idx=b), saving=(b - a + 1) / 4, gap=0.0)
        for a, b in ((2, 3), (4, 5), (2, 5))
    ]
    for order in itertools.permutations(windows):
        (fastest,) = front(order, depth=10, longest=4, most=2)
        assert fastest.routes == (windows[2].route,)


def plan(saving: float, gap: float) -> Plan:
    route = Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=3)
    return Plan(routes=(route,), saving=saving, gap=gap)


def test_the_knee_is_farthest_below_the_line_between_the_ends() -> None:
    plans = [plan(1.0, 1.0), plan(0.8, 0.5), plan(0.5, 0.1), plan(0.0, 0.0)]
    assert Goal().ordered(plans, 2.0)[0] == plans[2]
    assert Goal().ordered([plans[0]], 2.0) == [plans[0]]


def test_of_two_plans_the_knee_is_the_one_of_the_smaller_gap() -> None:
    plans = [plan(1.0, 0.3), plan(0.5, 0.1)]
    assert Goal().ordered(plans, 2.0) == plans[::-1]


def test_without_windows_there_is_dense_training_alone_and_nothing_to_propose() -> None:
    assert front([], depth=8, longest=4, most=2) == [DENSE]
    for goal in (Goal(), Goal(gap=0.5), Goal(speedup=1.1)):
        assert goal.ordered([], 2.0) == []


def test_a_plan_that_just_reaches_the_goal_counts() -> None:
    plans = [plan(1.0, 0.5), plan(0.5, 0.25)]
    assert Goal(gap=0.25).ordered(plans, 2.0) == [plans[1]]
    assert Goal(gap=0.5).ordered(plans, 2.0) == plans
    assert Goal(speedup=2.0).ordered(plans, 2.0) == [plans[0]]
    assert Goal(speedup=4 / 3).ordered(plans, 2.0) == [plans[1], plans[0]]


def test_finalists_are_ordered_by_what_was_measured_of_them() -> None:
    measured = {"a": (1.8, 0.03), "b": (1.5, 0.01), "c": (1.6, 0.02), "d": (1.4, 0.0)}
    assert Goal(speedup=1.5).best(measured) == ["b", "c", "a"]
    assert Goal(speedup=1.9).best(measured) == []
    assert Goal(gap=0.02).best(measured) == ["b", "c", "d"]
    assert Goal(gap=0.01).best({"a": (1.8, 0.03)}) == []
    assert Goal().best(measured) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"speedup": 1.0}, "--target-speedup is 1.0; it must be above 1"),
        ({"speedup": float("inf")}, "--target-speedup is inf; it must be above 1"),
        ({"gap": 0.0}, "--max-loss-gap is 0.0"),
        ({"gap": float("inf")}, "--max-loss-gap is inf"),
    ],
)
def test_goals_that_mean_nothing(given: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Goal(**given)


@pytest.mark.parametrize(
    ("given", "less", "sentence"),
    [
        ({"edges": 2}, 1, "--edges is 1; it must be at least 2."),
        ({"windows": 1}, 0, "--windows is 0; it must be at least 1."),
        ({"start_steps": 0}, -1, "--start-steps is -1; it must be at least 0."),
        ({"ratios": (0.5,)}, (0.0,), "--ratios is [0.0]; give one to 5 fractions of tokens to drop"),
        ({"ratios": (0.1, 0.2, 0.3, 0.4, 0.9)}, (0.5, 1.0), "--ratios is [0.5, 1.0]; give one to 5 fractions"),
        ({"ratios": (0.5,)}, (), "--ratios is []; give one to 5 fractions"),
        ({"ratios": (0.5,)}, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), "--ratios is [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]; give one"),
        ({"budget_minutes": 0.1}, 0.0, "--budget-minutes is 0.0; it must be a number of minutes above 0."),
        ({"verify_minutes": None}, float("inf"), "--verify is inf; it must be a number of minutes above 0."),
    ],
)
def test_the_least_of_each_option_runs_and_less_is_refused(given: dict[str, Any], less: Any, sentence: str) -> None:
    rest: dict[str, Any] = {"config": None, "settings": (), "goal": Goal()}
    Options(**rest, **given)
    refused: dict[str, Any] = dict.fromkeys(given, less)
    with pytest.raises(ConfigError) as error:
        Options(**rest, **refused)
    assert str(error.value).startswith(sentence)
