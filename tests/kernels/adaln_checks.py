"""adaLN's kernels against its formula in float64, forward and backward.

`TRITON_INTERPRET=1 python -m tests.kernels.adaln_checks` runs them in Triton's interpreter: a program of its own,
because Triton decides when it is imported. A GPU's tests call the same functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tread.kernels import triton_support
from tread.kernels.adaln import AdaNorm, NormName
from tread.models import DiT
from tread.models.layers import Block

SHAPES = [(1, 1, 8), (2, 5, 48), (2, 33, 20)]
"""(B, S, D): one row, a row that is no power of two, more rows than a program takes."""
TYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
"""Of the stream, and of the branch, of scale, shift and gate, and of what is normed."""
Compiled = Callable[[Any], Any]


@contextmanager
def with_kernels(on: bool) -> Iterator[None]:
    with patch.object(triton_support, "run_on", lambda device: on):
        yield


def formula(name: NormName, x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, gated: bool):
    """Written out: Ba et al. 2016 (arXiv 1607.06450), Zhang and Sennrich 2019 (arXiv 1910.07467)."""
    stream = x + gate * branch if gated else x
    values = stream - stream.mean(-1, keepdim=True) if name == "layer" else stream
    return stream, values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift


def made(shape: tuple[int, int, int], stream: torch.dtype, others: torch.dtype, device: str) -> dict[str, Tensor]:
    """Inputs whose rows differ much in size and in mean; modulations as a block has them, cut from one tensor."""
    samples, tokens, width = shape
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(*size, device=device, generator=generator)  # noqa: E731
    x = (draw(*shape) + draw(samples, tokens, 1)) * torch.logspace(-1, 2, tokens, device=device)[:, None]
    shift, scale, gate = draw(samples, 1, 3 * width).to(others).chunk(3, dim=-1)
    given = {"x": x.to(stream), "branch": draw(*shape).to(others), "gate": gate, "shift": shift, "scale": scale}
    return {key: value.detach().requires_grad_() for key, value in given.items()}


def check_norms(device: str = "cpu", shapes: Any = SHAPES, compiled: Compiled = lambda function: function) -> None:
    """Values and all gradients, relative to the largest of each row or sample, within the rounding of their type."""
    for name in ("layer", "rms"):
        for shape in shapes:
            for stream, others in TYPES:
                for gated in (False, True):
                    _check_norm(name, made(shape, stream, others, device), gated, compiled)


def _check_norm(name: NormName, given: dict[str, Tensor], gated: bool, compiled: Compiled) -> None:
    norm, dtype, device = AdaNorm(name), given["branch"].dtype, given["x"].device.type

    def run(x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return norm.after(x, branch, gate, shift, scale) if gated else norm(x, shift, scale)

    with with_kernels(True), torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = compiled(run)(**given)
    exact = {key: value.detach().double().requires_grad_() for key, value in given.items()}
    expected = formula(name, **exact, gated=gated)
    assert (found[0].dtype, found[1].dtype) == (given["x"].dtype, dtype)

    upstream = [torch.randn_like(value) for value in found]
    used = list(given) if gated else ["x", "shift", "scale"]
    gradients = torch.autograd.grad(found, [given[key] for key in used], upstream)
    known = torch.autograd.grad(expected, [exact[key] for key in used], [value.double() for value in upstream])
    bound = 1e-5 if dtype == given["x"].dtype == torch.float32 else 2e-2  # the interpreter cuts bf16 off
    pairs = zip(("stream", "normed", *used), (*found, *gradients), (*expected, *known), strict=True)
    for key, value, right in pairs:
        size = right.abs().amax(-1, keepdim=True).clamp(min=1e-3)
        worst = ((value - right).abs() / size).max().item()
        assert worst < bound, (name, tuple(given["x"].shape), given["x"].dtype, dtype, gated, key, worst)


def check_block(device: str = "cpu", compiled: Compiled = lambda function: function) -> None:
    """A block with kernels against the same block without, in float32; plain, checkpointed, and without gradients."""
    torch.manual_seed(0)
    for name in ("layer", "rms"):
        block = Block(48, 4, mlp_ratio=2, qk_norm=False, norm=name, mlp="gelu").to(device)
        x, c = torch.randn(2, 6, 48, device=device), torch.randn(2, 48, device=device)
        with with_kernels(False):
            expected = _gradients(block, block, x, c)
        with with_kernels(True):
            whole = compiled(block)
            again = compiled(partial(checkpoint, block, use_reentrant=False))
            for run in (whole, again):
                for value, right in zip(_gradients(block, run, x, c), expected, strict=True):
                    torch.testing.assert_close(value, right, atol=2e-5, rtol=2e-5)
            with torch.no_grad():
                torch.testing.assert_close(whole(x, c), expected[0], atol=2e-5, rtol=2e-5)


def _gradients(block: nn.Module, run: Callable[..., Tensor], x: Tensor, c: Tensor) -> list[Tensor]:
    given = [x.clone().requires_grad_(), c.clone().requires_grad_(), *block.parameters()]
    out = run(*given[:2])
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def check_routed_model() -> None:
    """A whole DiT, routed, in eager code: the kernels see only what was selected."""
    torch.manual_seed(0)
    model = DiT(input_size=8, patch=2, in_channels=3, depth=6, width=32, heads=4, num_classes=5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    handle = model.route({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 4}]}, seed=0)
    batch = torch.randn(2, 3, 8, 8), torch.rand(2) * 1000, torch.tensor([1, 5])
    found = []
    for on in (False, True):
        handle.set_step(0)
        with with_kernels(on):
            out = model(*batch)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for plain, kernel in zip(*found, strict=True):
        assert (kernel - plain).norm() < 1e-5 * plain.norm()


def check_derivatives() -> None:
    """Under torch.func the plain twin computes; a second derivative is refused, not wrong."""
    given = made((2, 5, 48), torch.float32, torch.float32, "cpu")
    shift, scale, x = given["shift"].detach(), given["scale"].detach(), given["x"].detach()
    found = []
    for on in (False, True):
        with with_kernels(on):
            found.append(torch.func.jvp(lambda x: AdaNorm("layer")(x, shift, scale)[1], (x,), (x + 1,)))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    with with_kernels(True):
        out = AdaNorm("layer").after(**given)[1]
        (slope,) = torch.autograd.grad(out.square().sum(), given["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(slope.square().sum(), given["x"])


if __name__ == "__main__":
    check_norms()
    check_block()
    check_routed_model()
    check_derivatives()
