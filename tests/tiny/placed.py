"""A case of the contract on a device, its layers compiled: the contract's own functions run on it as they are.

- `TINY` are the contract's cases with heads of a size that every attention kernel takes, a multiple of 8; `MEDIUM`
  are wide and long enough for the kernels of real models.
- Our own DiT routes itself instead of being attached to; under the names of a stock class it joins the contract.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.tiny.case import Blocks, Case, grid, random
from tests.tiny.dit import MODERN
from tests.tiny.stock import CASES, flux, sd3, wan
from tread.models import DiT
from tread.routing.handle import Handle


class Placed:
    """`case` with one model, in `dtype` on `device`; its layers are compiled where `backend` names a compiler."""

    def __init__(
        self, case: Any, device: str, *, backend: str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.compiler = None if backend is None else CompileCounterWithBackend(backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)

    def model(self) -> Any:
        return self._model

    @cached_property
    def _model(self) -> Any:
        model = self.case.model().to(self.device, self.dtype)
        if self.compiler is not None:
            for _, layer in self.case.layers(model):
                layer.compile(backend=self.compiler, dynamic=False)
        return model

    def inputs(self, batch: int) -> dict[str, Any]:
        """Times stay in float32."""
        return {name: self._moved(value) for name, value in self.case.inputs(batch).items()}

    def _moved(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() and value.ndim > 1 else value.dtype)


class StockDiT(DiT):
    """Our DiT under the names of a stock class."""

    _supports_gradient_checkpointing = True

    def enable_gradient_checkpointing(self) -> None:
        self.checkpointing = True

    def disable_gradient_checkpointing(self) -> None:
        self.checkpointing = False


def attach_or_route(stock: Any) -> Any:
    """What `tread.attach` does to stock models, and `route` to our own."""

    @contextmanager
    def routed(model: DiT, config: dict[str, Any]) -> Iterator[Handle]:
        yield model.route(config)
        model.routing = None

    def attach(model: nn.Module, config: dict[str, Any]) -> Any:
        return routed(model, config) if isinstance(model, DiT) else stock(model, config)

    return attach


def build_dit(size: tuple[int, int], width: int) -> DiT:
    return StockDiT(input_size=size, patch=2, in_channels=4, depth=4, width=width, heads=4, num_classes=5, **MODERN)


def dit_inputs(size: tuple[int, int], batch: int) -> dict[str, Tensor]:
    return {
        "x": random(1, batch, 4, *size),
        "time": torch.tensor([10.0, 900.0])[:batch],
        "labels": torch.tensor([1, 5])[:batch],
    }


def own_dit(name: str, size: tuple[int, int], width: int) -> Any:
    return Case(
        name=name,
        build=partial(build_dit, size, width),
        inputs=partial(dit_inputs, size),
        blocks=(Blocks(name="blocks", keyword="x"),),
        tokens=size[0] * size[1] // 4,
    )


build_wan = partial(wan.build, attention_head_dim=16)
WIDE_HEADS = {"num_attention_heads": 4, "attention_head_dim": 64}
WIDE_TEXTS = {"joint_attention_dim": 64, "pooled_projection_dim": 64}
FLUX = {"in_channels": 16, "num_single_layers": 2, "axes_dims_rope": (16, 24, 24)}
SD3 = {"sample_size": 32, "num_layers": 3, "caption_projection_dim": 256, "pos_embed_max_size": 16}
WAN = {"text_dim": 64, "ffn_dim": 512, "rope_max_seq_len": 32}
wide_flux = partial(flux.build, **WIDE_HEADS, **WIDE_TEXTS, **FLUX)
wide_sd3 = partial(sd3.build, **WIDE_HEADS, **WIDE_TEXTS, **SD3, qk_norm="rms_norm")
wide_wan = partial(wan.build, **WIDE_HEADS, **WAN)


def flux_inputs(batch: int) -> dict[str, Tensor]:
    return flux.inputs(batch) | {
        "hidden_states": random(1, batch, 256, 16),
        "encoder_hidden_states": random(2, batch, 40, 64),
        "pooled_projections": random(3, batch, 64),
        "img_ids": grid(16, 16).float(),
        "txt_ids": torch.zeros(40, 3),
    }


def sd3_inputs(batch: int) -> dict[str, Tensor]:
    return sd3.inputs(batch) | {
        "hidden_states": random(1, batch, 4, 32, 32),
        "encoder_hidden_states": random(2, batch, 40, 64),
        "pooled_projections": random(3, batch, 64),
    }


def wan_inputs(batch: int) -> dict[str, Tensor]:
    """4 frames of 8 x 8 tokens."""
    more = {"hidden_states": random(1, batch, 4, 4, 16, 16), "encoder_hidden_states": random(2, batch, 40, 64)}
    return wan.inputs(batch) | more


stock: dict[str, Any] = {one.name: one for one in CASES}
TINY = [
    stock["flux"],
    stock["sd3.5"],
    replace(stock["wan"], build=build_wan),
    replace(stock["wan-i2v"], build=partial(build_wan, in_channels=9, image_dim=16, added_kv_proj_dim=32)),
    stock["dit"],
    own_dit("tread-dit", (8, 12), 32),
]
MEDIUM = [
    replace(stock["flux"], name="flux-256", build=wide_flux, inputs=flux_inputs, tokens=256),
    replace(stock["sd3"], name="sd3-256", build=wide_sd3, inputs=sd3_inputs, tokens=256),
    replace(stock["wan"], name="wan-256", build=wide_wan, inputs=wan_inputs, tokens=256),
    own_dit("tread-dit-256", (32, 32), 256),
]
