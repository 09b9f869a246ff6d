"""cuDNN attention as a custom operator that is safe in every model.

- On Hopper it is about twice as fast as torch's flash kernels, forward and backward.
- Torch's own cuDNN backend ended FLUX in an illegal memory access in backward (torch 2.11, eager and compiled). The
  cause is unknown: the same shapes and layouts alone do not reproduce it. Called from here, with gradient and outputs
  in one layout, the same steps run.
- A custom operator is opaque to the compiler, which therefore cannot change the layouts in between.
- A mask is added to the scores as a bias (`masks.py`), made inside the operator: compiled code that recomputes a
  layer would write it out for every head and query.
- `fits` tells which inputs the kernel supports; others go to torch's kernels.
- On CPUs the operator computes in plain torch operations, for tests.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from tread.kernels.attention.masks import bias_of

LARGEST_HEAD = 128
"""Largest head size that the backward kernel supports on every GPU."""


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the kernel supports these shapes and dtypes; the caller rules out dropout and causal order."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and size == key.shape[-1] == value.shape[-1]
        and size % 8 == 0
        and size <= LARGEST_HEAD
        and min(query.shape[2], key.shape[2]) > 1
        and max(query.shape[:2]) < 2**16
        and (mask is None or _fits_mask(query, key, mask))
    )


def _fits_mask(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether the mask needs no gradient and has every key, while samples, heads and queries may share one entry."""
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    sizes = ((1, batch), (1, heads), (1, queries), (keys,))
    return (
        (mask.dtype == torch.bool or mask.is_floating_point())
        and not mask.requires_grad
        and 2 <= mask.ndim <= 4
        and all(size in allowed for size, allowed in zip(mask.shape, sizes[4 - mask.ndim :], strict=True))
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attention: query, key and value (B, H, S, D) -> (B, H, S, D); `fits` tells which masks are supported."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    return attention(query, key, value, mask, scale)[0]


@custom_op("tread::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output of `attend`, and the logsumexp (B, H, S, 1) that backward needs."""
    query, key, value = (_dense_rows(x) for x in (query, key, value))
    bias = None if mask is None else bias_of(mask, query.dtype)
    if not query.is_cuda:
        scores = _scores(query, key, bias, scale)
        out = scores.softmax(-1) @ value.float()
        return _tokens_first(out.to(query.dtype)), scores.logsumexp(-1, keepdim=True)
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, logsumexp, *_ = run(query, key, value, bias, True, 0.0, False, False, scale=scale)
    return _tokens_first(out), logsumexp


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    return _empty(query), query.new_empty(*query.shape[:3], 1, dtype=torch.float32)


@custom_op("tread::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    query, key, value = (_dense_rows(x) for x in (query, key, value))
    bias = None if mask is None else bias_of(mask, query.dtype)
    gradient = _tokens_first(gradient)
    if not query.is_cuda:
        gradients = _plain_backward(gradient, query, key, value, bias, out, logsumexp, scale)
    else:
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # RNG state, which only dropout reads
        run = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        state = (logsumexp, unused, unused, bias, None, None, query.shape[2], key.shape[2], 0.0, False)
        gradients = run(gradient, query, key, value, out, *state, scale=scale)
    to_query, to_key, to_value = (_tokens_first(x) for x in gradients)
    return to_query, to_key, to_value


@attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


attention.register_autograd(_gradients, setup_context=_save)


def _tokens_first(x: Tensor) -> Tensor:
    """x (B, H, S, D) with the memory layout (B, S, H, D); a copy only if the layout differs."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _dense_rows(x: Tensor) -> Tensor:
    """x with stride 1 on its last axis and no expanded axis; a copy only if it has not."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else _tokens_first(x)


def _empty(x: Tensor) -> Tensor:
    batch, heads, tokens, size = x.shape
    return x.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, S, T)
    return scores if bias is None else scores + bias


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None,
) -> list[Tensor]:
    weights = (_scores(query, key, bias, scale) - logsumexp).exp()  # (B, H, S, T)
    to_weights = gradient.float() @ value.float().mT - (gradient.float() * out.float()).sum(-1, keepdim=True)
    to_scores = weights * to_weights * (query.shape[-1] ** -0.5 if scale is None else scale)
    gradients = to_scores @ key.float(), to_scores.mT @ query.float(), weights.mT @ gradient.float()
    return [x.to(query.dtype) for x in gradients]


# torch's FLOP counter does not know custom operators
@register_flop_formula(torch.ops.tread.attention)
def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


@register_flop_formula(torch.ops.tread.attention_backward)
def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)
