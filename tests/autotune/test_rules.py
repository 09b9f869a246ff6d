"""The rules are the risks that tread warns about, and nothing else."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

from tread.autotune.rules import RATIOS, Rules, parse_ratios
from tread.errors import ConfigError, RiskWarning
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.risks import layer_risks
from tread.routing.route import Route


def route(ratio: float, start: int, end: int) -> Route:
    return Route(selection_ratio=ratio, start_layer_idx=start, end_layer_idx=end)


def plan(depth: int, *routes: Route) -> RoutePlan:
    return RoutePlan(routes=routes).resolve(depth)


@pytest.mark.parametrize(
    ("rules", "routes", "words"),
    [
        (Rules(depth=12, tokens=1024, adapts=False), [route(0.5, 0, 7)], "starts before layer 1"),
        (Rules(depth=12, tokens=1024, adapts=False), [route(0.5, 5, 11)], "includes the last of 12 layers"),
        (Rules(depth=12, tokens=1024, adapts=False), [route(0.5, 2, 10)], "3 of 12 layers"),
        (Rules(depth=12, tokens=1024, adapts=False), [route(0.5, 2, 5), route(0.5, 6, 10)], "3 of 12 layers"),
        (Rules(depth=12, tokens=256, adapts=False), [route(0.75, 2, 8)], "keeps 64 of 256 tokens"),
        (Rules(depth=12, tokens=1024, adapts=True), [route(0.6, 3, 8)], "while only an adapter is trained"),
    ],
)
def test_what_is_not_proposed(rules: Rules, routes: list[Route], words: str) -> None:
    (risk,) = rules.broken(routes)
    assert words in risk


def test_the_windows_of_our_own_study() -> None:
    """Of the eleven windows of docs/results.md, those that fell apart or that a warning is about are not proposed."""
    rules = Rules(depth=12, tokens=256, adapts=False)
    starts_and_ends = [(1, 6), (1, 7), (1, 8), (1, 10), (2, 6), (2, 8), (2, 10), (4, 6), (4, 8), (4, 10), (5, 11)]
    allowed = [window for window in starts_and_ends if not rules.broken([route(0.5, *window)])]
    assert allowed == [(1, 6), (1, 7), (1, 8), (2, 6), (2, 8), (4, 6), (4, 8), (4, 10)]


@pytest.mark.parametrize("depth", [5, 6, 8, 13])
def test_with_an_edge_at_every_layer_all_windows_are_tried(depth: int) -> None:
    rules = Rules(depth=depth, tokens=1024, adapts=False)
    every = {
        (start, end)
        for start in range(depth)
        for end in range(start, depth)
        if not rules.broken([route(0.5, start, end)])
    }
    assert set(rules.windows(depth + 1)) == every
    assert every


@pytest.mark.parametrize(("depth", "edges"), [(57, 8), (28, 8), (12, 8), (57, 3), (9, 3)])
def test_few_edges_are_spread_over_all_layers(depth: int, edges: int) -> None:
    """And the windows of the presets that the rules allow come first."""
    rules = Rules(depth=depth, tokens=1024, adapts=False)
    windows = rules.windows(edges)
    assert all(not rules.broken([route(0.5, *window)]) for window in windows)
    known = {(2, depth - 4), (3, depth - 4), (2, depth - 3)}
    known = {window for window in known if not rules.broken([route(0.5, *window)])}
    assert set(windows[: len(known)]) == known
    windows = windows[len(known) :]
    assert len(windows) <= edges * (edges - 1) // 2
    assert len({start for start, _ in windows} | {end + 1 for _, end in windows}) <= edges


def test_a_shallow_model_has_no_window() -> None:
    assert Rules(depth=4, tokens=1024, adapts=False).windows(8) == []
    assert Rules(depth=3, tokens=1024, adapts=False).windows(8) == []


def test_ratios_end_at_the_ceiling() -> None:
    assert Rules(depth=12, tokens=1024, adapts=False).ratios() == RATIOS
    assert Rules(depth=12, tokens=256, adapts=False).ratios() == (0.25, 0.4, 0.5)
    assert Rules(depth=12, tokens=256, adapts=True).ratios() == (0.25, 0.4, 0.5)
    assert Rules(depth=12, tokens=1024, adapts=True).ceiling == 0.5
    for tokens, adapts in ((256, False), (1024, True), (64, True)):
        rules = Rules(depth=12, tokens=tokens, adapts=adapts)
        assert not any(rules.broken([route(ratio, 4, 6)]) for ratio in rules.ratios())
        assert all(rules.broken([route(ratio, 4, 6)]) for ratio in RATIOS if ratio not in rules.ratios())
        assert rules.sentences()[-1].startswith("at most")


def test_the_depth_rule_is_about_all_windows_together() -> None:
    assert layer_risks(plan(12, route(0.5, 2, 9))) == []
    (risk,) = layer_risks(plan(12, route(0.5, 2, 9), route(0.5, 10, 10)))
    assert risk.startswith("route 2..9 at 0.5 and route 10..10 at 0.5: a dropped token passes 3 of 12 layers.")


def test_a_rerouted_handle_warns_like_a_new_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RiskWarning)
        handle = Handle(RoutePlan(routes=(route(0.5, 2, 5),)), depth=8, seed=7)
        handle.reroute(RoutePlan(routes=(route(0.25, 3, -2),)))
        assert handle.plan.seed == 7
        assert handle.plan.routes == (route(0.25, 3, 6),)
        with pytest.raises(RiskWarning, match="starts before layer 1"):
            handle.reroute(RoutePlan(routes=(route(0.25, 0, 2),)))


@pytest.mark.parametrize(
    "other",
    [
        {"routes": (route(0.5, 3, 5),)},
        {"selector": "l1", "importance": 0.5},
        {"reference_tokens": "route"},
        {"seed": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_signature_tells_plans_apart(other: dict[str, Any]) -> None:
    """Otherwise a CUDA graph captured under one plan would be replayed under the other."""
    plan = RoutePlan(routes=(route(0.5, 2, 4),))
    handle = Handle(plan, depth=8)
    before = handle.signature(training=True)
    handle.reroute(replace(plan, **other), seed=other.get("seed"))
    assert handle.signature(training=True) != before
    handle.reroute(plan, seed=plan.seed)
    assert handle.signature(training=True) == before


def test_ratios_of_the_command_line() -> None:
    assert parse_ratios(None) == RATIOS
    with pytest.raises(ConfigError, match=r"--ratios is '0.5;0.25'; give numbers"):
        parse_ratios("0.5;0.25")
