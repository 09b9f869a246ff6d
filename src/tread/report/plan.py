"""A plan in words and numbers: which layers see how many tokens, and what that can gain."""

import warnings
from collections.abc import Mapping

from tread.routing.cost import LayerShape, plan_cost
from tread.routing.errors import check_int
from tread.routing.plan import RoutePlan, read_mapping
from tread.routing.risks import RiskWarning, layer_risks, token_risks
from tread.routing.selection import kept_count


def describe_plan(config: str, *, depth: int, width: int, tokens: int, context: int = 0) -> str:
    """The text of `tread plan`."""
    check_int(tokens, "--tokens", 1)
    plan = _plan(config).resolve(depth)
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


def _plan(config: str) -> RoutePlan:
    """Of routes, or of the config of a run, which has them among other things."""
    mapping = read_mapping(config)
    for section in (mapping, mapping.get("model")):
        if isinstance(section, Mapping):
            for name in ("tread_config", "--tread_config"):
                if name in section:
                    return RoutePlan.from_config(section[name])
    return RoutePlan.from_config(mapping)
