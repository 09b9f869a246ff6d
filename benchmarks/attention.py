"""Attention's kernels at the shapes that count, forward and backward, in bf16.

    python -m benchmarks.attention

Tokens lie before heads in memory, as layers hand them over. `operator` is the product's way to cuDNN
(`tread.kernels.attention.cudnn`), the others are torch's own kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.common.record import Facts, Record, options
from benchmarks.common.timing import alternate
from tread.kernels.attention import cudnn
from tread.kernels.attention.kernel import KERNELS

OF_TORCH = ("flash", "cudnn", "efficient")
MASKED = ("cudnn", "efficient")
"""Those that take a mask."""
SHAPES = {
    "FLUX dense": (1, 24, 4608, 128),
    "FLUX routed": (1, 24, 2560, 128),
    "SD3.5-large dense": (1, 38, 4429, 64),
    "DiT-XL/2 dense": (256, 16, 256, 72),
    "DiT-XL/2 routed": (256, 16, 128, 72),
    "DiT-B/2 dense": (256, 12, 256, 64),
    "DiT-B/2 routed": (256, 12, 128, 64),
    "Wan 14B dense": (1, 40, 32760, 128),
    "PixArt dense": (1, 16, 4096, 72),
}
"""(B, H, S, D)"""
WITH_A_MASK = {
    "HunyuanVideo dense, keys masked": (1, 24, 15856, 128),
    "HunyuanVideo routed, keys masked": (1, 24, 8056, 128),
    "PRX dense, keys masked": (1, 28, 4352, 64),
    "Chroma dense, pairs masked": (1, 24, 4608, 128),
}
"""The last 64 tokens are padding; `pairs` has a number for each query and key, `keys` one for each key."""
TINY = {"tiny": (1, 2, 16, 8)}


def by_torch(kernel: SDPBackend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """One of torch's kernels and no other."""
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(query, key, value, mask)


def mask_of(name: str, tokens: int, device: torch.device) -> Tensor | None:
    """A mask with the last 64 tokens blocked, if the name asks for one."""
    if "masked" not in name:
        return None
    used = torch.arange(tokens, device=device) < tokens - 64
    return (used[:, None] & used if "pairs" in name else used)[(None,) * (2 if "pairs" in name else 3)]


def measure(record: Record, name: str, shape: tuple[int, int, int, int]) -> Facts:
    """Every kernel by turns."""
    batch, heads, tokens, size = shape
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    made = [torch.randn(batch, tokens, heads, size, device=record.device, dtype=dtype) for _ in range(4)]
    query, key, value, gradient = (x.transpose(1, 2) for x in made)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    mask = mask_of(name, tokens, record.device)

    def step(attend: Callable[..., Tensor]) -> None:
        torch.autograd.grad(attend(*inputs), inputs, gradient)

    ways: dict[str, Callable[..., Tensor]] = {"operator": partial(cudnn.attend, mask=mask)}
    if record.device.type == "cuda":
        others = OF_TORCH if mask is None else MASKED
        ways |= {other: partial(by_torch, KERNELS[other], mask=mask) for other in others}
    steps = {name: partial(step, way) for name, way in ways.items()}
    for one in (*steps.values(), *steps.values()):
        one()
    times = alternate(steps, record.device, seconds=record.seconds / 6, rounds=3)
    flops = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    found = {
        name: {"ms": time.median_ms, "tflops": round(flops / time.median_ms / 1e9, 1)} for name, time in times.items()
    }
    words = [f"{one['ms']:.3f} ms {name}," for name, one in found.items()]
    return {"shapes": {"bhsd": shape}, "kernels": found, "summary": {"step": " ".join(words)}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all shapes."""
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", help="parts of the names of the shapes to measure; all of them")
    given = parser.parse_args(arguments)
    record = Record("attention", given)
    shapes = TINY | {"tiny, keys masked": (1, 2, 96, 8)} if record.smoke or record.warm else SHAPES | WITH_A_MASK
    for name, shape in shapes.items():
        if any(part in name for part in given.shapes or [name]):
            record.measure(name, partial(measure, record, name, shape), row="attention")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
