"""The attention kernel, set once for the process.

- Set it before anything is compiled: compiled code keeps the choice.
- `cudnn` replaces `F.scaled_dot_product_attention`, which every model calls, by the operator of `cudnn.py`; inputs that
  it does not support (float32, causal order) go to torch's other kernels.
- `flash`, `efficient` and `math` enable that backend of torch and no other.
- For all of them a boolean mask is made a bias that the compiler does not look into (`masks.py`).
- `default` leaves everything to torch.
- `auto` is `cudnn` on Hopper and newer; elsewhere flash, then the backends that take masks, so every model runs.
- CPUs have a single implementation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from tread.errors import ConfigError
from tread.kernels.attention import cudnn
from tread.kernels.attention.masks import additive

Attention = Literal["auto", "flash", "cudnn", "efficient", "math", "default"]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SAFE = ("flash", "efficient", "math")
"""Torch's backends in its order of preference, without its cuDNN backend (see `tread.kernels.attention.cudnn`)."""
_CUDA = torch.backends.cuda
_SWITCHES = {
    "flash": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "cudnn": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "efficient": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
}
"""Backend of torch -> whether it is enabled, and the function that enables or disables it."""
AMPERE, HOPPER = (8, 0), (9, 0)
_TORCH = F.scaled_dot_product_attention
"""Torch's own function, which `use_attention` may replace."""
_UNAVAILABLE = "No available kernel", "Invalid backend"
"""Torch's errors when no kernel fits: on CPUs and in compiled code, and on GPUs."""


def check_attention(name: Attention, device: torch.device, setting: str = "attention") -> None:
    """Refuse a kernel that `device` does not support; `setting` is its name in the error."""
    if device.type != "cuda":
        if name not in ("auto", "default"):
            raise ConfigError(f"{setting} is {name!r}, a kernel of GPUs, and this run is on {device}: use 'auto'.")
    elif name == "cudnn" and (torch.version.cuda is None or torch.cuda.get_device_capability(device) < AMPERE):
        raise ConfigError(f"{setting} is 'cudnn', which needs an NVIDIA GPU from Ampere on: use 'auto'.")


def resolved(name: Attention, device: torch.device) -> Attention:
    """The name, with `auto` replaced by `cudnn` on a device where it means that."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    if name == "auto" and nvidia and torch.cuda.get_device_capability(device) >= HOPPER:
        return "cudnn"
    return name


def use_attention(name: Attention, device: torch.device) -> None:
    """Enable the kernels of `name` for the process, and no others; on a CPU nothing changes."""
    if device.type != "cuda":
        return
    name = resolved(name, device)
    chosen = {"auto": SAFE, "cudnn": SAFE, "default": tuple(KERNELS)}.get(name, (name,))
    F.scaled_dot_product_attention = {"cudnn": _by_cudnn, "default": _TORCH}.get(name, _by_torch)
    for kernel, (_, enable) in _SWITCHES.items():
        enable(kernel in chosen)


def remember_attention() -> Callable[[], None]:
    """A function that restores the kernels enabled now."""
    function, before = F.scaled_dot_product_attention, [(enable, is_on()) for is_on, enable in _SWITCHES.values()]

    def restore() -> None:
        F.scaled_dot_product_attention = function
        for enable, flag in before:
            enable(flag)

    return restore


def _by_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, by cuDNN if it supports the inputs."""
    if dropout_p == 0 and not is_causal:
        dtype = _autocast_dtype(query)
        q, k, v = (query, key, value) if dtype is None else (x.to(dtype) for x in (query, key, value))
        if enable_gqa and attn_mask is not None:  # torch's kernels for masks repeat keys and values too
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # (B, H, S, D)
        if cudnn.fits(q, k, v, attn_mask):
            return cudnn.attend(q, k, v, attn_mask, scale)
    return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **settings: Any
) -> Tensor:
    """`F.scaled_dot_product_attention`, with a boolean mask made a bias."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and query.is_cuda:
        attn_mask = additive(attn_mask, _autocast_dtype(query) or query.dtype)
    return _TORCH(query, key, value, attn_mask, *others, **settings)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which torch's function casts its inputs under autocast on a GPU; None: it casts nothing."""
    on = x.is_cuda and torch.is_autocast_enabled("cuda")
    return torch.get_autocast_dtype("cuda") if on else None


@contextmanager
def relaxed(name: Attention, device: torch.device) -> Iterator[None]:
    """Inside, models other than the network, such as autoencoders, may use any kernel."""
    use_attention("default" if name == "default" else "auto", device)
    try:
        yield
    finally:
        use_attention(name, device)


@contextmanager
def explained(name: Attention, setting: str = "attention") -> Iterator[None]:
    """Turn torch's error about an unsupported kernel into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _UNAVAILABLE):
            raise
        others = ", ".join(get_args(Attention))
        raise ConfigError(
            f"{setting} is {name!r}, and that kernel cannot compute this model's attention (its masks, head size or "
            f"precision); set {setting} to 'auto', or to another of: {others}."
        ) from error
