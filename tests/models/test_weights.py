"""Published DiT weights: the same function as diffusers' DiT, and a clear sentence for every mismatch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.models import DiT, load_published_dit

CHANNELS, WIDTH, DEPTH, PATCH, SIZE, CLASSES = 4, 32, 3, 2, 8, 7
SHAPE: dict[str, Any] = {
    "input_size": SIZE,
    "patch": PATCH,
    "in_channels": CHANNELS,
    "depth": DEPTH,
    "width": WIDTH,
    "heads": 4,
    "num_classes": CLASSES,
}


def _positions() -> Tensor:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    table = get_2d_sincos_pos_embed(WIDTH, SIZE // PATCH, base_size=SIZE // PATCH, output_type="pt")
    return torch.as_tensor(table)[None].float()  # (1, S, D)


@pytest.fixture
def published() -> dict[str, Tensor]:
    """A state dict with the published names and shapes and random weights."""
    linears = {
        "t_embedder.mlp.0": (WIDTH, 256),
        "t_embedder.mlp.2": (WIDTH, WIDTH),
        "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH),
        "final_layer.linear": (PATCH * PATCH * 2 * CHANNELS, WIDTH),
        "x_embedder.proj": (WIDTH, CHANNELS, PATCH, PATCH),
    }
    for layer in range(DEPTH):
        linears |= {
            f"blocks.{layer}.attn.qkv": (3 * WIDTH, WIDTH),
            f"blocks.{layer}.attn.proj": (WIDTH, WIDTH),
            f"blocks.{layer}.mlp.fc1": (4 * WIDTH, WIDTH),
            f"blocks.{layer}.mlp.fc2": (WIDTH, 4 * WIDTH),
            f"blocks.{layer}.adaLN_modulation.1": (6 * WIDTH, WIDTH),
        }
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    state = {f"{name}.weight": draw(*shape) for name, shape in linears.items()}
    state |= {f"{name}.bias": draw(shape[0]) for name, shape in linears.items()}
    state["y_embedder.embedding_table.weight"] = draw(CLASSES + 1, WIDTH)
    state["pos_embed"] = _positions()
    return state


def _diffusers_dit(published: dict[str, Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """diffusers' DiT with the same weights, mapped by hand."""
    from diffusers.models.embeddings import Timesteps
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=WIDTH // 4,
        in_channels=CHANNELS,
        out_channels=2 * CHANNELS,
        num_layers=DEPTH,
        sample_size=SIZE,
        patch_size=PATCH,
        num_embeds_ada_norm=CLASSES,
        norm_eps=1e-6,
    )
    state: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        state[f"pos_embed.proj.{kind}"] = published[f"x_embedder.proj.{kind}"]
        state[f"proj_out_1.{kind}"] = published[f"final_layer.adaLN_modulation.1.{kind}"]
        state[f"proj_out_2.{kind}"] = published[f"final_layer.linear.{kind}"]
        for layer in range(DEPTH):
            theirs, block = f"transformer_blocks.{layer}", f"blocks.{layer}"
            qkv = published[f"{block}.attn.qkv.{kind}"].chunk(3)
            state |= {f"{theirs}.attn1.to_{n}.{kind}": part for n, part in zip("qkv", qkv, strict=True)}
            state[f"{theirs}.attn1.to_out.0.{kind}"] = published[f"{block}.attn.proj.{kind}"]
            state[f"{theirs}.ff.net.0.proj.{kind}"] = published[f"{block}.mlp.fc1.{kind}"]
            state[f"{theirs}.ff.net.2.{kind}"] = published[f"{block}.mlp.fc2.{kind}"]
            state[f"{theirs}.norm1.linear.{kind}"] = published[f"{block}.adaLN_modulation.1.{kind}"]
            embed = f"{theirs}.norm1.emb.timestep_embedder"
            state[f"{embed}.linear_1.{kind}"] = published[f"t_embedder.mlp.0.{kind}"]
            state[f"{embed}.linear_2.{kind}"] = published[f"t_embedder.mlp.2.{kind}"]
    table = published["y_embedder.embedding_table.weight"]
    for layer in range(DEPTH):
        state[f"transformer_blocks.{layer}.norm1.emb.class_embedder.embedding_table.weight"] = table
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, Timesteps):
            module.downscale_freq_shift = 0  # the published model divides by 128 where diffusers divides by 127
    model.double().eval()  # in training mode diffusers drops labels by itself
    return lambda x, time, labels: model(x, time, labels, return_dict=False)[0]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, CHANNELS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0.0, 37.0, 999.0]), torch.tensor([0, 4, CLASSES])


def test_published_weights_give_the_outputs_of_diffusers(published, batch):
    model = DiT(**SHAPE, out_channels=2 * CHANNELS)
    load_published_dit(model, published)
    with torch.no_grad():
        ours, theirs = model.double()(*batch), _diffusers_dit(published)(*batch)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_model_without_variance_takes_the_noise_half(published, batch):
    both, noise = DiT(**SHAPE, out_channels=2 * CHANNELS), DiT(**SHAPE)
    load_published_dit(both, published)
    load_published_dit(noise, published)
    with torch.no_grad():
        torch.testing.assert_close(noise.double()(*batch), both.double()(*batch)[:, :CHANNELS])


def test_weights_trained_without_variance_load_too(published, batch):
    both = DiT(**SHAPE, out_channels=2 * CHANNELS)
    load_published_dit(both, published)
    for kind in ("weight", "bias"):
        rows = published[f"final_layer.linear.{kind}"].unflatten(0, (PATCH * PATCH, 2 * CHANNELS))
        published[f"final_layer.linear.{kind}"] = rows[:, :CHANNELS].flatten(0, 1)
    noise = DiT(**SHAPE)
    load_published_dit(noise, published)
    with torch.no_grad():
        torch.testing.assert_close(noise.double()(*batch), both.double()(*batch)[:, :CHANNELS])


def _drop(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(key)


def _put(key: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({key: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("blocks.1.mlp.fc1.bias"), "no key 'blocks.1.mlp.fc1.bias'"),
        (_put("blocks.3.mlp.fc1.bias", 4), "the key 'blocks.3.mlp.fc1.bias'.*depth"),
        (_put("blocks.0.attn.qkv.weight", 3, 4), r"'blocks.0.attn.qkv.weight' has shape \(3, 4\).*\(96, 32\)"),
        (_put("y_embedder.embedding_table.weight", 7, 32), r"'y_embedder.*\(7, 32\).*\(8, 32\).*number of classes"),
        (_put("x_embedder.proj.weight", 32, 4, 4, 4), r"'x_embedder.proj.weight'.*\(32, 4, 2, 2\)"),
        (_put("final_layer.linear.weight", 12, 32), r"'final_layer.linear.weight' has shape \(12, 32\)"),
        (_put("pos_embed", 1, 64, 32), r"'pos_embed' has shape \(1, 64, 32\)"),
        (_put("pos_embed", 1, 16, 32), "'pos_embed' is not the fixed"),
    ],
)
def test_a_mismatch_names_the_key_and_leaves_the_model_alone(published, change, message):
    model = DiT(**SHAPE)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    change(published)
    with pytest.raises(ConfigError, match=message):
        load_published_dit(model, published)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("option", [{"rope": True}, {"qk_norm": True}, {"norm": "rms"}, {"mlp": "swiglu"}])
def test_other_layers_than_the_published_are_refused(published, option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"need a model with {name}="):
        load_published_dit(DiT(**SHAPE, **option), published)
