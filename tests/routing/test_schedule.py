"""The ratio's course over training."""

from typing import Any

import pytest

from tread import ConfigError, RoutePlan, Schedule


def test_warm_up_climbs_in_levels_and_cool_down_is_dense():
    schedule = Schedule(warmup_steps=8, cooldown_fraction=0.25, levels=4, total_steps=20)
    scales = [schedule.scale(step) for step in range(20)]
    assert scales == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75] + [1.0] * 7 + [0.0] * 5


def test_few_distinct_values_whatever_the_length():
    schedule = Schedule(warmup_steps=1000, cooldown_fraction=0.1, levels=3, total_steps=10_000)
    assert {schedule.scale(step) for step in range(10_000)} == {0, 1 / 3, 2 / 3, 1}


def test_without_settings_the_ratio_is_constant():
    assert {Schedule().scale(step) for step in range(100)} == {1.0}


def test_a_cool_down_is_rounded_to_whole_steps():
    for fraction, dense in ((0.24, 2), (0.26, 3)):
        schedule = Schedule(cooldown_fraction=fraction, total_steps=10)
        assert [schedule.scale(step) for step in range(10)].count(0.0) == dense


@pytest.mark.parametrize(
    ("setting", "least"), [("warmup_steps", 0), ("cooldown_fraction", 0.0), ("levels", 1), ("total_steps", 1)]
)
def test_the_least_of_each_setting_runs_and_less_is_refused(setting: str, least: Any):
    settings: dict[str, Any] = {"warmup_steps": 2, "total_steps": 4, setting: least}
    assert Schedule(**settings).scale(2) in (0.0, 1.0)
    with pytest.raises(ConfigError, match=rf"^schedule\.{setting} is {least - 1}; "):
        Schedule(**(settings | {setting: least - 1}))


def test_cool_down_needs_the_number_of_steps():
    with pytest.raises(ConfigError, match="total_steps"):
        Schedule(cooldown_fraction=0.1).scale(0)


def test_the_number_of_steps_is_filled_in_where_it_is_missing():
    constant = RoutePlan.from_config("paper")
    assert constant.with_total_steps(100) is constant
    for written, filled in ((None, 100), (40, 40)):
        plan = RoutePlan.from_config({"preset": "paper", "schedule": {"warmup_steps": 5, "total_steps": written}})
        assert plan.with_total_steps(100).schedule == Schedule(warmup_steps=5, total_steps=filled)
