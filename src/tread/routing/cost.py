"""The cost of a plan: FLOPs, activation bytes and the upper bound of the speed-up.

The formulas count matrix multiplications as 2 * rows * columns * inner, as `torch.utils.flop_counter` does, for
the layers alone: patch embedding and head are small and the same dense and routed. Backward is twice forward, so ratios
of forward FLOPs are ratios of training FLOPs.
"""

from dataclasses import dataclass

from tread.errors import ConfigError, check_int
from tread.routing.budget import kept_count
from tread.routing.plan import RoutePlan

ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one transformer layer that its cost depends on."""

    width: int
    mlp_hidden: int | None = None
    """Width of the MLP's hidden layer; None: four times `width`."""
    gated_mlp: bool = False
    """Whether the MLP has a third matrix, as SwiGLU has."""
    context: int = 0
    """Tokens, such as text, that join the attention and are never dropped."""

    def __post_init__(self) -> None:
        check_int(self.width, "width", 1)
        check_int(self.context, "context", 0)

    @property
    def hidden(self) -> int:
        """Width of the MLP's hidden layer, the default resolved."""
        return 4 * self.width if self.mlp_hidden is None else self.mlp_hidden

    def flops(self, tokens: int) -> int:
        """Forward FLOPs of one sample: projections, attention scores and values, MLP, adaLN modulation."""
        rows = tokens + self.context
        projections = 8 * rows * self.width**2
        attention = 4 * rows**2 * self.width
        mlp = (6 if self.gated_mlp else 4) * rows * self.width * self.hidden
        modulation = 12 * self.width**2
        return projections + attention + mlp + modulation

    def activation_elements(self, tokens: int) -> int:
        """Elements one sample keeps for backward in eager mode.

        Per row: two norms' inputs and outputs, two modulated streams, q, k, v, attention's output and its
        projection, the mlp's output (12 widths), and the mlp's hidden layer before and after its activation (a
        gated mlp also keeps the gate).
        """
        rows = tokens + self.context
        return rows * (12 * self.width + (4 if self.gated_mlp else 2) * self.hidden)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Forward FLOPs and activation bytes of one sample, dense and routed."""

    dense_flops: int
    routed_flops: int
    dense_bytes: int
    routed_bytes: int

    @property
    def speedup(self) -> float:
        """Ideal steps per second, routed over dense."""
        return self.dense_flops / self.routed_flops


def plan_cost(plan: RoutePlan, shape: LayerShape, *, tokens: int) -> Cost:
    """The cost of a resolved plan on `tokens` tokens.

    >>> paper = RoutePlan.from_config({"preset": "paper"}).resolve(28)
    >>> round(plan_cost(paper, LayerShape(width=1152), tokens=256).speedup, 2)
    1.72
    """
    if plan.depth is None:
        raise ConfigError("the plan has no depth yet: call plan.resolve(depth) first.")
    counts = [tokens] * plan.depth
    for route in plan.routes:
        for layer in route.layers:
            counts[layer] = kept_count(tokens, route.selection_ratio)
    return Cost(
        dense_flops=plan.depth * shape.flops(tokens),
        routed_flops=sum(shape.flops(count) for count in counts),
        dense_bytes=plan.depth * shape.activation_elements(tokens) * ELEMENT_BYTES,
        routed_bytes=sum(shape.activation_elements(count) for count in counts) * ELEMENT_BYTES,
    )
