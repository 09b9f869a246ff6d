"""Plans, and a forward of layers that change nothing: what the tests of handles share."""

import torch

from tread import Handle, RoutePlan

X = torch.randn(4, 64, 8)
PLAN = RoutePlan.from_config({"preset": "paper", "seed": 1})
TWO = RoutePlan.from_config(
    {
        "routes": [
            {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 4},
            {"selection_ratio": 0.25, "start_layer_idx": 5, "end_layer_idx": 6},
        ]
    }
)


def run(handle: Handle, x: torch.Tensor = X, depth: int = 12) -> list[torch.Tensor]:
    """A forward of identity layers; returns its selections."""
    state = handle.begin(training=True)
    for layer in range(depth):
        x = state.exit(layer, state.enter(layer, x))
    assert x.shape == X.shape or x.shape[1] == 64
    return handle.selections
