"""What the compiler knows of our kernels: which arguments they write, and nothing more.

Were it wrong or at a loss, it would copy tensors, or fail where a GPU is. This needs none: Triton is told of one, and
what is traced is not run. A program of its own, because Triton is told once.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.programs import run

WRITTEN = {
    "round_rows": [["out", "scale"]],
    "turn": [["out"]],
    "norm": [["mean", "out", "rstd"], ["sums", "to_x"]],
    "gated norm": [["added", "mean", "out", "rstd"], ["sums", "to_branch", "to_x"]],
}


def test_the_compiler_knows_what_is_written() -> None:
    pytest.importorskip("triton")
    assert json.loads(run("-m", "tests.kernels.test_traced_kernels")) == WRITTEN


def test_no_argument_is_called_as_one_of_the_launcher() -> None:
    """The compiler's launcher appends its own `stream` to a kernel's arguments, and would not compile."""
    pytest.importorskip("triton")
    from tread.kernels import adaln_triton, float8_triton

    kernels = [
        kernel
        for module in (adaln_triton, float8_triton)
        for kernel in vars(module).values()
        if hasattr(kernel, "arg_names")
    ]
    assert len(kernels) == 4
    assert not any("stream" in kernel.arg_names for kernel in kernels)


def traced(function: Callable[..., Any], *given: torch.Tensor) -> list[list[str]]:
    """The arguments that each kernel writes, forward and backward, as the compiler sees them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[list[str]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nodes: list[Any] = list(graph.graph.nodes)
        found.extend(sorted(node.kwargs["tensors_to_clone"]) for node in nodes if "triton_kernel" in str(node.target))
        assert not any("clone" in str(node.target) for node in nodes)
        results = [None if node is None else node.meta["val"] for node in nodes[-1].args[0]]
        return lambda *_: [None if one is None else torch.zeros(one.shape, dtype=one.dtype) for one in results]

    backend = aot_autograd(
        fw_compiler=look,
        bw_compiler=look,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    out = torch.compile(function, backend=backend, fullgraph=True)(*given)
    floats = [one for one in out if one.requires_grad]
    if floats:
        torch.autograd.grad([one.sum() for one in floats], [one for one in given if one.requires_grad])
    return found


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from tread.kernels import triton_support
    from tread.kernels.adaln import AdaNorm
    from tread.kernels.float8 import round_rows, transpose_bytes

    driver: Any = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(driver)
    x, branch = (torch.randn(2, 4, 32, requires_grad=True) for _ in range(2))
    shift, scale, gate = (torch.randn(2, 1, 32, requires_grad=True) for _ in range(3))
    cases: dict[str, tuple[Any, ...]] = {
        "round_rows": (round_rows, torch.randn(16, 32)),
        "turn": (lambda bytes: (transpose_bytes(bytes),), torch.randint(256, (16, 32), dtype=torch.uint8)),
        "norm": (AdaNorm("layer"), x, shift, scale),
        "gated norm": (AdaNorm("rms").after, x, branch, gate, shift, scale),
    }
    with patch.object(triton_support, "run_on", lambda device: True):
        print(json.dumps({name: traced(*case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
