"""The arms that the paper ran: DiT-B/2 on ImageNet, 256 tokens, 400,000 steps, FID (arXiv 2501.04765).

Its tables give the FID of four ratios over 2..8 and the change of FID by nine windows at 0.5. Those are long runs, at
equal steps: faster arms, which would have made more of them in the same time, are not credited for it. Their speed is
computed from FLOPs.
"""

from tread.routing.cost import LayerShape, plan_cost
from tread.routing.plan import RoutePlan
from tread.routing.route import Route

from .arm import Arm

FIGURE = "FID after 400,000 steps (arXiv 2501.04765)"
DEPTH, TOKENS, WIDTH = 12, 256, 768
DENSE = 43.47
BY_RATIO = {0.25: 26.50, 0.5: 21.34, 0.75: 49.29}
"""FID by ratio, over 2..8."""
BY_WINDOW = {
    (0, 4): 7.2, (0, 8): -16.3, (0, 10): 7.5, (1, 8): -21.7, (3, 8): -16.3, (4, 8): -14.2, (5, 8): -4.8, (6, 8): 0.8,
}  # fmt: skip
"""Change of FID by window, at 0.5; 2..8 is among the ratios."""


def paper_arms() -> list[Arm]:
    """Twelve arms, dense among them."""
    arms = [Arm(name="dense", routes=(), depth=DEPTH, distance=DENSE, speed=1.0, seeds=1)]
    arms += [_arm(ratio, (2, 8), fid) for ratio, fid in BY_RATIO.items()]
    return arms + [_arm(0.5, window, round(DENSE + change, 2)) for window, change in BY_WINDOW.items()]


def _arm(ratio: float, window: tuple[int, int], fid: float) -> Arm:
    start, end = window
    route = Route(selection_ratio=ratio, start_layer_idx=start, end_layer_idx=end)
    cost = plan_cost(RoutePlan(routes=(route,)).resolve(DEPTH), LayerShape(width=WIDTH), tokens=TOKENS)
    name = f"{ratio:g}@{start}..{end}"
    return Arm(name=name, routes=(route,), depth=DEPTH, distance=fid, speed=cost.speedup, seeds=1)
