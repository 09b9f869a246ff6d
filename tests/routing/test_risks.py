"""Ratios that cost an adapter quality are warned of, and no others."""

import pytest

from tread import RoutePlan
from tread.routing.risks import adapter_risks, layer_risks


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.4])
def test_a_careful_ratio_is_no_risk(ratio: float) -> None:
    assert adapter_risks(_plan(ratio)) == []


def test_a_high_ratio_is_told_with_the_reason_and_the_way_out() -> None:
    (risk,) = adapter_risks(_plan(0.45))
    assert risk.startswith("route 3..-4 at 0.45 is above a ratio of 0.4 while only an adapter is trained")
    assert "never saw so few tokens" in risk
    assert "preset 'lora' cost 1.5 %" in risk


def test_the_preset_for_adapters_is_no_risk() -> None:
    plan = RoutePlan.from_config("lora").resolve(12)
    assert adapter_risks(plan) == layer_risks(plan) == []


def _plan(ratio: float) -> RoutePlan:
    route = {"selection_ratio": ratio, "start_layer_idx": 3, "end_layer_idx": -4}
    return RoutePlan.from_config({"routes": [route]})
