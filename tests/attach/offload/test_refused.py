"""What cannot be offloaded, each with a sentence: trained, sharded, compiled or other libraries' layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.attach.attached import FLUX, ROUTES, Attach
from tests.attach.offload.offloaded import DEPTH
from tests.attach.steps import TRACED, adapted, inputs_of, step
from tread.attach.registry import layers_of
from tread.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def test_sharded_layers_are_refused(attach: Attach, tmp_path: Path) -> None:
    model = adapted(FLUX)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model.transformer_blocks[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="sharded by FSDP"):
            attach(model, ROUTES).offload(1)
    finally:
        distributed.destroy_process_group()


class Strange(nn.Module):
    """A linear with a trained scale that is kept elsewhere, as lycoris keeps its adapters."""

    def __init__(self, linear: Any, scale: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.others = linear, [scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.others[0]


def test_what_cannot_be_offloaded(attach: Attach) -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    handle = attach(model, ROUTES)
    with pytest.raises(ConfigError, match="offload is 6, but the model has 5 layers"):
        handle.offload(6)
    with pytest.raises(ConfigError, match="all weights of the layers are trained"):
        attach(FLUX.model(), ROUTES).offload(1)
    handle.compile(**TRACED)
    with pytest.raises(ConfigError, match=r"comes before handle.compile"):
        handle.offload(1)
    handle = attach(model, ROUTES).offload(DEPTH)
    layers_of(model)[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="were unfrozen"):
        step(FLUX, model, handle, inputs)
    handle.detach()
    strange: Any = adapted(FLUX)
    attention = strange.transformer_blocks[0].attn
    attention.to_q = Strange(attention.to_q, nn.Parameter(torch.ones(())))
    handle = attach(strange, ROUTES).offload(DEPTH)
    with pytest.raises(ConfigError, match="neither its argument nor its parameter"):
        step(FLUX, strange, handle, inputs)


def test_weights_of_other_libraries_are_refused(attach: Attach) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = adapted(FLUX)
    quantization.quantize_(model.transformer_blocks[0].ff, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ConfigError, match="cannot be offloaded: quantize the base to"):
        attach(model, ROUTES).offload(DEPTH)
