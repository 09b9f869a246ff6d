"""Warnings about settings that are legal but risky, each with the reason and what to change."""

import warnings

from tread.errors import RiskWarning
from tread.routing.plan import PRESETS, RoutePlan

FIRST_LAYERS = 2
"""Layers before the best start of a window (the paper)."""
FEW_TOKENS = 256
HIGH_RATIO = 0.5
"""Ratios above it lost quality at `FEW_TOKENS` tokens (the paper)."""
LITTLE_GAIN = 0.75
"""Share of forced tokens from which routing gains little speed."""
FEWEST_LAYERS = 4
"""Layers that a dropped token must pass, before, between and after its windows."""
ADAPTER_RATIO = PRESETS["lora"].selection_ratio


def layer_risks(plan: RoutePlan) -> list[str]:
    """Risks of the windows of a resolved plan: over the first two layers or the last one, or over too many of them."""
    assert plan.depth is not None
    risks = []
    for route in plan.routes:
        if route.start_layer_idx < FIRST_LAYERS:
            risks.append(
                f"{route} starts before layer 2: the first layers build what the dropped tokens carry past the "
                "window, and the paper found layer 2 the best start. Set start_layer_idx to 2, or preset 'paper'."
            )
        if route.end_layer_idx == plan.depth - 1:
            risks.append(
                f"{route} includes the last of {plan.depth} layers: dropped tokens then reach the output without a "
                "dense layer after the window. Set end_layer_idx to -4 (the paper) or at most -3."
            )
    return risks + _passage_risks(plan, plan.depth)


def _passage_risks(plan: RoutePlan, depth: int) -> list[str]:
    """Risks of windows that together leave a dropped token too few layers.

    A token may be dropped in every window, so their lengths add up.
    """
    left = depth - sum(route.end_layer_idx - route.start_layer_idx + 1 for route in plan.routes)
    if left >= FEWEST_LAYERS:
        return []
    routes = " and ".join(str(route) for route in plan.routes)
    advice = "A model this shallow trains better dense."
    if depth > FEWEST_LAYERS:
        advice = f"Leave {FEWEST_LAYERS}, for example with start_layer_idx 2 and end_layer_idx -3."
    return [
        f"{routes}: a dropped token passes {left} of {depth} layers. Trained from scratch, windows that left it three "
        "or two of twelve fell apart, in distance and in loss; those that left four or more did not "
        f"(docs/results.md). {advice}"
    ]


def token_risks(plan: RoutePlan, tokens: int) -> list[str]:
    """Risks of high ratios on few tokens."""
    return [
        f"{route} keeps {tokens - int(tokens * route.selection_ratio)} of {tokens} tokens: at 256 tokens the paper "
        "lost quality above a ratio of 0.5 (DiT-B/2, FID 21.3 at 0.5, 49.3 at 0.75, 43.5 dense). Use 0.5 or less."
        for route in plan.routes
        if route.selection_ratio > HIGH_RATIO and tokens <= FEW_TOKENS
    ]


def adapter_risks(plan: RoutePlan) -> list[str]:
    """Risks of high ratios while only a LoRA or LoKr is trained."""
    return [
        f"{route} is above a ratio of {ADAPTER_RATIO} while only an adapter is trained: the frozen layers never saw so "
        "few tokens. With loss on all tokens, 0.5 over 2..-2 cost 2.4 % of dense validation loss where preset 'lora' "
        "cost 1.5 % (docs/log.md). Use that preset, or its layers (3..-4) with a lower ratio, and keep the schedule's "
        "cool-down."
        for route in plan.routes
        if route.selection_ratio > ADAPTER_RATIO
    ]


def mask_risks(tokens: int, forced: int) -> list[str]:
    """Risks of force masks that leave few tokens to drop."""
    if forced < LITTLE_GAIN * tokens:
        return []
    return [
        f"a sample forces {forced} of {tokens} tokens, so at most {tokens - forced} can be dropped in its batch and "
        "routing gains little speed. Use smaller masks, or group samples of similar mask size into a batch."
    ]


def warn_once(risks: list[str], said: set[str], *, stacklevel: int = 3) -> None:
    """Warn of each risk that is not in `said` yet; by default at the line of the caller's caller."""
    for risk in risks:
        if risk not in said:
            said.add(risk)
            warnings.warn(risk, RiskWarning, stacklevel=stacklevel)
