"""Every config is either accepted as written or refused with the offending value named."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tread import ConfigError, Route, RoutePlan
from tread.routing.plan import PRESETS

ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}
PLAN = RoutePlan(routes=(Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-2),))


def test_every_form_of_the_config_gives_the_same_plan(tmp_path):
    bare, outer = {"routes": [ROUTE]}, {"tread_config": {"routes": [ROUTE]}}
    (tmp_path / "plan.json").write_text(json.dumps(outer))
    (tmp_path / "plan.yaml").write_text("routes:\n- {selection_ratio: 0.5, start_layer_idx: 2, end_layer_idx: -2}\n")
    forms = [bare, outer, json.dumps(bare), json.dumps(outer), tmp_path / "plan.json", str(tmp_path / "plan.yaml")]
    assert [RoutePlan.from_config(form) for form in forms] == [PLAN] * len(forms)


@pytest.mark.parametrize(
    ("name", "ratio", "start", "end"),
    [
        ("balanced", 0.5, 2, -2),
        ("max-speed", 0.7, 1, -1),
        ("high-res", 0.6, 2, -3),
        ("lora", 0.4, 3, -4),
        ("masked", 0.7, 2, -2),
        ("paper", 0.5, 2, -4),
        ("video", 0.5, 2, -3),
    ],
)
def test_presets(name, ratio, start, end):
    route = Route(selection_ratio=ratio, start_layer_idx=start, end_layer_idx=end)
    assert RoutePlan.from_config({"preset": name}).routes == RoutePlan.from_config(name).routes == (route,)
    assert set(PRESETS) == {"balanced", "max-speed", "high-res", "lora", "masked", "paper", "video"}


def test_a_plan_survives_json_with_every_field():
    config = {
        "routes": [ROUTE],
        "selector": "l1",
        "importance": 0.25,
        "seed": 7,
        "schedule": {"warmup_steps": 10, "cooldown_fraction": 0.1, "levels": 3, "total_steps": 100},
        "reference_tokens": "route",
    }
    plan = RoutePlan.from_config(config)
    assert plan.to_config() == config
    assert RoutePlan.from_config(json.loads(json.dumps(plan.to_config()))) == plan
    assert RoutePlan.from_config(plan.resolve(12).to_config()).resolve(12) == plan.resolve(12)


def test_importance_defaults_to_a_half_for_l1_only():
    assert RoutePlan.from_config({"routes": [ROUTE], "selector": "l1"}).importance == 0.5
    assert RoutePlan.from_config({"routes": [ROUTE]}).importance == 0.0


def test_null_means_not_set():
    config = {"routes": [ROUTE], "preset": None, "importance": None, "schedule": None, "seed": None}
    assert RoutePlan.from_config(config) == PLAN


def with_route(**changes):
    return {"routes": [{**ROUTE, **changes}]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"^TREAD training requires you to configure the routes"),
        ({"routes": []}, r"^TREAD training requires you to configure the routes"),
        ({"tread_config": {}}, r"^TREAD training requires you to configure the routes"),
        ({"routes": [ROUTE], "preset": "paper"}, r"both routes and preset 'paper'"),
        ({"preset": "papper"}, r"preset is 'papper'.*Did you mean 'paper'"),
        (ROUTE, r"selection_ratio itself; it belongs to a route: give `routes`"),
        ({"routes": [ROUTE], "selectr": "l1"}, r"unknown key 'selectr'.*Did you mean 'selector'"),
        ({"routes": [ROUTE], "selector": "l2"}, r"selector is 'l2'.*random, l1"),
        ({"routes": [ROUTE], "importance": 0.5}, r"importance is 0.5.*selector to 'l1'"),
        ({"routes": [ROUTE], "selector": "l1", "importance": 1.5}, r"importance is 1.5.*0 <= value <= 1"),
        ({"routes": [ROUTE], "seed": -1}, r"seed is -1.*at least 0"),
        ({"routes": [ROUTE], "seed": True}, r"seed is True.*whole number"),
        ({"routes": [ROUTE], "reference_tokens": "drop"}, r"reference_tokens is 'drop'.*keep, route"),
        ({"routes": [ROUTE], "schedule": {"warmup": 1}}, r"schedule: unknown key 'warmup'"),
        ({"routes": [ROUTE], "schedule": {"warmup_steps": -1}}, r"schedule.warmup_steps is -1"),
        ({"routes": [ROUTE], "schedule": {"levels": 0}}, r"schedule.levels is 0"),
        ({"routes": [ROUTE], "schedule": 5}, r"schedule is 5; it must be a mapping"),
        ({"routes": ROUTE}, r"must be a list of routes"),
        ({"routes": ["2..5"]}, r"routes\[0\] is '2\.\.5'; it must be a mapping"),
        ({"tread_config": {"routes": [ROUTE]}, "lr": 1}, r"unknown key 'lr'"),
        ({"tread_config": [ROUTE]}, r"tread_config is \[.*must be a mapping"),
        (with_route(selection_ratio=1.0), r"routes\[0\].*selection_ratio.*is 1.0; allowed is 0 <= value < 1"),
        (with_route(selection_ratio=1.5), r"routes\[0\].*is 1.5"),
        (with_route(selection_ratio=-0.1), r"routes\[0\].*is -0.1"),
        (with_route(selection_ratio=float("nan")), r"routes\[0\].*nan"),
        (with_route(selection_ratio="half"), r"routes\[0\].*'half'"),
        (with_route(start_layer_idx=2.5), r"routes\[0\].*start_layer_idx.*2.5.*whole number"),
        (with_route(start_layer_idx=-1), r"routes\[0\].*start_layer_idx -1 > end_layer_idx -2"),
        (with_route(mask_ratio=0.5), r"routes\[0\]: unknown key 'mask_ratio'"),
        ({"routes": [{"selection_ratio": 0.5}]}, r"routes\[0\] lacks start_layer_idx, end_layer_idx"),
        ("{broken", r"not valid JSON"),
        ("no/such/file.json", r"'no/such/file.json': no preset .* and no such file\.$"),
        ("papr", r"'papr': no preset .* and no such file\. Did you mean 'paper'\?$"),
        (17, r"tread_config is 17"),
    ],
)
def test_mistakes_are_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        RoutePlan.from_config(config)


def test_a_plan_made_by_hand_is_checked_like_a_config():
    mistakes = (
        ({"selector": "l2"}, r"^selector is 'l2'\. Choose one of: random, l1\.$"),
        ({"importance": 0.5}, r"^importance is 0\.5, but the selector is 'random'"),
        ({"seed": -1}, r"^seed is -1"),
        ({"reference_tokens": "drop"}, r"^reference_tokens is 'drop'\. Choose one of: keep, route\.$"),
        ({"routes": ()}, r"^TREAD training requires you to configure the routes"),
    )
    for changes, message in mistakes:
        with pytest.raises(ConfigError, match=message):
            replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([(0.5, 2, 12)], r"end_layer_idx 12.*model of 12 layers; allowed is -12..11"),
        ([(0.5, -13, 5)], r"start_layer_idx -13.*allowed is -12..11"),
        ([(0.5, 9, -4)], r"starts after it ends in a model of 12 layers: it covers layers 9..8"),
        ([(0.5, 2, 5), (0.3, 5, 8)], r"route 2..5 at 0.5 and route 5..8 at 0.3 overlap.*start at layer 6"),
        ([(0.3, -6, -3), (0.5, 2, 6)], r"route 2..6 at 0.5 and route -6..-3 at 0.3 overlap"),
    ],
)
def test_routes_are_checked_against_the_depth(routes, message):
    plan = RoutePlan(routes=tuple(Route(selection_ratio=r, start_layer_idx=s, end_layer_idx=e) for r, s, e in routes))
    with pytest.raises(ConfigError, match=message):
        plan.resolve(12)


def test_touching_routes_are_kept_and_sorted():
    """Existing systems lose the second of two touching routes, and unsorted ones."""
    config = {
        "routes": [
            {"selection_ratio": 0.7, "start_layer_idx": -4, "end_layer_idx": -1},
            {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": 3},
            {"selection_ratio": 0.5, "start_layer_idx": 4, "end_layer_idx": 15},
        ]
    }
    windows = [(r.start_layer_idx, r.end_layer_idx) for r in RoutePlan.from_config(config).resolve(20).routes]
    assert windows == [(1, 3), (4, 15), (16, 19)]


@given(
    depth=st.integers(1, 30),
    routes=st.lists(
        st.tuples(st.floats(-0.2, 1.2) | st.sampled_from([0.0, 0.5, 1.0]), st.integers(-35, 35), st.integers(-35, 35)),
        min_size=1,
        max_size=5,
    ),
)
def test_any_route_list_runs_as_written_or_is_refused_by_name(depth, routes):
    """An independent judge decides what is legal; the plan must agree and lose nothing."""
    legal, covered = True, []
    for ratio, start, end in routes:
        legal &= 0 <= ratio < 1 and -depth <= start < depth and -depth <= end < depth
        first, last = (i + depth if i < 0 else i for i in (start, end))
        legal &= first <= last
        covered += range(first, last + 1)
    legal &= len(covered) == len(set(covered))
    config = {"routes": [{"selection_ratio": r, "start_layer_idx": s, "end_layer_idx": e} for r, s, e in routes]}
    if legal:
        plan = RoutePlan.from_config(config).resolve(depth)
        assert sorted(covered) == [
            layer for route in plan.routes for layer in range(route.start_layer_idx, route.end_layer_idx + 1)
        ]
        assert sorted(r.selection_ratio for r in plan.routes) == sorted(r for r, _, _ in routes)
    else:
        with pytest.raises(ConfigError) as refusal:
            RoutePlan.from_config(config).resolve(depth)
        assert any(f"{s}..{e} at" in str(refusal.value) for _, s, e in routes)
