"""adaLN: a norm whose scale and shift come from the condition, fused with the gated residual add before it.

- Norms carry no weights of their own: scale and shift are their affine part.
- On GPUs both run as Triton kernels (`tread.kernels.adaln_triton`), because Inductor's reductions read rows of more
  than 1,024 elements twice. The plain version in torch operations serves CPUs, float64 and torch.func transforms. The
  kernels have no vmap rules and no second derivatives.
- Under autocast the result has the autocast dtype, which linears expect; reductions are in float32 at least.
- A norm returns its input too, so that one backward kernel adds both gradients of the stream.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tread.kernels import triton_support

NormName = Literal["layer", "rms"]

EPS = 1e-6
WIDEST = 4096
"""Largest row, in elements, that one kernel program holds."""


class AdaNorm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, then scale and shift."""

    def __init__(self, name: NormName) -> None:
        super().__init__()
        self.name = name

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, S, D) unchanged, and x normed, scaled and shifted by (B, 1, D) each."""
        if _fits(x):
            return _Norm.apply(x, None, None, shift, scale, self.name, _out_dtype(x))  # pyright: ignore[reportReturnType]
        return x, self._plain(x, shift, scale)

    def after(self, x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """x + gate * branch, and that sum normed, scaled and shifted."""
        if _fits(x):
            return _Norm.apply(x, branch, gate, shift, scale, self.name, _out_dtype(x))  # pyright: ignore[reportReturnType]
        x = x + gate * branch
        return x, self._plain(x, shift, scale)

    def _plain(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        norm = {"layer": F.layer_norm, "rms": F.rms_norm}[self.name]
        return norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def _fits(x: Tensor) -> bool:
    """Whether the Triton kernels support x here."""
    transformed = torch._C._are_functorch_transforms_active()
    return triton_support.run_on(x.device) and x.dtype != torch.float64 and x.shape[-1] <= WIDEST and not transformed


def _out_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a normed x: autocast's, or that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _Norm(torch.autograd.Function):
    """AdaNorm by Triton kernels: the stream, and the stream normed and modulated."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        name: NormName,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        from tread.kernels.adaln_triton import ada_norm  # imports Triton, which only GPUs need

        ctx.centred, ctx.dtype = name == "layer", x.dtype
        stream, out, mean, rstd = ada_norm(x, branch, gate, shift, scale, EPS, ctx.centred, dtype)
        stream = x if branch is None else stream
        ctx.save_for_backward(stream, branch, gate, scale, mean, rstd)
        return stream.view_as(stream), out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from tread.kernels.adaln_triton import ada_norm_backward

        to_stream, to_out = gradients
        stream, branch, gate, scale, mean, rstd = ctx.saved_tensors
        to_x, to_branch, sums = ada_norm_backward(
            to_stream, to_out, stream, branch, gate, scale, mean, rstd, ctx.centred, ctx.dtype
        )
        to_shift, to_scale, to_gate = sums.to(scale.dtype).split(1, dim=1)  # (B, 1, D) each
        if branch is None:
            return to_x, None, None, to_shift, to_scale, None, None
        return to_x, to_branch, to_gate, to_shift, to_scale, None, None
