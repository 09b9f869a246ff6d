"""Ratios that cost an adapter quality, and windows that leave a token too few layers, are warned of; no others."""

import re

import pytest

from tread import RoutePlan
from tread.routing.plan import PRESETS
from tread.routing.risks import adapter_risks, layer_risks, mask_risks, token_risks


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
def test_a_careful_ratio_is_no_risk(ratio: float) -> None:
    assert adapter_risks(_plan(ratio)) == []


def test_a_high_ratio_is_told_with_the_reason_and_the_way_out() -> None:
    (risk,) = adapter_risks(_plan(0.6))
    assert risk.startswith("route 3..-4 at 0.6 is above a ratio of 0.5 while only an adapter is trained")
    assert "never saw so few tokens" in risk
    assert "no higher ratio was tried (docs/results.md). Lower the ratio" in risk


def test_the_preset_for_adapters_is_no_risk() -> None:
    plan = RoutePlan.from_config("lora").resolve(12)
    assert adapter_risks(plan) == layer_risks(plan) == []


@pytest.mark.parametrize("depth", [12, 28, 57])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_that_leaves_a_dropped_token_three_layers_is_told(preset: str, depth: int) -> None:
    plan = RoutePlan.from_config(preset).resolve(depth)
    kept = set(range(depth))
    for route in plan.routes:
        kept -= set(range(route.start_layer_idx, route.end_layer_idx + 1))
    told = [risk for risk in layer_risks(plan) if f"a dropped token passes {len(kept)} of {depth} layers." in risk]
    assert bool(told) == (len(kept) < 4)
    assert (len(kept) < 4) == (preset in ("balanced", "masked", "max-speed"))


def test_a_shallow_model_is_advised_to_train_dense() -> None:
    """Four layers have no window that leaves four; five have one, which is what the advice says."""
    routes = [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 2}]
    (risk,) = layer_risks(RoutePlan.from_config({"routes": routes}).resolve(4))
    assert risk.endswith("A model this shallow trains better dense.")
    advised = [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -3}]
    for depth in (5, 12, 57):
        assert layer_risks(RoutePlan.from_config({"routes": advised}).resolve(depth)) == []


def test_the_advice_is_no_risk_itself() -> None:
    """The window that it names, by the words of the warnings."""
    for depth in (6, 12, 57):
        long = [{"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": -1}]
        first, last, few = layer_risks(RoutePlan.from_config({"routes": long}).resolve(depth))
        start = re.search(r"Set start_layer_idx to (\d+), or", first)
        latest = re.search(r"Set end_layer_idx to -4 \(the paper\) or at most (-\d+)\.$", last)
        window = re.search(r"Leave 4, for example with start_layer_idx (\d+) and end_layer_idx (-\d+)\.$", few)
        assert start
        assert latest
        assert window
        assert window.groups() == (start[1], latest[1])
        for end, risks in ((int(window[2]), 0), (int(window[2]) + 1, 1)):
            route = {"selection_ratio": 0.5, "start_layer_idx": int(window[1]), "end_layer_idx": end}
            assert len(layer_risks(RoutePlan.from_config({"routes": [route]}).resolve(depth))) == risks


def test_a_window_over_layer_0_is_told_and_one_from_layer_1_is_not() -> None:
    """In the paper's long runs 1..8 was as good as 2..8, and 0..8 was not."""
    first, later = (
        [{"selection_ratio": 0.5, "start_layer_idx": start, "end_layer_idx": start + 7}] for start in (0, 1)
    )
    (risk,) = layer_risks(RoutePlan.from_config({"routes": first}).resolve(12))
    assert risk.startswith("route 0..7 at 0.5 starts before layer 1: the first layer builds")
    assert layer_risks(RoutePlan.from_config({"routes": later}).resolve(12)) == []


def test_a_mask_of_three_quarters_is_told() -> None:
    assert mask_risks(64, 47) == []
    (risk,) = mask_risks(64, 48)
    assert risk.startswith("a sample forces 48 of 64 tokens, so at most 16 can be dropped in its batch")


def test_a_high_ratio_on_few_tokens_is_told() -> None:
    assert token_risks(_plan(0.5), 256) == token_risks(_plan(0.6), 257) == []
    (risk,) = token_risks(_plan(0.6), 256)
    assert risk.startswith("route 3..-4 at 0.6 keeps 103 of 256 tokens: at 256 tokens the paper lost quality above")


def _plan(ratio: float) -> RoutePlan:
    route = {"selection_ratio": ratio, "start_layer_idx": 3, "end_layer_idx": -4}
    return RoutePlan.from_config({"routes": [route]})
