"""Adapters start as nothing, learn in float32, depend on the seed alone, and name what they cannot find."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tread
from tests.tiny.transformers import STOCK, TARGETS, call_flux, flux
from tread.errors import ConfigError
from tread.finetune.model.adapters import adapter_metadata, adapter_state, add_adapter, find_linears
from tread.finetune.model.quantize import quantize

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "dora": {"dora": True},
    "lokr": {"factor": 4},
    "lycoris": {"lycoris_config": {"algo": "loha"}},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def adapted(kind: str, model: nn.Module, *, seed: int = 0, **changes: Any) -> nn.Module:
    settings = {"rank": 4, "alpha": 8, "targets": TARGETS, "seed": seed, **KINDS[kind], **changes}
    add_adapter(model, kind="standard" if kind == "dora" else kind, **settings)  # pyright: ignore[reportArgumentType]
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@every_kind
@pytest.mark.parametrize("stock", STOCK)
def test_it_starts_as_nothing_and_learns_alone(kind: str, stock: str):
    build, call = STOCK[stock]
    model = build()
    before = call(model).detach()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted(kind, model)
    torch.testing.assert_close(call(model), before, rtol=0, atol=1e-6)
    weights = trainable(model)
    assert weights
    assert not set(weights) & set(base), "the base is frozen"
    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = (call(model) - before - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = dict(model.named_parameters())
    for name, tensor in base.items():
        found = after.get(name, after.get(name.replace(".weight", ".base_layer.weight")))
        found = after[name.replace(".bias", ".base_layer.bias")] if found is None else found
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("kind", ["standard", "lokr"])
def test_a_base_whose_weights_are_still_to_be_read(kind: str):
    """The adapter has its values; the base stays on the meta device."""
    expected = adapted(kind, flux().to(torch.bfloat16))
    model = adapted(kind, flux().to(torch.bfloat16).to("meta"))
    assert all(parameter.is_meta != parameter.requires_grad for parameter in model.parameters())
    for name, parameter in trainable(expected).items():
        assert torch.equal(trainable(model)[name], parameter), name
    assert [parameter.shape for parameter in model.parameters()] == [one.shape for one in expected.parameters()]


@every_kind
def test_the_trained_part_is_float32_on_a_bfloat16_base(kind: str):
    model = adapted(kind, flux().to(torch.bfloat16))
    assert {parameter.dtype for parameter in trainable(model).values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        call_flux(model, torch.bfloat16).float().square().sum().backward()
    reached = [parameter for parameter in trainable(model).values() if parameter.grad is not None]
    assert reached
    assert all(parameter.grad.dtype == torch.float32 for parameter in reached if parameter.grad is not None)


@every_kind
def test_the_start_is_a_function_of_the_seed(kind: str):
    torch.manual_seed(5)
    first = adapter_state(adapted(kind, flux()))
    torch.manual_seed(6)
    drawn = torch.get_rng_state()
    model = flux()
    torch.set_rng_state(drawn)
    second = adapter_state(adapted(kind, model))
    assert torch.equal(torch.get_rng_state(), drawn), "torch's generator is left as it was"
    other = adapter_state(adapted(kind, flux(), seed=1))
    assert first.keys() == second.keys() == other.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_kind
def test_a_copy_is_a_copy(kind: str):
    """As a moving average makes it: its weights are its own."""
    model = adapted(kind, flux())
    twin = copy.deepcopy(model)
    before = call_flux(twin).detach()
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.fill_(0.3)
    assert not torch.allclose(call_flux(model), before, atol=1e-4)
    assert torch.equal(call_flux(twin), before)
    assert trainable(twin).keys() == trainable(model).keys()


@every_kind
def test_routing_and_the_state_dict_agree(kind: str):
    """A model with an adapter loads its own trainable weights, routed or not."""
    model = adapted(kind, flux()).train()
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.05)
    saved = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    other = adapted(kind, flux(), seed=3).train()
    missing = other.load_state_dict(saved, strict=False)
    assert not missing.unexpected_keys
    handle = tread.attach(other, {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]})
    with handle.dense():
        torch.testing.assert_close(call_flux(other), call_flux(model))
    call_flux(other).square().sum().backward()
    assert handle.selections[0].shape == (2, 8)


def lokr_scales(model: nn.Module) -> set[float]:
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lokr_w2")]
    return {scale for layer in layers for scale in layer.scaling.values()}


def test_lokr_without_a_rank_has_scale_one():
    """A rank of 10000 is how people ask for undecomposed factors; alpha / rank would make the update vanish."""
    model = adapted("lokr", flux(), rank=10000, alpha=1, factor=8)
    assert lokr_scales(model) == {1.0}
    assert all("w2_a" not in name for name in adapter_state(model))
    assert lokr_scales(adapted("lokr", flux(), rank=2, alpha=1, factor=4)) == {0.5}


def test_lycoris_presets_choose_by_class():
    preset = {"target_module": ["FluxSingleTransformerBlock"], "module_algo_map": {}}
    config = {"algo": "lokr", "factor": 4, "linear_dim": 4, "apply_preset": preset}
    model = adapted("lycoris", flux(), lycoris_config=config)
    names = {name.split(".")[0] for name in adapter_state(model)}
    assert names
    assert all(name.startswith("lycoris_single_transformer_blocks_") for name in names)
    with pytest.raises(ConfigError, match="lycoris_config chooses no linear of FluxTransformer2DModel"):
        adapted("lycoris", flux(), lycoris_config={"algo": "lokr", "apply_preset": {"target_module": ["Attention"]}})


def test_lycoris_takes_the_targets_and_no_more():
    model = flux()
    names = {f"lycoris_{name.replace('.', '_')}" for name in find_linears(model, TARGETS)}
    assert {name.split(".")[0] for name in adapter_state(adapted("lycoris", model))} == names


def test_a_target_is_whole_words_as_in_peft():
    model = flux()
    found = set(find_linears(model, ("attn.to_q", "ff.net.2")))
    assert "transformer_blocks.0.attn.to_q" in found
    assert all(name.endswith((".attn.to_q", ".ff.net.2")) for name in found)
    adapted("standard", model, targets=("attn.to_q", "ff.net.2"))
    assert {name.partition(".lora_")[0] for name in adapter_state(model)} == found
    with pytest.raises(ConfigError, match="'o_q', which is no linear"):
        find_linears(flux(), ("o_q",))


@every_kind
def test_a_target_that_is_not_there(kind: str):
    with pytest.raises(ConfigError, match=r"lora_targets names 'to_qq', which is no linear of FluxTransformer2DModel"):
        adapted(kind, flux(), targets=("to_k", "to_qq"))
    with pytest.raises(ConfigError, match=r"Did you mean 'attn.to_q'\?.*attn.to_add_out"):
        adapted(kind, flux(), targets=("atn.to_q",))


def test_metadata_is_json_and_complete():
    import json

    from peft import LoKrConfig, LoraConfig

    for kind, cls in (("standard", LoraConfig), ("lokr", LoKrConfig)):
        model = adapted(kind, flux(), alpha=6.0)
        read = cls(**json.loads(json.dumps(adapter_metadata(model))))
        assert read.r == 4
        assert set(read.target_modules or ()) == set(TARGETS)
        assert (read.lora_alpha if isinstance(read, LoraConfig) else read.alpha) == 6
    assert adapter_metadata(adapted("lycoris", flux())) == {}


def test_dora_follows_its_paper():
    """Liu et al. 2024, Eq. 5: each row of the sum of weight and update has the length that the magnitude says."""
    model = adapted("dora", flux(), targets=("attn.to_q",))
    layer: Any = model.get_submodule("transformer_blocks.0.attn.to_q")
    generator = torch.Generator().manual_seed(0)
    base = layer.base_layer
    weight = base.weight.double()
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight.double(), weight.norm(dim=1))
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    down, up = (layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double())
    direction = weight + 2 * up @ down  # alpha 8, rank 4
    magnitude = layer.lora_magnitude_vector["default"].weight.double()
    merged = magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True)
    x = torch.randn(3, base.in_features, generator=generator)
    torch.testing.assert_close(layer(x).double(), x.double() @ merged.T + base.bias.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "nf4"])
def test_dora_begins_with_the_norms_of_a_quantized_base(precision: str):
    model = flux().to(torch.bfloat16)
    quantize(model, precision, "cpu")
    before = call_flux(model, torch.bfloat16).detach()
    adapted("dora", model)
    norms = [parameter for name, parameter in trainable(model).items() if "magnitude" in name]
    assert norms
    assert all(norm.isfinite().all() and norm.min() > 0 for norm in norms)
    with torch.autocast("cpu", torch.bfloat16):
        output = call_flux(model, torch.bfloat16)
    torch.testing.assert_close(output, before, rtol=0.05, atol=0.05)
    output.float().square().sum().backward()
    assert all(norm.grad is not None for norm in norms)
