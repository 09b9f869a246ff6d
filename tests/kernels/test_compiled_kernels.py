"""Our kernels, compiled for GPUs that are not here: Triton needs a GPU to run them, and none to compile them."""

import itertools
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = [80, 89, 90, 100]
"""A100, Ada, Hopper, Blackwell."""
SMALLEST = 99 * 1024
"""Bytes of shared memory that a program may have, on the one that has least."""
POINTERS = {"bf16": "*bf16", "float32": "*fp32"}
SIZES = {"bf16": 2, "float32": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shared(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, warps: int) -> int:
    """Compile to machine code -> the bytes of shared memory that a program needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    at = kernel.arg_names.index
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(at(name),): value for name, value in constants.items()},
        attrs={(at(name),): [["tt.divisibility", 16]] for name in types},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).metadata.shared


WIDEST = [(capability, 4096, dtype, True) for capability in CAPABILITIES for dtype in POINTERS]
ON_HOPPER = [(90, *rest) for rest in itertools.product([768, 1152], POINTERS, [False, True])]


@pytest.mark.parametrize(("capability", "width", "dtype", "gated"), WIDEST + ON_HOPPER)
def test_adaln(capability: int, width: int, dtype: str, gated: bool) -> None:
    from tread.kernels import adaln_triton

    length = 1 << (width - 1).bit_length()
    pointers = dict.fromkeys(
        ["x", "branch", "gate", "shift", "scale", "added", "out", "to_added", "to_out", "to_x", "to_branch"],
        POINTERS[dtype],
    ) | dict.fromkeys(["mean", "rstd", "sums"], "*fp32")
    types = pointers | dict.fromkeys(["tokens", "width", "gate_stride", "shift_stride", "scale_stride"], "i32")
    constants = {
        "EPS": 1e-6,
        "ROWS": adaln_triton.ROWS,
        "LENGTH": length,
        "STAGES": adaln_triton.stages(length, 4 * SIZES[dtype]),
        "CENTRED": True,
        "GATED": gated,
    }
    for kernel in (adaln_triton._norm_row, adaln_triton._back_rows):
        its_types, its_constants = (
            {name: value for name, value in every.items() if name in kernel.arg_names} for every in (types, constants)
        )
        assert shared(kernel, its_types, its_constants, capability, adaln_triton.warps(length)) <= SMALLEST


@pytest.mark.parametrize("size", [1152, 15360])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_float8(capability: int, size: int) -> None:
    from tread.kernels import float8_triton

    length = 1 << (size - 1).bit_length()
    types = {"x": "*bf16", "columns": "*fp32", "out": "*fp8e4nv", "scale": "*fp32", "size": "i32"}
    constants = {"LARGEST": 448.0, "LENGTH": length, "SCALED": True}
    assert shared(float8_triton._round_row, types, constants, capability, float8_triton.warps(length)) <= SMALLEST
    types = {"x": "*i8", "out": "*i8", "rows": "i32", "columns": "i32"}
    height, wide = float8_triton.TILE
    assert shared(float8_triton._transpose_tile, types, {"HEIGHT": height, "WIDTH": wide}, capability, 8) <= SMALLEST
