"""adaLN's kernels, interpreted on CPUs and as they are on a GPU; what computes where there are none."""

import pytest
import torch

from tests.kernels.adaln_checks import check_block, check_norms, formula, made
from tests.programs import run
from tread.kernels import triton_support
from tread.kernels.adaln import WIDEST, AdaNorm


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 does not wrap interpreted kernels")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run("-m", "tests.kernels.adaln_checks", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_plain_against_the_formula(name: str) -> None:
    norm = AdaNorm(name)  # pyright: ignore[reportArgumentType]
    given = made((2, 5, 48), torch.float64, torch.float64, "cpu")
    for found, gated in ((norm(given["x"], given["shift"], given["scale"]), False), (norm.after(**given), True)):
        torch.testing.assert_close(found, formula(name, **given, gated=gated))  # pyright: ignore[reportArgumentType]
    assert not [*norm.parameters()]
    assert repr(norm) == f"AdaNorm({name})"


def test_kernels_need_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would fail in the first step; plain code computes the same."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TREAD_KERNELS", raising=False)
    for found, expected in (
        ({"triton", "gcc"}, True),
        ({"triton", "clang"}, True),
        ({"triton"}, False),
        ({"gcc"}, False),
    ):
        monkeypatch.setattr(triton_support, "which", lambda name, found=found: name if name in found else None)
        monkeypatch.setattr(triton_support, "find_spec", lambda name, found=found: name if name in found else None)
        assert triton_support._can_be_built() is expected
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(triton_support, "find_spec", lambda name: name)
    assert triton_support._can_be_built() is True
    monkeypatch.setenv("TREAD_KERNELS", "0")
    assert triton_support._can_be_built() is False


def test_kernels_need_a_gpu_that_triton_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(triton_support, "CAN_BE_BUILT", True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert triton_support.run_on(gpu) is expected
        assert triton_support.run_on(torch.device("cpu")) is False
    monkeypatch.setattr(triton_support, "CAN_BE_BUILT", False)
    assert triton_support.run_on(gpu) is False


GPU_SHAPES = [(1, 1, 8), (3, 70, 100), (4, 256, 768), (4, 128, 1152), (2, 33, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_norms_on_a_gpu(compiled: bool) -> None:
    if compiled:
        check_norms("cuda", [(4, 128, 1152)], lambda function: torch.compile(function, dynamic=False))
    else:
        check_norms("cuda", GPU_SHAPES)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_block_on_a_gpu(compiled: bool) -> None:
    check_block(
        "cuda", (lambda function: torch.compile(function, dynamic=False)) if compiled else lambda function: function
    )


@pytest.mark.gpu
def test_what_no_kernel_takes_is_computed_plainly_on_a_gpu() -> None:
    for shape, dtype in (((1, 2, 2 * WIDEST), torch.float32), ((1, 2, 48), torch.float64)):
        given = made(shape, dtype, dtype, "cuda")
        found = AdaNorm("layer").after(**given)
        torch.testing.assert_close(found, formula("layer", **given, gated=True))


@pytest.mark.gpu
def test_the_same_bits_in_every_run() -> None:
    found = []
    for _ in range(2):
        given = made((8, 256, 1152), torch.bfloat16, torch.bfloat16, "cuda")
        out = AdaNorm("layer").after(**given)
        upstream = [torch.ones_like(value) for value in out]
        found.append([*out, *torch.autograd.grad(out, list(given.values()), upstream)])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
