"""What `tread plan` knows of models, against the models: weights at full size, layers by independent computations."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_cosmos import CosmosTransformer3DModel
from diffusers.models.transformers.transformer_hidream_image import MoEGate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pages import counts, models
from pages.model_lines import MODELS, Line
from pages.subjects import RANK, Subject
from tread.finetune.families import TUNE_FAMILIES
from tread.finetune.model.adapters import find_linears
from tread.kernels.attention import cudnn
from tread.kernels.experts import compute_all_experts
from tread.report.planning.models import documents, find_model
from tread.routing.cost import LayerShape

KNOWN = [name for name, line in MODELS.items() if line.family in TUNE_FAMILIES]
TINY = {
    "num_layers": 3,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 8),
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
}

SMALL: dict[str, dict[str, Any]] = {
    "cosmos3": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32,
        "intermediate_size": 48, "vocab_size": 40, "rope_axes_dim": (4, 2, 2),
    },
    "hidream": {
        "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16,
        "caption_channels": (24, 40), "text_emb_dim": 12, "axes_dims_rope": (8, 4, 4), "llama_layers": (0, 1, 2, 1),
    },
    "hunyuanvideo": {
        "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16,
        "rope_axes_dim": (4, 6, 6), "text_embed_dim": 24, "text_embed_2_dim": 20, "image_embed_dim": 28,
    },
    "lumina2": {
        "num_layers": 2, "num_refiner_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 2,
        "axes_dim_rope": (4, 6, 6), "cap_feat_dim": 24,
    },
    "qwen_image21": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6),
        "context_in_dim": 24, "in_channels": 64,
    },
    "qwen_layered": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6),
        "joint_attention_dim": 24,
    },
}  # fmt: skip
GRIDS = {"hidream": (16, 16), "cosmos3": (4, 8, 8), "qwen_layered": (3, 8, 8)}
"""Latents of 64 tokens that are not in one row: a square, which is not padded, a clip, and an image with two layers,
after which it comes again."""
TEXTS: dict[str, Any] = {"hidream": {"t5": ("T", 24), "llama": (3, "T", 40), "pooled": ("text_emb_dim",)}}
SILENCE = {"ltxvideo2": 2 * 4 * 2048}
"""FLOPs of one token of silence that attends to itself and to one token of text."""


@cache
def subject_of(name: str) -> Subject:
    return Subject(MODELS[name])


@pytest.fixture(scope="module")
def tiny() -> Subject:
    line: Line = replace(MODELS["flux"], config={**MODELS["flux"].config, **TINY, "in_channels": 64})
    return Subject(line)


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_and_weights_are_those_of_the_class(name: str) -> None:
    subject, known = subject_of(name), documents()[name]
    layers = [len(subject.model.get_submodule(stack)) for stack in subject.stacks]
    assert [(stack["name"], stack["layers"]) for stack in known["stacks"]] == list(
        zip(subject.stacks, layers, strict=True)
    )
    family = subject.family
    described = models.described(subject)
    assert {key: known[key] for key in described} == described
    assert known["image_layers"] == (4 if family.layered else 0)
    assert known["text"] == (MODELS[name].reads or type(family).longest_text)


@pytest.mark.parametrize("name", KNOWN)
def test_flops_are_those_of_the_linears_of_a_layer(name: str) -> None:
    """Every linear sees the image, the text or one vector per sample; or all that see tokens see both.

    A second computation, by the shapes of the weights alone: two FLOPs per weight and row.
    """
    subject, registers, idle = subject_of(name), MODELS[name].registers, MODELS[name].idle
    for stack in find_model(name).stacks:
        constant, image, text, _, mixed, square = stack.flops["full"]["forward"]
        text -= 2 * square * registers
        image -= mixed * registers
        constant -= text * registers + square * registers**2 + SILENCE.get(name, 0)
        layer = subject.model.get_submodule(stack.name)[1]
        linears = [(where, module) for where, module in layer.named_modules() if isinstance(module, nn.Linear)]
        weights = sum(linear.weight.numel() for where, linear in linears if not where.startswith(idle))
        weights += sum(module.weight.numel() for module in layer.modules() if isinstance(module, MoEGate))
        assert 2 * weights == constant + image + text or (image == text and 2 * weights == constant + image)


@pytest.mark.parametrize("name", KNOWN)
def test_a_lora_adds_the_flops_of_its_own_linears(name: str) -> None:
    """Two linears through its rank beside each target, and nothing to attention."""
    subject, line = subject_of(name), MODELS[name]
    for stack, (way, targets) in itertools.product(find_model(name).stacks, subject.targets.items()):
        lora, full = (stack.flops[one]["forward"] for one in (way, "full"))
        constant, image, text, *squares = (a - b for a, b in zip(lora, full, strict=True))
        constant -= text * line.registers
        at = f"{stack.name}.1."
        linears = {k.removeprefix(at): x for k, x in find_linears(subject.model, targets).items() if k.startswith(at)}
        sides = sum(x.in_features + x.out_features for k, x in linears.items() if not k.startswith(line.idle))
        flops = 2 * RANK * sides
        assert flops == constant + image + text or (image == text and flops == constant + image)
        assert squares == [0, 0, 0]


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_of_a_real_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch on real weights and tensors at tiny size: masks are read, experts are those that compiled layers
    run, clips and layers have frames."""
    line = replace(MODELS[name], config={**MODELS[name].config, **SMALL[name]}, text=TEXTS.get(name, MODELS[name].text))
    subject = Subject(line)
    image, text = 64, 2 * line.unit
    counted = counts.total_flops(subject, "full", image, text, dict.fromkeys(subject.stacks, counts.DEPTH))
    torch.manual_seed(0)
    model = subject.cls(**line.config).train()
    compute_all_experts([model])
    noisy, batch = subject.batch(1, image, text)
    if name in GRIDS:
        noisy = torch.randn(1, line.channels, *GRIDS[name])
        batch["mean"] = noisy
    monkeypatch.setattr(F, "scaled_dot_product_attention", _attention)
    with FlopCounterMode(display=False) as forward:
        prediction = subject.family.predict(model, noisy, torch.full((1,), 0.5), batch)
    with FlopCounterMode(display=False) as backward:
        prediction.square().mean().backward()
    assert counted == {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def test_recomputation_leaves_out_the_product_at_the_end_of_a_layer() -> None:
    """Cosmos 3 adds the product of its video tokens' last linear as it is: nothing needs the sum's inputs."""
    small = replace(MODELS["cosmos3"], config={**MODELS["cosmos3"].config, **SMALL["cosmos3"], "num_hidden_layers": 3})
    subject, image, text = Subject(small), 64, 2
    width, inner = SMALL["cosmos3"]["hidden_size"], SMALL["cosmos3"]["intermediate_size"]
    layer = counts.flops_at(subject, "full", image, text, again=True)["layers"]
    assert layer["forward"] - layer["again"] == 2 * image * width * inner
    known = find_model("cosmos3").stacks[0].flops["lora"]
    left_out = [a - b for a, b in zip(known["forward"], known["again"], strict=True)]
    config = subject_of("cosmos3").settings
    assert left_out == [0, 2 * config["hidden_size"] * config["intermediate_size"], 0, 0, 0, 0]
    assert "again" not in find_model("flux").stacks[0].flops["lora"]  # the gate needs the last product


@pytest.mark.parametrize(
    ("name", "way", "width"),
    [("kandinsky5_video", "lora", 7168), ("flux", "lora", 12288), ("flux", "attention", 3072), ("dit/S/2", "full", 0)],
)
def test_the_widest_linear_with_an_adapter_is_that_of_the_class(name: str, way: str, width: int) -> None:
    """The feed-forward's, where it has one; modulation sees one vector per sample and is left out."""
    stack = find_model(name).stacks[0]
    assert stack.adapted.get(way, 0) == width
    if name in MODELS:
        assert counts.widest(subject_of(name))[way][stack.name] == width


def test_weights_leave_a_part_of_their_segments_unused() -> None:
    """In MiB: 11 has a segment of 12, 6 + 6 + 6 one of 20, where the next of 2 fits; up to 1 none is lost."""
    assert [models.spare(int(size * 2**20) for size in sizes) / 2**20 for sizes in (
        [11], [12], [6, 6, 6], [6, 6, 6, 2], [1, 0.5], [10.5, 1.25],
    )] == [1, 0, 2, 0, 0, 0.25]  # fmt: skip


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return cudnn.attend(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), None, scale)


def test_flops_of_a_dit_are_those_of_its_formula() -> None:
    """`routing.cost` writes down by hand what was counted here."""
    shape, layer = LayerShape(width=1152), find_model("dit/XL/2").stacks[0]
    forward = layer.flops["full"]["forward"]
    for tokens in (64, 256, 1024):
        terms = (1, tokens, 0, tokens * tokens, 0, 0)
        assert sum(a * b for a, b in zip(forward, terms, strict=True)) == shape.flops(tokens)


@pytest.mark.parametrize(("name", "channels"), [("cosmos", 16), ("cosmos_video", 17)])
def test_a_padding_mask_weighs_as_much_as_a_channel(name: str, channels: int) -> None:
    """Released Cosmos appends its mask by torchvision; the line that is counted has it among its channels."""
    released = {**MODELS[name].config, "in_channels": channels, "concat_padding_mask": True}
    with torch.device("meta"):
        model = CosmosTransformer3DModel(**released)
    assert documents()[name]["weights"] == models.weights(model)


def test_times_of_a_given_frame_modulate_every_token() -> None:
    """Cosmos has three norms, each modulated through 256 channels: once per sample of images, per token of clips."""
    width, rank = 2048, 256
    modulation = 3 * 2 * (width * rank + rank * 3 * width)
    image, video = (find_model(name).stacks[0].flops["full"]["forward"] for name in ("cosmos", "cosmos_video"))
    assert (image[0], video[0]) == (modulation, 0)
    assert video[1] - image[1] == modulation
    assert image[2:] == video[2:]


@pytest.mark.contract
def test_flops_hold_at_other_lengths(tiny: Subject) -> None:
    way = "attention"
    found = counts.fitted(tiny, way)
    depths = dict.fromkeys(tiny.stacks, counts.DEPTH)
    image, text = 100, 3
    direct = counts.total_flops(tiny, way, image, text, depths)
    for part in ("forward", "backward"):
        terms = (1, image, text, image * image, image * text, text * text)
        layers = [(found[""], 1), *((found[stack], counts.DEPTH) for stack in tiny.stacks)]
        fitted = sum(n * a * b for one, n in layers for a, b in zip(one[part], terms, strict=True))
        assert fitted == direct[part]


@pytest.mark.contract
def test_one_sample_saves_what_each_of_several_does(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without a batch axis are counted so; what does not grow with the tokens is then the sample's."""
    several = counts.saved_bytes(tiny, "attention", False)
    monkeypatch.setattr(tiny, "samples", 1)
    for name, counted in counts.saved_bytes(tiny, "attention", False).items():
        assert counted == several[name] | {"constant": 0, "sample": counted["sample"]}
        assert counted["sample"] >= several[name]["constant"]


@pytest.mark.contract
def test_saved_bytes_hold_at_other_sizes(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted with other primes, every coefficient is the same."""
    found = counts.saved_bytes(tiny, "attention", "selective")
    monkeypatch.setattr(tiny, "samples", 17)
    monkeypatch.setattr(counts, "IMAGE", 61)
    monkeypatch.setattr(counts, "TEXT", 46)
    monkeypatch.setattr(counts, "PRIMES", {"both": 107, "image": 61, "text": 23})
    assert counts.saved_bytes(tiny, "attention", "selective") == found


@pytest.mark.parametrize("name", documents())
def test_a_checkpointed_layer_keeps_its_inputs(name: str) -> None:
    """The stream in bf16, and nothing that does not grow with the tokens but what the layer is modulated by."""
    for stack in documents()[name]["stacks"]:
        for counted in stack["saved"].values():
            full, none = counted["full"], counted["none"]
            assert 0 < full["image"] < none["image"] / 4
            assert full["constant"] == 0
