"""The machine's hardware and packages, and which features fall back: the first part of `tread doctor`.

- One finding per line: the result of a check, and what it means for a run. Checks call the functions that decide in a
  run (`kernels`, `finetune.quantize`); a feature that can fail only in use is used once at tiny size.
- A package that is missing or broken, torch included, is a finding and never an error.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tread import __version__
from tread.report.versions import beside_tested, installed

GIB = 2**30
PACKAGES: dict[str, tuple[str, str]] = {
    "accelerate": ("accelerate", "nothing trains without it: pip install accelerate"),
    "diffusers": ("diffusers", "no fine-tuning: pip install 'tread-diffusion[diffusers]'"),
    "transformers": ("transformers", "no text encoders: pip install 'tread-diffusion[diffusers]'"),
    "peft": ("peft", "no LoRA and LoKr: pip install 'tread-diffusion[diffusers]'"),
    "lycoris-lora": ("lycoris", "no lora_type lycoris: pip install 'tread-diffusion[lycoris]'"),
    "datasets": ("datasets", "no Hugging Face datasets: pip install 'tread-diffusion[data]'"),
    "pyarrow": ("pyarrow", "no Parquet files: pip install 'tread-diffusion[data]'"),
    "av": ("av", "no video files: pip install 'tread-diffusion[data]'"),
    "torchao": ("torchao", "tread does not need it"),
}
"""Distribution -> the module to import, and what its absence means."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, the result, and what it means for a run."""

    name: str
    found: str
    means: str = ""
    works: bool = True
    """False if something is missing, broken or falls back."""

    def __str__(self) -> str:
        return f"{self.found}; {self.means}" if self.means else self.found


def examine() -> Iterator[Finding]:
    """Every finding about this machine, in the order of `CHECKS`."""
    for name, check in CHECKS.items():
        yield _guarded(name, check)
    for name in PACKAGES:
        yield _guarded(name, lambda name=name: package(name))


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken package may raise anything
        return Finding(name, f"cannot be used ({_reason(error)})", works=False)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def package(name: str) -> Finding:
    """An installed package beside the versions tested; importing it tells whether it is broken."""
    module, absence = PACKAGES[name]
    version = installed(name)
    if version is None:
        return Finding(name, "not installed", absence, works=False)
    try:
        import_module(module)
    except Exception as error:
        return Finding(name, f"{version}, broken", f"importing it fails ({_reason(error)})", works=False)
    return Finding(name, version, beside_tested(name, version))


def _python() -> Finding:
    numbers = ".".join(str(number) for number in sys.version_info[:3])
    return Finding("python", f"{numbers} on {platform.system()} {platform.machine()}")


def _tread() -> Finding:
    return Finding("tread", __version__)


def _torch() -> Finding:
    import torch

    version = str(torch.__version__)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPUs"
    return Finding("torch", f"{version}, built for {built}", beside_tested("torch", version))


def _device() -> Any:
    """The device that a job would run on."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _describe_device() -> Finding:
    import torch

    device = _device()
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        return Finding("device", f"cpu, {cores} cores", "no GPU: everything runs, slowly", works=False)
    if device.type != "cuda":
        return Finding("device", device.type, "not tested; tread was tested on CPUs and NVIDIA GPUs", works=False)
    count = torch.cuda.device_count()
    more = f", one of {count}; `accelerate launch` uses all of them" if count > 1 else ""
    return Finding("device", f"{device.type}, {torch.cuda.get_device_name(device)}{more}")


def _capability() -> Finding:
    import torch

    device = _device()
    if device.type != "cuda" or torch.version.cuda is None:
        return Finding("compute capability", "none", "no NVIDIA GPU", works=False)
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        means = "bfloat16 is emulated below 8.0: train in float32, and expect no Triton kernels"
        return Finding("compute capability", f"{major}.{minor}", means, works=False)
    return Finding("compute capability", f"{major}.{minor}")


def _compiler() -> Finding:
    from tread.kernels.triton_support import c_compiler

    compiler, on_gpu = c_compiler(), _device().type == "cuda"
    if compiler is None:
        means = "layers cannot be compiled, training falls back to eager: install gcc, or set CC"
        return Finding("C compiler", "none", means, works=False)
    return Finding("C compiler", compiler, "layers are compiled" if on_gpu else "on a CPU only `compile: true` uses it")


def _triton() -> Finding:
    import torch

    from tread.kernels import triton_support
    from tread.kernels.adaln import AdaNorm

    version, device = installed("triton") or installed("pytorch-triton-rocm"), _device()
    if device.type != "cuda":
        return Finding("Triton", version or "not installed", "kernels need a GPU, plain versions run", works=False)
    if os.environ.get("TREAD_KERNELS") == "0":
        return Finding("Triton", "off by TREAD_KERNELS=0", "plain versions of the kernels run", works=False)
    if not triton_support.run_on(device):
        means = "plain versions of the kernels run; they need Triton, a C compiler and capability 8.0"
        return Finding("Triton", version or "not installed", means, works=False)
    x = torch.ones(1, 16, 64, device=device)
    AdaNorm("layer")(x, x[:, :1], x[:, :1])  # builds and launches a kernel
    return Finding("Triton", version or "installed", "tread's kernels run")


def _attention() -> Finding:
    import torch

    from tread.kernels.attention import cudnn, kernel

    device = _device()
    if device.type != "cuda":
        return Finding("attention", "torch's", f"there is one kernel on a {device.type}")
    if kernel.resolved("auto", device) == "cudnn":
        x = torch.ones(1, 1, 64, 64, device=device, dtype=torch.bfloat16)
        cudnn.attend(x, x, x, None)
        major, minor = torch.cuda.get_device_capability(device)
        return Finding("attention", f"cudnn (compute capability {major}.{minor})")
    return Finding("attention", ", then ".join(kernel.SAFE), "cudnn is chosen from compute capability 9.0 on")


def _float8() -> Finding:
    from tread.kernels.float8 import supported

    if supported(_device()):
        return Finding("float8", "yes", "train.float8 and base_model_precision fp8-forward and fp8-matmul work")
    means = "needs compute capability 8.9; base_model_precision fp8 stores it and multiplies in bfloat16"
    return Finding("float8", "no", means, works=False)


def _graphs() -> Finding:
    if _device().type == "cuda":
        return Finding("CUDA graphs", "yes", "with graphs set to true and one process")
    return Finding("CUDA graphs", "no", "needs one CUDA GPU", works=False)


def _bitsandbytes() -> Finding:
    name, version = "bitsandbytes", installed("bitsandbytes")
    if version is None:
        means = "no nf4, int8-bnb and 8-bit optimizers: pip install 'tread-diffusion[quant]'"
        return Finding(name, "not installed", means, works=False)
    import torch

    from tread.finetune.model.quantize import METHODS, check_precision

    device = _device()
    try:
        check_precision("nf4", device)
        linear = METHODS["nf4"].apply(torch.nn.Linear(64, 64).to(device))
        linear(torch.ones(1, 64, device=device))
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        means = f"no nf4, int8-bnb and 8-bit optimizers ({_reason(cause)})"
        return Finding(name, f"{version}, broken", means, works=False)
    beside = beside_tested(name, version)
    return Finding(name, version, f"{beside}; an nf4 product ran" if beside else "an nf4 product ran")


def _gpu_memory() -> Finding:
    import torch

    device = _device()
    if device.type != "cuda":
        return Finding("GPU memory", "none", "no GPU", works=False)
    free, total = torch.cuda.mem_get_info(device)
    return Finding("GPU memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")


def _memory() -> Finding:
    listed = Path("/proc/meminfo")
    if not listed.is_file():
        return Finding("memory", "unknown")
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in listed.read_text().splitlines()}
    return Finding("memory", f"{sizes['MemAvailable'] / GIB:.1f} of {sizes['MemTotal'] / GIB:.1f} GiB free")


def _disk() -> Finding:
    here = Path.cwd()
    free = f"{shutil.disk_usage(here).free / GIB:.1f} GiB free in {here}"
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    there = next(folder for folder in (hub, *hub.parents) if folder.is_dir())
    return Finding("disk", free, f"models of the hub go to {hub} ({shutil.disk_usage(there).free / GIB:.1f} GiB free)")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "tread": _tread,
    "torch": _torch,
    "device": _describe_device,
    "compute capability": _capability,
    "C compiler": _compiler,
    "Triton": _triton,
    "attention": _attention,
    "float8": _float8,
    "CUDA graphs": _graphs,
    "bitsandbytes": _bitsandbytes,
    "GPU memory": _gpu_memory,
    "memory": _memory,
    "disk": _disk,
}
"""Each check by the name of its finding; a check that raises is reported under that name."""
