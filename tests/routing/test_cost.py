"""The analytic cost against what torch counts and what autograd really keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tread import ConfigError, RoutePlan
from tread.models import DiT
from tread.routing.cost import LayerShape, plan_cost

PLAN = RoutePlan.from_config(
    {
        "routes": [
            {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3},
            {"selection_ratio": 0.25, "start_layer_idx": 4, "end_layer_idx": 4},
        ]
    }
).resolve(6)
BATCH, SIZE = 3, 16


def model(device: str, **options) -> DiT:
    with torch.device(device):
        return DiT(input_size=SIZE, patch=1, in_channels=4, depth=6, width=64, heads=4, num_classes=7, **options)


def layer_flops(net: DiT) -> int:
    """What torch counts in the blocks of one forward, per sample. On the meta device: on a CPU it misses SDPA."""
    x, time, labels = torch.zeros(BATCH, 4, SIZE, SIZE), torch.zeros(BATCH), torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        net(x.to("meta"), time.to("meta"), labels.to("meta"))
    counts = counter.get_flop_counts()
    return sum(sum(ops.values()) for name, ops in counts.items() if name.split(".")[-2:-1] == ["blocks"]) // BATCH


@pytest.mark.parametrize("options", [{}, {"mlp_ratio": 2.0}, {"mlp": "swiglu", "rope": True, "qk_norm": True}])
def test_flops_are_what_torch_counts(options):
    net = model("meta", **options)
    gated = options.get("mlp") == "swiglu"
    hidden = net.state_dict()["blocks.0.mlp.fc2.weight"].shape[1]
    shape = LayerShape(width=64, mlp_hidden=hidden, gated_mlp=gated)
    cost = plan_cost(PLAN, shape, tokens=SIZE * SIZE)
    assert layer_flops(net) == cost.dense_flops
    net.route(PLAN)
    assert layer_flops(net) == cost.routed_flops
    assert 1 < cost.speedup < 2


def test_context_joins_attention_and_is_never_dropped():
    with_text = LayerShape(width=64, context=77)
    assert with_text.flops(179) == LayerShape(width=64).flops(256)


@pytest.mark.parametrize("routed", [False, True])
def test_activation_bytes_are_what_autograd_keeps(routed):
    net = model("cpu")
    if routed:
        net.route(PLAN)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(torch.randn(BATCH, 4, SIZE, SIZE), torch.rand(BATCH), torch.zeros(BATCH, dtype=torch.int64))
    assert out.requires_grad
    cost = plan_cost(PLAN, LayerShape(width=64), tokens=SIZE * SIZE)
    # float32, of twice the bytes
    expected = 2 * BATCH * (cost.routed_bytes if routed else cost.dense_bytes)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.08), "embedding and head come on top"


def test_sizes_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"^width is 0; it must be at least 1\.$"):
        LayerShape(width=0)
    with pytest.raises(ConfigError, match=r"^context is -1; it must be at least 0\.$"):
        LayerShape(width=8, context=-1)


def test_an_unresolved_plan_has_no_cost():
    with pytest.raises(ConfigError, match="resolve"):
        plan_cost(RoutePlan.from_config({"preset": "paper"}), LayerShape(width=8), tokens=4)
