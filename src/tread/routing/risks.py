"""Warnings about settings that are legal but risky, each with the reason and what to change."""

import sys
import warnings

from tread.errors import RiskWarning
from tread.routing.budget import kept_count
from tread.routing.plan import PRESETS, RoutePlan

EARLIEST_START = 1
"""The earliest start of a window that did as well as any other in the paper."""
BEST_START = 2
"""The best start in the paper."""
FEW_TOKENS = 256
HIGH_RATIO = 0.5
"""Ratios above it lost quality at `FEW_TOKENS` tokens (the paper)."""
LITTLE_GAIN = 0.75
"""Share of forced tokens from which routing gains little speed."""
FEWEST_LAYERS = 4
"""Layers that a dropped token must pass, before, between and after its windows."""
ADAPTER_RATIO = 0.5
"""The highest ratio of the LoRA runs of docs/results.md."""
_LIBRARIES = ("tread", "torch", "contextlib")
"""Top-level modules whose frames a warning skips."""
_LATEST_END = BEST_START - FEWEST_LAYERS - 1
"""The largest end_layer_idx of a window that starts at `BEST_START` and leaves `FEWEST_LAYERS` layers."""


def layer_risks(plan: RoutePlan) -> list[str]:
    """Risks of the windows of a resolved plan: over the first layer or the last one, or over too many of them."""
    assert plan.depth is not None
    risks = []
    for route in plan.routes:
        if route.start_layer_idx < EARLIEST_START:
            risks.append(
                f"{route} starts before layer {EARLIEST_START}: the first layer builds what the dropped tokens carry "
                "past the window. In the paper (DiT-B/2, 400,000 steps) windows 1..8 and 2..8 lowered FID by 21.7 and "
                f"21.9, window 0..8 by 16.3. Set start_layer_idx to {BEST_START}, or preset 'paper'."
            )
        if route.end_layer_idx == plan.depth - 1:
            risks.append(
                f"{route} includes the last of {plan.depth} layers: dropped tokens then reach the output without a "
                f"dense layer after the window. Set end_layer_idx to {PRESETS['paper'].end_layer_idx} (the paper) or "
                f"at most {_LATEST_END}."
            )
    return risks + _passage_risks(plan, plan.depth)


def _passage_risks(plan: RoutePlan, depth: int) -> list[str]:
    """Risks of windows that together leave a dropped token too few layers.

    A token may be dropped in every window, so their lengths add up.
    """
    left = depth - sum(len(route.layers) for route in plan.routes)
    if left >= FEWEST_LAYERS:
        return []
    routes = " and ".join(str(route) for route in plan.routes)
    advice = "A model this shallow trains better dense."
    if depth > FEWEST_LAYERS:
        window = f"start_layer_idx {BEST_START} and end_layer_idx {_LATEST_END}"
        advice = f"Leave {FEWEST_LAYERS}, for example with {window}."
    return [
        f"{routes}: a dropped token passes {left} of {depth} layers. Trained from scratch, windows that left it three "
        "or two of twelve fell apart, in distance and in loss; those that left four or more did not "
        f"(docs/results.md). {advice}"
    ]


def token_risks(plan: RoutePlan, tokens: int) -> list[str]:
    """Risks of high ratios on few tokens."""
    return [
        f"{route} keeps {kept_count(tokens, route.selection_ratio)} of {tokens} tokens: at {FEW_TOKENS} tokens the "
        f"paper lost quality above a ratio of {HIGH_RATIO} (DiT-B/2, FID 21.3 at 0.5, 49.3 at 0.75, 43.5 dense). Use "
        f"{HIGH_RATIO} or less."
        for route in plan.routes
        if route.selection_ratio > HIGH_RATIO and tokens <= FEW_TOKENS
    ]


def adapter_risks(plan: RoutePlan) -> list[str]:
    """Risks of high ratios while only a LoRA or LoKr is trained."""
    return [
        f"{route} is above a ratio of {ADAPTER_RATIO} while only an adapter is trained: the frozen layers never saw so "
        f"few tokens. At {ADAPTER_RATIO} and with the defaults of tread finetune a LoRA was as good as a dense one "
        "after the same time; no higher ratio was tried (docs/results.md). Lower the ratio, or use preset 'lora'."
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


def warn_once(risks: list[str], said: set[str]) -> None:
    """Warn of each risk that is not in `said` yet, at the line of the user that led to it."""
    for risk in risks:
        if risk not in said:
            said.add(risk)
            warnings.warn(risk, RiskWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The `stacklevel`, for `warn_once`, of the first frame that is neither tread's nor torch's nor contextlib's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level
