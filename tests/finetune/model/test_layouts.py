"""ComfyUI's and kohya's key layouts, read by diffusers' converters of original weights and of other trainers' LoRAs.

The reader here knows how both layouts write a linear's LoRA, and nothing of the tables of names: which linear of
diffusers an original one is, diffusers' own converters of released checkpoints say.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils as theirs
from diffusers.loaders import single_file_utils as released
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families import TUNE_FAMILIES, open_family
from tread.finetune.model.adapters import find_linears
from tread.finetune.model.layouts import Linear, from_layout, to_layout
from tread.finetune.model.original_names import LAYOUTS, NAMES, Layout
from tread.finetune.model.source import Source

RANK, WIDTH, SCALE = 2, 4, 0.5
WIDE = {"flux": 3072, "chroma": 3072, "hunyuanvideo1": 3072}
"""Rows of queries, keys and values where a converter has them as a number."""


class Whole(dict[str, Tensor]):
    """An original checkpoint of which a few weights are there; the others are zeros, as many as any linear has."""

    def pop(self, key: str, *default: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().pop(key) if key in self else default[0] if default else torch.zeros(7 * 3072)


def identical(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen-Image was released with diffusers' names."""
    return checkpoint


CONVERTERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "flux": released.convert_flux_transformer_checkpoint_to_diffusers,
    "chroma": released.convert_chroma_transformer_checkpoint_to_diffusers,
    "flux2": released.convert_flux2_transformer_checkpoint_to_diffusers,
    "sd3": released.convert_sd3_transformer_checkpoint_to_diffusers,
    "auraflow": released.convert_auraflow_transformer_checkpoint_to_diffusers,
    "hunyuanvideo1": released.convert_hunyuan_video_transformer_to_diffusers,
    "wan": released.convert_wan_transformer_to_diffusers,
    "ltxvideo": released.convert_ltx_transformer_checkpoint_to_diffusers,
    "ltxvideo2": released.convert_ltx2_transformer_to_diffusers,
    "qwen_image": identical,
    "qwen_image21": released.convert_qwen_image21_transformer_checkpoint_to_diffusers,
    "qwen_layered": identical,
    "lumina2": released.convert_lumina2_to_diffusers,
    "z_image": released.convert_z_image_transformer_checkpoint_to_diffusers,
    "cosmos": released.convert_cosmos_transformer_checkpoint_to_diffusers,
    "cosmos_video": released.convert_cosmos_transformer_checkpoint_to_diffusers,
    "krea2": released.convert_krea2_transformer_checkpoint_to_diffusers,
    "hidream": released.convert_hidream_transformer_to_diffusers,
}
every_layout = pytest.mark.parametrize(
    ("layout", "family"), [(layout, family) for layout, families in LAYOUTS.items() for family in families]
)


def rows(family: str, name: str) -> int:
    """Rows of a linear, as many as the family's converter expects where it splits them by a number."""
    if family == "lumina2" and name.endswith(("to_q", "to_k", "to_v")):
        return 2304 if name.endswith("to_q") else 768
    if "single_transformer_blocks" in name and family in WIDE:
        return WIDE[family] * (4 if name.endswith("proj_mlp") else 1)
    return 6


def sizes_of(family: str) -> dict[str, int]:
    """The rows of every linear of two blocks."""
    names = [name.format(block) for group in NAMES[family].values() for name in group for block in (0, 1)]
    return {name: rows(family, name) for name in names}


def lora(sizes: dict[str, int], without: str = "proj_mlp") -> dict[str, Linear]:
    """A LoRA of every linear but one of the fused ones."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: Linear(torch.randn(RANK, WIDTH, generator=generator), torch.randn(size, RANK, generator=generator), SCALE)
        for name, size in sizes.items()
        if not name.endswith(without)
    }


def read(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two factors of each linear of a file, scaled: `diffusion_model.NAME` with dots, `lora_unet_NAME` without."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("diffusion_model.").removesuffix(".lora_A.weight")
            found[name] = tensor, tensors[f"diffusion_model.{name}.lora_B.weight"]
        elif key.endswith(".lora_down.weight"):
            whole = key.removesuffix(".lora_down.weight")
            scale = tensors[f"{whole}.alpha"].item() / len(tensor)
            found[whole.removeprefix("lora_unet_")] = tensor, tensors[f"{whole}.lora_up.weight"] * scale
    assert len(tensors) in (2 * len(found), 3 * len(found)), "nothing else is in the file"
    return found


def update(linear: Linear) -> Tensor:
    return linear.scale * linear.up @ linear.down


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def convert(family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diffusers' weights from those of a release, by their linears' names."""
    prefix = "net." if family.startswith("cosmos") else ""
    checkpoint = Whole({f"{prefix}{name}.weight": weight for name, weight in weights.items()})
    if family == "chroma":  # it counts these
        checkpoint["distilled_guidance_layer.layers.0.in_layer.weight"] = torch.zeros(1)
    converted = CONVERTERS[family](checkpoint)
    return {name.removesuffix(".weight"): weight for name, weight in converted.items() if name.endswith(".weight")}


@pytest.mark.parametrize("family", LAYOUTS["comfyui"])
def test_the_names_are_those_of_the_released_weights(family: str):
    """Of a release whose weights are the factors `lora_B`, diffusers' converter makes the parts that were trained."""
    sizes = sizes_of(family)
    linears = lora(sizes)
    factors = read(to_layout("comfyui", family, linears, sizes))
    ups = convert(family, {name: up for name, (_, up) in factors.items()})
    downs = [down for down, _ in factors.values()]
    numbers = {name: torch.full_like(up, index) for index, (name, (_, up)) in enumerate(factors.items())}
    origins = convert(family, numbers)  # for each of diffusers' linears the index of the one it came from
    last = ("transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.ff_context")  # of SD3, which has none there
    for name, linear in linears.items():
        if family != "sd3" or not name.startswith(last):
            same(ups[name] @ downs[int(origins[name][0, 0])], update(linear))
    for name in sizes.keys() - linears.keys():
        assert not ups[name].any(), "an untrained part stays as it is"


@pytest.mark.parametrize("family", LAYOUTS["kohya"])
def test_kohyas_names_have_underscores(family: str):
    sizes = sizes_of(family)
    linears = lora(sizes)
    dotted = read(to_layout("comfyui", family, linears, sizes))
    flat = read(to_layout("kohya", family, linears, sizes))
    assert flat.keys() == {name.replace(".", "_") for name in dotted}
    for name, (down, up) in dotted.items():
        other_down, other_up = flat[name.replace(".", "_")]
        same(other_up @ other_down, up @ down)


STOCK: dict[tuple[Layout, str], Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    ("kohya", "flux"): theirs._convert_kohya_flux_lora_to_diffusers,
    ("kohya", "flux2"): theirs._convert_kohya_flux2_lora_to_diffusers,
    ("kohya", "wan"): theirs._convert_musubi_wan_lora_to_diffusers,
    ("kohya", "qwen_image"): theirs._convert_non_diffusers_qwen_lora_to_diffusers,
    ("kohya", "z_image"): theirs._convert_non_diffusers_z_image_lora_to_diffusers,
    ("comfyui", "flux2"): theirs._convert_non_diffusers_flux2_lora_to_diffusers,
    ("comfyui", "wan"): theirs._convert_non_diffusers_wan_lora_to_diffusers,
    ("comfyui", "qwen_image"): theirs._convert_non_diffusers_qwen_lora_to_diffusers,
    ("comfyui", "qwen_layered"): theirs._convert_non_diffusers_qwen_lora_to_diffusers,
    ("comfyui", "ltxvideo"): theirs._convert_non_diffusers_ltxv_lora_to_diffusers,
    ("comfyui", "ltxvideo2"): theirs._convert_non_diffusers_ltx2_lora_to_diffusers,
    ("comfyui", "hidream"): theirs._convert_non_diffusers_hidream_lora_to_diffusers,
    ("comfyui", "krea2"): theirs._convert_non_diffusers_krea2_lora_to_diffusers,
    ("comfyui", "hunyuanvideo1"): theirs._convert_hunyuan_video_lora_to_diffusers,
    ("comfyui", "lumina2"): theirs._convert_non_diffusers_lumina2_lora_to_diffusers,
}
SKIPPED = {
    ("kohya", "wan"): ("condition_embedder", "proj_out"),  # it reads blocks alone
    ("kohya", "flux"): ("x_embedder", "context_embedder", "time_text_embed", "proj_out"),
    ("comfyui", "ltxvideo"): ("proj_in",),  # it renames nothing
    ("comfyui", "hunyuanvideo1"): ("context_embedder",),  # it splits `lora_A` there too
}
"""What a stock converter of other trainers' LoRAs does not read."""


@pytest.mark.parametrize(("layout", "family"), STOCK)
def test_stock_converters_read_them(layout: Layout, family: str):
    sizes = sizes_of(family)
    left_out = SKIPPED.get((layout, family), ())
    linears = {name: one for name, one in lora(sizes).items() if name.split(".")[0] not in left_out}
    converted = STOCK[layout, family](to_layout(layout, family, linears, sizes))
    for name, linear in linears.items():
        down, up = (converted[f"transformer.{name}.{factor}.weight"] for factor in ("lora_A", "lora_B"))
        same(up @ down, update(linear))


FEED_FORWARD: dict[tuple[Layout, str], tuple[str, ...]] = {("kohya", "wan"): ("ffn.net.0.proj", "ffn.net.2")}
"""Linears that a stock converter insists on, and that are not trained by default."""
READ_BY_PIPELINES: dict[Layout, tuple[str, ...]] = {
    "comfyui": (
        *("flux2", "hunyuanvideo1", "wan", "ltxvideo", "ltxvideo2"),
        *("qwen_image", "qwen_image21", "qwen_layered", "krea2"),
    ),
    "kohya": ("flux", "chroma", "flux2", "wan", "qwen_image", "z_image"),
}
"""The layouts that the loaders of stock pipelines convert. They read no file of the others, whoever wrote it: SD3,
AuraFlow and Cosmos have no converter, FLUX and Z-Image one for kohya's names alone, HunyuanVideo none for those, and
Lumina2's wants every linear trained. FLUX's has the width as a number, so that it reads no smaller model's file."""


@pytest.mark.parametrize(
    ("layout", "family"), [(layout, family) for layout, families in READ_BY_PIPELINES.items() for family in families]
)
def test_stock_pipelines_read_released_models(
    layout: Layout, family: str, pipeline_folder: Callable[[str], Path]
) -> None:
    """A model of released depth and width, on no device: `load_lora_weights` finds all of a file's linears in it."""
    tuned = open_family(family, Source(str(pipeline_folder(family))))
    model_class = getattr(diffusers, tuned.source.index[tuned.experts[0][0]][1])
    with torch.device("meta"):
        model = model_class()
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    trained = find_linears(model, (*tuned.lora_targets, *FEED_FORWARD.get((layout, family), ())))
    loras = {
        name: Linear(torch.ones(RANK, linears[name].in_features), torch.ones(linears[name].out_features, RANK))
        for name in trained
    }
    tensors = to_layout(layout, family, loras, {name: one.out_features for name, one in linears.items()})
    read = getattr(diffusers, tuned.source.pipeline_name).lora_state_dict(tensors)
    names = {key.removeprefix("transformer.").removesuffix(".lora_A.weight") for key in read if "lora_A" in key}
    assert names >= set(trained)
    assert len(read) == 2 * len(names)
    for name in names:
        down, up = (read[f"transformer.{name}.{factor}.weight"] for factor in ("lora_A", "lora_B"))
        assert (down.shape[1], len(up)) == (linears[name].in_features, linears[name].out_features)
        assert bool(up.any()) == (name in trained), "the other parts of a joined linear are zeros"


@every_layout
def test_there_and_back(layout: Layout, family: str):
    sizes = sizes_of(family)
    linears = lora(sizes)
    back = from_layout(to_layout(layout, family, linears, sizes), family, sizes, RANK)
    assert back.keys() == linears.keys()
    for name, linear in linears.items():
        assert back[name].down.shape == linear.down.shape
        same(update(back[name]), update(linear))


def test_a_fused_lora_of_another_trainer_is_split():
    """One factor `lora_A` for queries, keys and values: each part gets it whole."""
    sizes = sizes_of("sd3")
    key = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    tensors = {f"{key}.lora_down.weight": torch.randn(RANK, WIDTH), f"{key}.lora_up.weight": torch.randn(18, RANK)}
    back = from_layout({**tensors, f"{key}.alpha": torch.tensor(1.0)}, "sd3", sizes, RANK)
    assert list(back) == [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    whole = 0.5 * tensors[f"{key}.lora_up.weight"] @ tensors[f"{key}.lora_down.weight"]
    same(torch.cat([update(linear) for linear in back.values()]), whole)


@pytest.mark.parametrize("family", NAMES)
def test_every_linear_that_is_trained_by_default_has_a_name(family: str, pipeline_folder: Callable[[str], Path]):
    """On the family's own model, with its own targets; what is not a block of several linears keeps its shape."""
    tuned = open_family(family, Source(str(pipeline_folder(family.replace("cosmos_video", "cosmos-first")))))
    part = tuned.experts[0][0]
    model = tuned.source.check(part)[part]
    found = find_linears(model, tuned.lora_targets)
    linears = {
        name: Linear(torch.ones(RANK, one.in_features), torch.ones(one.out_features, RANK), SCALE)
        for name, one in found.items()
    }
    sizes = {name: one.out_features for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    for layout, families in LAYOUTS.items():
        if family in families:
            tensors = to_layout(layout, family, linears, sizes)
            assert from_layout(tensors, family, sizes, RANK).keys() == linears.keys()


@pytest.mark.parametrize("key", ["diffusion_model.layers.0.attention.to_q", "lora_unet_layers_0_attention_to_q"])
def test_diffusers_names_under_other_prefixes(key: str):
    """As trainers of Z-Image write them, though its first release has one linear for three."""
    tensors = {f"{key}.lora_A.weight": torch.randn(RANK, WIDTH), f"{key}.lora_B.weight": torch.randn(6, RANK)}
    back = from_layout(tensors, "z_image", sizes_of("z_image"), RANK)
    assert list(back) == ["layers.0.attention.to_q"]
    same(update(back["layers.0.attention.to_q"]), tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"])


def test_a_layout_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match=r"--layout kohya is not defined for auraflow; it is for: flux, .*--merge"):
        to_layout("kohya", "auraflow", {}, {})
    with pytest.raises(ConfigError, match="Did you mean 'comfyui'"):
        to_layout("comfy", "flux", {}, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"norm_out.linear has no counterpart in the first release of flux's model"):
        to_layout("comfyui", "flux", {"norm_out.linear": Linear(torch.ones(1, 1), torch.ones(1, 1))}, {})
    assert set(NAMES) <= set(TUNE_FAMILIES)


def test_a_file_of_another_model_is_refused():
    tensors = {"lora_unet_input_blocks_1_0.lora_down.weight": torch.ones(1, 1)}
    with pytest.raises(ConfigError, match="which is no LoRA of a linear of flux's transformer"):
        from_layout(tensors, "flux", sizes_of("flux"), 1)
