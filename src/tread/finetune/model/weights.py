"""`Weights`: the tensors of a transformer's safetensors, read one by one into a model that was made on the meta device.

- The whole model is never in host memory: a linear is read, quantized and freed before the next one is read, and each
  tensor is copied to the GPU by itself. Safetensors files are memory-mapped, so a tensor takes anonymous memory only if
  it is cast or copied; the system may drop pages of the file.
- dtypes are those of diffusers' loader: the dtype of the job, or float32 for modules in `_keep_in_fp32_modules`.
  Diffusers casts all tensors before it returns, which needs memory that this module saves.
- Buffers and tables that are in no file are computed on construction, in the dtype of the job, as diffusers does.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


def make_empty(cls: Any, config: Mapping[str, Any], dtype: torch.dtype, stored: Collection[str]) -> nn.Module:
    """A stock model in eval mode with parameters on the meta device and buffers computed.

    Parameters, and the buffers among the `stored` names, have the dtype that they are loaded in.
    """
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the dtype in which position tables are computed
    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = cls.from_config(config)
    finally:
        torch.set_default_dtype(before)
    in_float32 = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for path, module in model.named_modules():
        words = {*path.split(".")}
        for name, tensor in _tensors(module):
            if isinstance(tensor, nn.Parameter) or (tensor.is_floating_point() and _joined(path, name) in stored):
                wanted = torch.float32 if in_float32 & {*words, name} else dtype
                _put(module, name, tensor.detach().to(wanted))
    return model.eval()


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module, without those of its submodules."""
    own = {**module._parameters, **module._buffers}
    left_out = module._non_persistent_buffers_set
    return [(name, tensor) for name, tensor in own.items() if tensor is not None and name not in left_out]


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, module._parameters[name].requires_grad)  # pyright: ignore[reportOptionalMemberAccess]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Weights:
    """The tensors of one transformer; `files` has the safetensors file of each."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._open: tuple[Path, Any] | None = None

    def can_fill(self, model: nn.Module) -> bool:
        """Whether the files have every parameter of a model in its shape; buffers may be missing."""
        if not {name for name, _ in model.named_parameters()} <= self.files.keys():
            return False
        stored = ((name, tensor.shape) for name, tensor in model.state_dict().items() if name in self.files)
        return all(tuple(self._file(name).get_slice(name).get_shape()) == shape for name, shape in stored)

    @torch.no_grad()
    def fill(self, module: nn.Module, path: str = "", device: torch.device | str = "cpu") -> None:
        """Read the parameters of a module that are on the meta device, and its stored buffers; `path` is its name."""
        for owner_path, owner in module.named_modules(prefix=path):
            for name, tensor in _tensors(owner):
                full = _joined(owner_path, name)
                if tensor.is_meta or (name in owner._buffers and full in self.files):
                    # still memory-mapped unless the dtype or the device differs
                    _put(owner, name, self._file(full).get_tensor(full).to(tensor.dtype).to(device))

    def _file(self, name: str) -> Any:
        """The file of a tensor. Only one is kept open, because an open file keeps its pages mapped."""
        path = self.files[name]
        if self._open is None or self._open[0] != path:
            self._open = path, safe_open(path, framework="pt")
        return self._open[1]
