"""Mixtures of experts at fixed shapes, so that their layers are compiled whole and captured in CUDA graphs.

- Stock code gathers the tokens of each expert. Their number is known on the device alone, so the host waits for it in
  every layer and nothing can be captured; before torch 2.13 layers are compiled in pieces, too.
- Here every expert computes every token, and those that the router did not choose have weight zero. Outputs and
  gradients are the same up to the order of a sum. The price is the products of all experts instead of the chosen ones.
- This applies in training mode only; in eval mode the stock code runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tread.around import Around


class AllExperts(Around):
    """The wrapper of one mixture of experts."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture, self._compute = mixture, MIXTURES[type(mixture).__name__]

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Around.call`."""
        return self._compute(module, *args, **kwargs) if module.training else forward(*args, **kwargs)


def compute_all_experts(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Wrap the mixtures of experts in `layers`; returns a function that unwraps them.

    A mixture that is set to run its eval code in training too (`_force_inference_output`) is left alone.
    """
    mixtures = (one for layer in layers for one in layer.modules() if type(one).__name__ in MIXTURES)
    wrappers = [AllExperts(one) for one in mixtures if not getattr(one, "_force_inference_output", False)]
    for wrapper in wrappers:
        wrapper.put_on(wrapper.mixture)

    def remove() -> None:
        for wrapper in wrappers:
            wrapper.take_off(wrapper.mixture)

    return remove


def _hidream(mixture: Any, x: Tensor) -> Tensor:
    """diffusers' `MOEFeedForwardSwiGLU` as it trains, (B, S, D)."""
    chosen, weights, _ = mixture.gate(x)  # (B * S, K) each
    scores = weights.new_zeros(weights.shape[0], len(mixture.experts)).scatter(1, chosen, weights)  # (B * S, E)
    tokens = x.reshape(-1, x.shape[-1])  # (B * S, D)
    outputs = torch.stack([expert(tokens).to(x.dtype) for expert in mixture.experts], dim=1)  # (B * S, E, D)
    mixed = (outputs * scores.unsqueeze(2)).sum(1).view_as(x).to(x.dtype)
    return mixed + mixture.shared_experts(x)


MIXTURES: dict[str, Callable[..., Tensor]] = {"MOEFeedForwardSwiGLU": _hidream}
"""Name of a stock class -> the function that computes all of its experts."""
