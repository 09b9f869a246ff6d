"""A quantized base: the linears of a frozen transformer's layers in 8 or 4 bits.

- The linears of the layers, which hold nearly all weights; embedders, norms and the final projection stay as they are.
- One linear at a time, on the device that is asked for: the peak is the model as it was loaded on the CPU (24 GB for
  12 billion weights in bfloat16), and on the GPU one linear beside the quantized ones.
- Before adapters are added: peft looks at the linears and chooses its layers by them.
- Names are those that users know, each ending in the library it stands for, and one of our own. What torchao and
  quanto do is done here, in plain tensors: their tensor subclasses do not compile in layers that return views of one
  tensor (FLUX), and torchao's products keep the unpacked weights for the backward pass, which costs what quantizing
  saved.
- Every quantized linear computes in the precision its weights had, also where autocast hands it float32.
- `fp8-torchao` multiplies in float8 going forward; going back, weights are unpacked as in the others. `fp8-both-ways`
  multiplies in float8 going back too. The kernel then wants the weight turned: that is done in each backward pass,
  because a second copy would take the memory of bfloat16. Scales belong to rows of the weight as it is stored, which
  going back is the summed axis, so they are multiplied into the gradient before it is rounded.
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
from tread.errors import ConfigError, check_choice
from tread.kernels import float8

GROUP = 64
"""Neighbouring weights that share a scale in 4 bits."""
FLOAT8 = float8.FORWARD


def quantize(model: nn.Module, precision: str, device: torch.device | str) -> None:
    """Freeze the model and quantize its layers by `METHODS[precision]`; their weights are on `device` afterwards.

    `check_precision` says beforehand whether the model could then compute.
    """
    method = METHODS[check_choice(precision, "base_model_precision", METHODS)]
    device = torch.device(device)
    model.requires_grad_(False)
    linears = layer_linears(model)
    for name in list(linears):  # popped: nothing may hold a linear that has been replaced
        model.set_submodule(name, method.apply(linears.pop(name).to(device)).requires_grad_(False))
    if method.flag is not None:
        setattr(model, method.flag, True)


def layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of the model's layers, by name."""
    stacks = tuple(f"{stack.name}." for stack in family_of(model).stacks)
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name.startswith(stacks)}


def footprint(model: nn.Module) -> int:
    """The bytes of the weights and buffers, as they are stored."""
    return sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _bytes(tensor: Any) -> int:
    scales = (getattr(getattr(tensor, "quant_state", None), "absmax", None), getattr(tensor, "SCB", None))
    return tensor.nbytes + sum(scale.nbytes for scale in scales if scale is not None)  # bitsandbytes keeps them beside


class FrozenLinear(nn.Linear):
    """A linear that stores its weight in few bits, and unpacks it forward and backward instead of keeping it."""

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    unpacks: ClassVar[bool] = True

    def __init__(self, linear: nn.Linear, form: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = linear.in_features, linear.out_features, form
        self.dtype, self.bias = linear.weight.dtype, linear.bias
        codes, scale, low = PACK[form](linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("low", low)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight, unpacked: (N, K)."""
        if not self.unpacks:
            return self.scale.new_full((), math.nan, dtype=self.dtype).expand(self.out_features, self.in_features)
        return unpack(self.form, self.dtype, self.codes, self.scale, self.low)

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(self.dtype)
        return _Product.apply(x, self.bias, self.form, self.codes, self.scale, self.low)  # pyright: ignore[reportReturnType]


@contextmanager
def not_unpacked() -> Iterator[None]:
    """Inside, the weights of frozen linears have a shape, a precision and a device but no numbers.

    It is what peft looks at when it puts an adapter on a linear, some twenty times: unpacking all of FLUX as often
    would take minutes on a CPU.
    """
    FrozenLinear.unpacks = False
    try:
        yield
    finally:
        FrozenLinear.unpacks = True


class _Product(torch.autograd.Function):
    """x @ weight.T + bias; only x gets a gradient, and only the stored weight is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, form: str, *stored: Tensor | None) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*stored)
        codes, scale, _ = stored
        if form in FLOAT8_PRODUCTS and _fits_float8(codes):
            return _float8_product(x, codes, scale, bias)
        return F.linear(x, unpack(form, x.dtype, *stored), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        stored = ctx.saved_tensors  # once: torch's checkpointing hands them out a single time
        codes, scale, low = stored
        if ctx.form == "float8-both-ways" and _fits_float8(codes):
            return _float8_gradient(gradient, codes, scale), None, None, None, None, None
        # written differently from the forward's: what the compiler sees to be the same, it computes once and keeps
        weight = unpack(ctx.form, gradient.dtype, codes.unsqueeze(0), scale, low).view(len(codes), -1)  # (N, K)
        return gradient @ weight, None, None, None, None, None


def _pack_int8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """One scale per row."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # (N, 1)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale, None


def _pack_float8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """One scale per row; kept as bytes, because float8 is a float that `.to(dtype)` would convert."""
    codes, scale = float8.to_float8(weight, FLOAT8, 1)  # (N, K), (N, 1)
    return codes.view(torch.uint8), scale, None


def _pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """16 levels from the lowest to the highest of each group, two weights in a byte."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, math.gcd(columns, GROUP))  # (N, K / G, G)
    least, most = groups.aminmax(dim=2, keepdim=True)
    # as they are stored, so that the levels chosen are the levels unpacked
    scale, low = ((most - least).clamp(min=1e-12) / 15).to(weight.dtype), least.to(weight.dtype)
    codes = ((groups - low.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8).view(rows, columns)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scale, low  # (N, K / 2)


PACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "int8": _pack_int8,
    "int4": _pack_int4,
    "float8": _pack_float8,
    "float8-compute": _pack_float8,
    "float8-both-ways": _pack_float8,
}
FLOAT8_PRODUCTS = ("float8-compute", "float8-both-ways")


def unpack(form: str, dtype: torch.dtype, codes: Tensor | None, scale: Tensor | None, low: Tensor | None) -> Tensor:
    """The weight (N, K) that was packed."""
    assert codes is not None
    assert scale is not None
    if form.startswith("float8"):
        codes = codes.view(FLOAT8)
    if low is None:
        return codes.to(dtype).mul_(scale)  # in place: computed in float32, rounded once, stored in dtype
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)  # (N, K / 2, 2)
    weight = pairs.view(*scale.shape[:2], -1).to(dtype).mul_(scale).add_(low)  # (N, K / G, G)
    return weight.flatten(1)


def _fits_float8(codes: Tensor | None) -> bool:
    """Real models have no other sides."""
    return codes is not None and all(side % float8.MULTIPLE == 0 for side in codes.shape)


def _float8_product(x: Tensor, codes: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, both sides in float8, one scale per row of each."""
    assert codes is not None
    assert scale is not None
    packed, spread = float8.round_rows(x.flatten(0, -2))  # (M, K), (M, 1)
    product = float8.product(packed, codes.view(FLOAT8), spread, scale, bias)  # (M, N)
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def _float8_gradient(gradient: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """gradient @ weight, both sides in float8, one scale per row of the gradient times the weight's scales."""
    packed, spread = float8.round_rows(gradient.flatten(0, -2), scale.flatten())  # (M, N), (M, 1)
    back = float8.turn_bytes(codes).view(FLOAT8)  # (K, N)
    product = float8.product(packed, back, spread, scale.new_ones(codes.shape[1], 1))  # (M, K)
    return product.to(gradient.dtype).view(*gradient.shape[:-1], -1)


def _bitsandbytes_nf4(linear: nn.Linear) -> nn.Module:
    bnb: Any = importlib.import_module("bitsandbytes.nn")
    weight, device = linear.weight.data, linear.weight.device
    new = bnb.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, weight.dtype, quant_type="nf4", device="meta"
    )
    new.weight = bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", module=new).to(device)
    new.bias = linear.bias
    new.register_forward_pre_hook(_Cast(weight.dtype))
    return new


def _bitsandbytes_int8(linear: nn.Linear) -> nn.Module:
    bnb: Any = importlib.import_module("bitsandbytes.nn")
    weight, device = linear.weight.data, linear.weight.device
    new = bnb.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, device="meta"
    )
    # the library quantizes what comes from the CPU and nothing else
    new.weight = bnb.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
    new.bias = linear.bias
    new.register_forward_pre_hook(_Cast(weight.dtype))
    return new


class _Cast:
    """A forward pre-hook: the input in the precision of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        return (x.to(self.dtype), *others)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to quantize: what it needs, and how one linear becomes another."""

    apply: Callable[[nn.Linear], nn.Module]
    package: str | None = None
    float8_compute: bool = False
    """It multiplies in float8, which takes a GPU of compute capability 8.9 or above."""
    flag: str | None = None
    """What peft looks for on the model to choose its own layers for bitsandbytes'."""


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse what cannot be had here; `device` is where the model will compute."""
    method = METHODS[check_choice(precision, "base_model_precision", METHODS)]
    if method.package is not None:
        try:
            importlib.import_module(method.package)
        except ImportError as error:
            raise ImportError(
                f"base_model_precision {precision!r} needs {method.package}: pip install 'tread-diffusion[quant]'"
            ) from error
    if method.float8_compute and not float8.supported(device):
        raise ConfigError(
            f"base_model_precision is {precision!r}, which computes in float8 and needs a GPU of compute capability "
            f"8.9 or above (Ada, Hopper); this run is on {device}. Use 'fp8wo-torchao', which stores float8 and "
            "computes as before, or 'int8-torchao'."
        )


_INT8, _INT4, _FLOAT8 = (Method(apply=partial(FrozenLinear, form=form)) for form in ("int8", "int4", "float8"))
METHODS: dict[str, Method] = {
    "int8-torchao": _INT8,
    "int8-quanto": _INT8,
    "int8-bnb": Method(apply=_bitsandbytes_int8, package="bitsandbytes", flag="is_loaded_in_8bit"),
    "int4-torchao": _INT4,
    "int4-quanto": _INT4,
    "nf4-bnb": Method(apply=_bitsandbytes_nf4, package="bitsandbytes", flag="is_loaded_in_4bit"),
    "fp8-torchao": Method(apply=partial(FrozenLinear, form="float8-compute"), float8_compute=True),
    "fp8-both-ways": Method(apply=partial(FrozenLinear, form="float8-both-ways"), float8_compute=True),
    "fp8wo-torchao": _FLOAT8,
    "fp8-quanto": _FLOAT8,
}
"""By `base_model_precision`."""
