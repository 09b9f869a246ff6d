"""Quantize a frozen base: the linears of a transformer's layers are stored in 8 or 4 bits.

- Only linears of the layers are quantized, which hold nearly all weights; embedders, norms and the final projection
  keep their dtype.
- One linear is quantized at a time, on the device given, and read just before (`weights.py`): peak memory is one
  unquantized linear beside the quantized ones, on the GPU and on the host.
- Quantize before adapters are added: peft chooses its layers by the class of the linears it finds.
- `int8`, `int4` and `fp8` are our own, in plain tensors. The tensor subclasses of torchao and quanto do not compile in
  layers that return views of one tensor (FLUX), and torchao's products keep the unpacked weight for the backward pass,
  which costs the memory that quantizing saved. `int8-bnb` and `nf4` are bitsandbytes.
- Every quantized linear computes in the dtype its weight had, also when autocast passes it float32.
- `fp8` stores float8 and multiplies in the weight's dtype. `fp8-forward` multiplies in float8 in the forward pass and
  unpacks the weight in the backward pass; `fp8-matmul` multiplies in float8 in both. The backward kernel needs the
  weight transposed: it is transposed in each backward pass, because a second copy would take the memory of bfloat16.
  There is one scale per row of the stored weight, which is the reduced axis of the backward product, so the scales are
  multiplied into the gradient before it is rounded.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tread.attach.registry import family_of
from tread.errors import ConfigError, check_choice, needs
from tread.finetune.model.weights import Weights
from tread.kernels import float8
from tread.training.memory import give_back

GROUP = 64
"""Weights per group with one scale and minimum, in int4."""
FLOAT8 = float8.FORWARD


def quantize(
    model: nn.Module,
    precision: str,
    device: torch.device | str,
    weights: Weights | None = None,
    *,
    store: torch.device | None = None,
) -> None:
    """Freeze the model and quantize the linears of its layers.

    Their weights are on `device` afterwards, or on `store`, except for the scales of bitsandbytes. A model on the meta
    device is filled from `weights`, each linear just before it is quantized; its other modules are filled on the CPU.
    `check_precision` checks beforehand whether the quantized model can run on a device.
    """
    method = METHODS[check_choice(precision, "base_model_precision", METHODS)]
    device = torch.device(device)
    model.requires_grad_(False)
    linears = layer_linears(model)
    for name in list(linears):
        if weights is not None:
            give_back()  # freed temporaries between the packed tensors would fragment memory
            weights.fill(linears[name], name)
        # popped, so that a replaced linear is freed
        made = method.apply(linears.pop(name).to(device)).requires_grad_(False)
        for tensor in (*made.parameters(), *made.buffers()) if store is not None else ():
            tensor.data = tensor.data.to(store)
        model.set_submodule(name, made)
    if weights is not None:
        weights.fill(model)
        give_back()
    if method.flag is not None:
        setattr(model, method.flag, True)


def layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of the model's layers, by name."""
    stacks = tuple(f"{stack.name}." for stack in family_of(model).stacks)
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name.startswith(stacks)}


class FrozenLinear(nn.Linear):
    """A linear with a quantized weight, unpacked in forward and again in backward, never saved unpacked."""

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    unpacks: ClassVar[bool] = True

    def __init__(self, linear: nn.Linear, precision: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.precision = linear.in_features, linear.out_features, precision
        self.dtype, self.bias = linear.weight.dtype, linear.bias
        for name, tensor in zip(("codes", "scale", "low"), PACK[precision](linear.weight.detach()), strict=True):
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unpacked weight, (N, K); NaN inside `not_unpacked`."""
        if not self.unpacks:
            return self.scale.new_full((), math.nan, dtype=self.dtype).expand(self.out_features, self.in_features)
        return unpack(self.precision, self.dtype, self.codes, self.scale, self.low)

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(self.dtype)
        return _Product.apply(x, self.bias, self.precision, self.codes, self.scale, self.low)  # pyright: ignore[reportReturnType]


@contextmanager
def not_unpacked() -> Iterator[None]:
    """Inside this context `FrozenLinear.weight` is NaN with the right shape, dtype and device.

    Peft reads the weight's metadata some twenty times per linear when it adds an adapter: unpacking all of FLUX as
    often would take minutes on a CPU.
    """
    FrozenLinear.unpacks = False
    try:
        yield
    finally:
        FrozenLinear.unpacks = True


class _Product(torch.autograd.Function):
    """x @ weight.T + bias; only x gets a gradient, and only the packed weight is saved for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, precision: str, *stored: Tensor | None) -> Tensor:
        ctx.precision = precision
        ctx.save_for_backward(*stored)
        codes, scale, _ = stored
        if precision in ("fp8-forward", "fp8-matmul") and _fits_float8(codes):
            return _float8_product(x, codes, scale, bias)
        return F.linear(x, unpack(precision, x.dtype, *stored), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        stored = ctx.saved_tensors  # read once: under checkpointing, torch allows a single access
        codes, scale, low = stored
        if ctx.precision == "fp8-matmul" and _fits_float8(codes):
            return _float8_gradient(gradient, codes, scale), None, None, None, None, None
        # not the forward's expression: common-subexpression elimination would save the unpacked weight
        weight = unpack(ctx.precision, gradient.dtype, codes.unsqueeze(0), scale, low).view(len(codes), -1)  # (N, K)
        return gradient @ weight, None, None, None, None, None


def _pack_int8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """Signed 8-bit codes with one scale per row."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # (N, 1)
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale, None


def _pack_float8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """Float8 codes with one scale per row, stored as bytes: `.to(dtype)` would convert a float8 buffer."""
    codes, scale = float8.to_float8(weight, FLOAT8, 1)  # (N, K), (N, 1)
    return codes.view(torch.uint8), scale, None


def _pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit codes: 16 levels between the minimum and maximum of each group, two weights in a byte."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, math.gcd(columns, GROUP))  # (N, K / G, G)
    least, most = groups.aminmax(dim=2, keepdim=True)
    # rounded to the stored dtype first, so that codes are chosen for the levels that `unpack` gives
    scale, low = ((most - least).clamp(min=1e-12) / 15).to(weight.dtype), least.to(weight.dtype)
    codes = (groups - low.float()).div_(scale.float()).round_().clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scale, low  # (N, K / 2)


PACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "int8": _pack_int8,
    "int4": _pack_int4,
    "fp8": _pack_float8,
    "fp8-forward": _pack_float8,
    "fp8-matmul": _pack_float8,
}
"""Precision -> the function from a weight (N, K) to its codes, scales and, for int4, the minimum of each group."""


def unpack(
    precision: str, dtype: torch.dtype, codes: Tensor | None, scale: Tensor | None, low: Tensor | None
) -> Tensor:
    """The weight (N, K): the inverse of `PACK[precision]`, up to rounding."""
    assert codes is not None
    assert scale is not None
    if precision.startswith("fp8"):
        codes = codes.view(FLOAT8)
    if low is None:
        return codes.to(dtype).mul_(scale)  # in place: the product is computed in float32 and rounded once
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)  # (N, K / 2, 2)
    weight = pairs.view(*scale.shape[:2], -1).to(dtype).mul_(scale).add_(low)  # (N, K / G, G)
    return weight.flatten(1)


def _fits_float8(codes: Tensor | None) -> bool:
    """Whether both sides are multiples that the float8 kernel supports; those of released models are."""
    return codes is not None and all(side % float8.MULTIPLE == 0 for side in codes.shape)


def _float8_product(x: Tensor, codes: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with both operands in float8, one scale per row of each."""
    assert codes is not None
    assert scale is not None
    packed, spread = float8.round_rows(x.flatten(0, -2))  # (M, K), (M, 1)
    product = float8.product(packed, codes.view(FLOAT8), spread, scale, bias)  # (M, N)
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def _float8_gradient(gradient: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """gradient @ weight with both operands in float8; the weight's scales are multiplied into the gradient first."""
    packed, spread = float8.round_rows(gradient.flatten(0, -2), scale.flatten())  # (M, N), (M, 1)
    back = float8.transpose_bytes(codes).view(FLOAT8)  # (K, N)
    product = float8.product(packed, back, spread, scale.new_ones(codes.shape[1], 1))  # (M, K)
    return product.to(gradient.dtype).view(*gradient.shape[:-1], -1)


def _bitsandbytes_nf4(linear: nn.Linear) -> nn.Module:
    bnb: Any = importlib.import_module("bitsandbytes.nn")
    weight, sides = linear.weight.data, (linear.in_features, linear.out_features)
    new = bnb.Linear4bit(*sides, linear.bias is not None, weight.dtype, quant_type="nf4", device="meta")
    return _filled(new, linear, bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", module=new))


def _bitsandbytes_int8(linear: nn.Linear) -> nn.Module:
    bnb: Any = importlib.import_module("bitsandbytes.nn")
    weight, sides = linear.weight.data, (linear.in_features, linear.out_features)
    new = bnb.Linear8bitLt(*sides, linear.bias is not None, has_fp16_weights=False, device="meta")
    # bitsandbytes quantizes int8 weights only if they come from the CPU
    return _filled(new, linear, bnb.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False))


def _filled(new: Any, linear: nn.Linear, weight: Any) -> nn.Module:
    new.weight, new.bias = weight.to(linear.weight.device), linear.bias
    new.register_forward_pre_hook(_Cast(linear.weight.dtype))
    return new


class _Cast:
    """A forward pre-hook that casts the input to the dtype the weight had."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        return (x.to(self.dtype), *others)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One precision: the function that replaces a linear, and what it requires."""

    apply: Callable[[nn.Linear], nn.Module]
    """Makes the quantized linear that replaces a linear."""
    package: str | None = None
    """The library that implements it; None: this module."""
    float8_compute: bool = False
    """Whether it multiplies in float8, which needs a GPU of compute capability 8.9 or above."""
    flag: str | None = None
    """The attribute of a model by which peft recognises a base quantized with bitsandbytes."""


def check_precision(precision: str, device: torch.device) -> None:
    """Raise an error if the precision needs a package that is missing, or a GPU other than `device`."""
    method = METHODS[check_choice(precision, "base_model_precision", METHODS)]
    if method.package is not None:
        with needs(f"base_model_precision {precision!r} needs {method.package}", "quant"):
            importlib.import_module(method.package)
    if method.float8_compute and not float8.supported(device):
        raise ConfigError(
            f"base_model_precision is {precision!r}, which multiplies in float8 and needs a GPU of compute capability "
            f"8.9 or above (Ada, Hopper); this run is on {device}. Set it to 'fp8', which stores float8 and multiplies "
            "in bfloat16, or to 'int8'."
        )


METHODS: dict[str, Method] = {
    "int8": Method(apply=partial(FrozenLinear, precision="int8")),
    "int4": Method(apply=partial(FrozenLinear, precision="int4")),
    "fp8": Method(apply=partial(FrozenLinear, precision="fp8")),
    "fp8-forward": Method(apply=partial(FrozenLinear, precision="fp8-forward"), float8_compute=True),
    "fp8-matmul": Method(apply=partial(FrozenLinear, precision="fp8-matmul"), float8_compute=True),
    "int8-bnb": Method(apply=_bitsandbytes_int8, package="bitsandbytes", flag="is_loaded_in_8bit"),
    "nf4": Method(apply=_bitsandbytes_nf4, package="bitsandbytes", flag="is_loaded_in_4bit"),
}
"""`base_model_precision` -> its method; the values that store the base unquantized are in settings.UNQUANTIZED."""
