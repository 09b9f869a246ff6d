"""Muon for matrices and AdamW for the rest, as one optimizer.

- Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) steps along the momentum's nearest orthogonal matrix.
  Torch's own computes it; biases, norms, convolutions and embedding tables, for which it is not meant, get AdamW.
- A step is scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so one learning rate and one
  weight decay serve both parts, and values tuned for AdamW carry over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def embedding_tables(model: nn.Module) -> list[Tensor]:
    """The weights of a model's embeddings: matrices whose rows are looked up, not multiplied."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


class MuonWithAdamW(Optimizer):
    """Torch's Muon over the matrices in `params` that are not `embeddings`, torch's AdamW over the others.

    `betas` and `eps` are AdamW's; Muon has torch's default momentum of 0.95.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float,
        embeddings: Sequence[Tensor] = (),
    ) -> None:
        tables = {id(table) for table in embeddings}
        matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
        others = [p for p in params if p.ndim != 2 or id(p) in tables]
        self._parts: list[Optimizer] = []  # an optimizer over nothing is an error
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if others:
            fused = all(parameter.is_cuda for parameter in others)
            self._parts.append(
                torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps, fused=fused)
            )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state  # loading a state replaces both here
            part.step()
