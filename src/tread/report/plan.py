"""A plan in words and numbers: which layers see how many tokens, and what that can gain."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from tread.errors import check_int
from tread.pretrain.config import compose_file
from tread.routing.cost import LayerShape, plan_cost
from tread.routing.plan import PRESETS, RoutePlan, read_mapping
from tread.routing.risks import RiskWarning, layer_risks, token_risks
from tread.routing.selection import kept_count


def describe_plan(config: str, *, depth: int, width: int, tokens: int, context: int = 0) -> str:
    """The text of `tread plan`."""
    check_int(tokens, "--tokens", 1)
    plan = _plan(config)
    if plan is None:
        return (
            f"{config} has no tread_config: the run is dense, every layer sees all {tokens} tokens. Name a preset in "
            f"its place to see what routes would gain: {', '.join(PRESETS)}."
        )
    plan = plan.resolve(depth)
    cost = plan_cost(plan, LayerShape(width=width, context=context), tokens=tokens)
    lines = [f"{depth} layers, width {width}, {tokens} tokens" + (f" + {context} of text" if context else "")]
    for route in plan.routes:
        kept = kept_count(tokens, route.selection_ratio)
        lines.append(
            f"  layers {route.start_layer_idx}..{route.end_layer_idx}: {kept} of {tokens} tokens "
            f"(drops {route.selection_ratio:.0%})"
        )
    mib = 2**20
    lines += [
        "                            dense      routed",
        f"GFLOPs forward, a sample {cost.dense_flops / 1e9:8.1f}    {cost.routed_flops / 1e9:8.1f}",
        f"MiB of activations       {cost.dense_bytes / mib:8.1f}    {cost.routed_bytes / mib:8.1f}",
        f"ideal speed-up                       {cost.speedup:8.2f}x",
    ]
    for risk in layer_risks(plan) + token_risks(plan, tokens):
        warnings.warn(risk, RiskWarning, stacklevel=2)
    return "\n".join(lines)


def _plan(config: str) -> RoutePlan | None:
    """Of routes, or of the config of a run, which has them among other things; None where that is dense."""
    mapping = read_mapping(config)
    if "defaults" in mapping and config.endswith(".yaml"):
        mapping = compose_file(Path(config))
    model = mapping.get("model")
    among = {**mapping, **model} if isinstance(model, Mapping) else mapping
    settings = {str(name).removeprefix("--"): value for name, value in among.items()}
    if "tread_config" in settings or "model_family" in settings:  # a fine-tune need not mention it
        found = settings.get("tread_config")
        return None if found is None else RoutePlan.from_config(found)
    return RoutePlan.from_config(mapping)
