"""`TREADRouter`: the low-level class for people who write their own model, compatible with existing model code.

It keeps the names that such code uses, `mask_ratio` and `l1_reg` included; everywhere else the package says
`selection_ratio` and `importance`. Every call of `get_mask` draws a new selection.
"""

from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from tread.errors import ConfigError, check_fraction, check_int
from tread.routing import noise
from tread.routing.budget import kept_count
from tread.routing.ops import gather, restore, untransformed
from tread.routing.plan import DEFAULT_SEED
from tread.routing.selection import check_mask, l1_rank, mixed_score, select
from tread.routing.state import in_backward


@dataclass(frozen=True)
class MaskInfo:
    """One selection in the forms that model code uses; `mask` (B, S) is True for dropped tokens."""

    mask: Tensor
    ids_keep: Tensor
    ids_mask: Tensor
    ids_shuffle: Tensor
    ids_restore: Tensor


class TREADRouter:
    """Draws selections, gathers the kept tokens and restores the full sequence.

    >>> router, x = TREADRouter(seed=0), torch.randn(2, 16, 8)
    >>> info = router.get_mask(x, mask_ratio=0.5)
    >>> router.end_route(router.start_route(x, info), info, original_x=x).equal(x)
    True
    """

    def __init__(self, seed: int = DEFAULT_SEED, device: torch.device | str | None = None) -> None:
        self.seed = check_int(seed, "seed", 0)
        self.device, self.calls = device, noise.counter()
        self.mask_token: float | Tensor = 0.0
        """The value of dropped tokens if `end_route` is given no original: a number, or a tensor (D,)."""

    def get_mask(
        self,
        x: Tensor,
        mask_ratio: SupportsFloat = 0.0,
        l1_reg: SupportsFloat = 0.0,
        inverse: bool = False,
        force_keep: Tensor | None = None,
    ) -> MaskInfo:
        """Select the tokens of x (B, S, D) to keep.

        `mask_ratio` is the fraction dropped; `l1_reg` mixes importance (1) with chance (0), the most important
        tokens being kept, or the least important with `inverse`; `force_keep` (B, S) bool marks tokens that are never
        dropped. Both numbers may be numpy scalars or 0-d tensors.
        """
        if not torch.compiler.is_compiling() and in_backward():
            raise ConfigError(
                "get_mask runs again in backward, where it would drop other tokens than in the forward: call it "
                "outside the checkpointed function, or use tread.Handle (docs/own-model.md)."
            )
        ratio = check_fraction(_number(mask_ratio), "mask_ratio", closed=False)
        importance = check_fraction(_number(l1_reg), "l1_reg")
        batch, tokens = x.shape[:2]
        device = x.device if self.device is None else self.device
        sample = torch.arange(batch, device=device).unsqueeze(1)  # (B, 1)
        token = torch.arange(tokens, device=device)  # (S,)
        score = noise.bits(self.seed, untransformed(self.calls.clone), sample, token)  # (B, S)
        untransformed(self.calls.add_, 1)
        if importance:
            rank = l1_rank(x).to(device)
            score = mixed_score(score, tokens - 1 - rank if inverse else rank, importance)

        forced = None
        if force_keep is not None:
            check_mask(force_keep)
            if force_keep.shape != (batch, tokens):
                shape = tuple(force_keep.shape)
                raise ConfigError(f"force_keep has shape {shape}; x has {batch} samples of {tokens} tokens.")
            force_keep = force_keep.to(device)
            forced = int(force_keep.sum(dim=1).max())
        keep = select(score, kept_count(tokens, ratio, forced), force_keep)  # (B, K)
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=device).scatter(1, keep, False)  # (B, S)
        shuffle = mask.to(torch.uint8).argsort(dim=1, stable=True)  # (B, S): kept first, then dropped
        return MaskInfo(
            mask=mask,
            ids_keep=keep,
            ids_mask=shuffle[:, keep.shape[1] :],
            ids_shuffle=shuffle,
            ids_restore=shuffle.argsort(dim=1),
        )

    def start_route(self, x: Tensor, info: MaskInfo) -> Tensor:
        """The kept tokens of x (B, S, D) -> (B, K, D)."""
        return gather(x, info.ids_keep.to(x.device))

    def end_route(
        self,
        x: Tensor | None = None,
        info: MaskInfo | None = None,
        original_x: Tensor | None = None,
        mask_token: float | Tensor | None = None,
        *,
        routed_x: Tensor | None = None,
    ) -> Tensor:
        """The processed tokens x (B, K, D), also called `routed_x`, written over original_x (B, S, D).

        Without an original, dropped tokens become `mask_token`, by default the router's.
        """
        if (x is None) == (routed_x is None) or info is None:
            raise ConfigError(
                "end_route needs the processed tokens once, as x or as routed_x, and the info that get_mask returned."
            )
        x = routed_x if x is None else x
        assert x is not None
        if original_x is None:
            token = torch.as_tensor(self.mask_token if mask_token is None else mask_token)
            original_x = token.to(x).expand(*info.mask.shape, x.shape[-1])  # (B, S, D)
        return restore(x, info.ids_keep.to(x.device), original_x)


def _number(value: Any) -> Any:
    """A Python number from a numpy scalar or a 0-d tensor (synchronises with its device); other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
