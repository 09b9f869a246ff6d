"""Whether tread's Triton kernels can run: they need Triton, a supported GPU and a C compiler.

`TREAD_KERNELS=0` in the environment turns them off, for a GPU or a Triton version on which they fail.
"""

import os
from importlib.util import find_spec
from shutil import which

import torch


def c_compiler() -> str | None:
    """The C compiler that Triton would call; None if there is none."""
    return os.environ.get("CC") or which("gcc") or which("clang")


def _can_be_built() -> bool:
    if os.environ.get("TREAD_KERNELS") == "0":
        return False
    return find_spec("triton") is not None and c_compiler() is not None


CAN_BE_BUILT = _can_be_built()


@torch.compiler.assume_constant_result
def run_on(device: torch.device) -> bool:
    """Whether the kernels run on `device`; otherwise their plain versions are used."""
    if device.type != "cuda" or not CAN_BE_BUILT:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
