"""Ratios that cost an adapter quality are warned of, and no others."""

import pytest

from tread import RoutePlan
from tread.routing.risks import adapter_risks


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.35])
def test_a_careful_ratio_is_no_risk(ratio: float) -> None:
    assert adapter_risks(_plan(ratio)) == []


def test_a_high_ratio_is_told_with_the_reason_and_the_way_out() -> None:
    (risk,) = adapter_risks(_plan(0.4))
    assert risk.startswith("route 3..-4 at 0.4 is above a ratio of 0.35 while only an adapter is trained")
    assert "never saw so few tokens" in risk
    assert "preset 'lora'" in risk
    assert "selection_ratio 0.25" in risk


def _plan(ratio: float) -> RoutePlan:
    route = {"selection_ratio": ratio, "start_layer_idx": 3, "end_layer_idx": -4}
    return RoutePlan.from_config({"routes": [route]})
