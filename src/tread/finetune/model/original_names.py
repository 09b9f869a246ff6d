"""Tables from the linear names of the models' first releases, which ComfyUI and kohya's trainers use, to diffusers'.

- A table has an original name on the left and diffusers' on the right; `{}` is the number of a block. If the
  original fuses several of diffusers' linears, they are listed in the order of their rows.
- A linear without an entry has no counterpart, e.g. the last norms, whose rows diffusers reorders.
- `LAYOUTS` says for which families each layout exists. A family joins with a table and its name there.
"""

from collections.abc import Mapping
from typing import Literal

Names = Mapping[str, tuple[str, ...]]
"""Original name -> diffusers' names."""
Layout = Literal["comfyui", "kohya"]


def _qkv(attention: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{attention}.{name}" for name in names or ("to_q", "to_k", "to_v"))


_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
_JOINT, _SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"


def _one(names: Mapping[str, str]) -> Names:
    return {original: (own,) for original, own in names.items()}


CHROMA: Names = {
    "double_blocks.{}.img_attn.qkv": _qkv(f"{_JOINT}.attn"),
    "double_blocks.{}.txt_attn.qkv": _qkv(f"{_JOINT}.attn", *_ADDED),
    "single_blocks.{}.linear1": (*_qkv(f"{_SINGLE}.attn"), f"{_SINGLE}.proj_mlp"),
    **_one(
        {
            "double_blocks.{}.img_attn.proj": f"{_JOINT}.attn.to_out.0",
            "double_blocks.{}.txt_attn.proj": f"{_JOINT}.attn.to_add_out",
            "double_blocks.{}.img_mlp.0": f"{_JOINT}.ff.net.0.proj",
            "double_blocks.{}.img_mlp.2": f"{_JOINT}.ff.net.2",
            "double_blocks.{}.txt_mlp.0": f"{_JOINT}.ff_context.net.0.proj",
            "double_blocks.{}.txt_mlp.2": f"{_JOINT}.ff_context.net.2",
            "single_blocks.{}.linear2": f"{_SINGLE}.proj_out",
            "img_in": "x_embedder",
            "txt_in": "context_embedder",
            "final_layer.linear": "proj_out",
        }
    ),
}
FLUX: Names = {
    **CHROMA,
    **_one(
        {
            "double_blocks.{}.img_mod.lin": f"{_JOINT}.norm1.linear",
            "double_blocks.{}.txt_mod.lin": f"{_JOINT}.norm1_context.linear",
            "single_blocks.{}.modulation.lin": f"{_SINGLE}.norm.linear",
            "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
            "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
            "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
            "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
            "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
            "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        }
    ),
}
FLUX2: Names = {
    "double_blocks.{}.img_attn.qkv": _qkv(f"{_JOINT}.attn"),
    "double_blocks.{}.txt_attn.qkv": _qkv(f"{_JOINT}.attn", *_ADDED),
    **_one(
        {
            "double_blocks.{}.img_attn.proj": f"{_JOINT}.attn.to_out.0",
            "double_blocks.{}.txt_attn.proj": f"{_JOINT}.attn.to_add_out",
            "double_blocks.{}.img_mlp.0": f"{_JOINT}.ff.linear_in",
            "double_blocks.{}.img_mlp.2": f"{_JOINT}.ff.linear_out",
            "double_blocks.{}.txt_mlp.0": f"{_JOINT}.ff_context.linear_in",
            "double_blocks.{}.txt_mlp.2": f"{_JOINT}.ff_context.linear_out",
            "single_blocks.{}.linear1": f"{_SINGLE}.attn.to_qkv_mlp_proj",
            "single_blocks.{}.linear2": f"{_SINGLE}.attn.to_out",
            "img_in": "x_embedder",
            "txt_in": "context_embedder",
            "final_layer.linear": "proj_out",
        }
    ),
}
SD3: Names = {
    "joint_blocks.{}.x_block.attn.qkv": _qkv(f"{_JOINT}.attn"),
    "joint_blocks.{}.x_block.attn2.qkv": _qkv(f"{_JOINT}.attn2"),
    "joint_blocks.{}.context_block.attn.qkv": _qkv(f"{_JOINT}.attn", *_ADDED),
    **_one(
        {
            "joint_blocks.{}.x_block.attn.proj": f"{_JOINT}.attn.to_out.0",
            "joint_blocks.{}.x_block.attn2.proj": f"{_JOINT}.attn2.to_out.0",
            "joint_blocks.{}.context_block.attn.proj": f"{_JOINT}.attn.to_add_out",
            "joint_blocks.{}.x_block.mlp.fc1": f"{_JOINT}.ff.net.0.proj",
            "joint_blocks.{}.x_block.mlp.fc2": f"{_JOINT}.ff.net.2",
            "joint_blocks.{}.context_block.mlp.fc1": f"{_JOINT}.ff_context.net.0.proj",
            "joint_blocks.{}.context_block.mlp.fc2": f"{_JOINT}.ff_context.net.2",
            "joint_blocks.{}.x_block.adaLN_modulation.1": f"{_JOINT}.norm1.linear",
            "context_embedder": "context_embedder",
            "final_layer.linear": "proj_out",
        }
    ),
}
_AURA_JOINT = "joint_transformer_blocks.{}"
AURAFLOW: Names = _one(
    {
        **{
            f"double_layers.{{}}.attn.{original}": f"{_AURA_JOINT}.attn.{own}"
            for original, own in {
                **{"w2q": "to_q", "w2k": "to_k", "w2v": "to_v", "w2o": "to_out.0"},
                **{"w1q": "add_q_proj", "w1k": "add_k_proj", "w1v": "add_v_proj", "w1o": "to_add_out"},
            }.items()
        },
        **{
            f"double_layers.{{}}.{original}.{layer}": f"{_AURA_JOINT}.{own}.{name}"
            for original, own in {"mlpX": "ff", "mlpC": "ff_context"}.items()
            for layer, name in {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}.items()
        },
        **{
            f"single_layers.{{}}.attn.{original}": f"{_SINGLE}.attn.{own}"
            for original, own in {"w1q": "to_q", "w1k": "to_k", "w1v": "to_v", "w1o": "to_out.0"}.items()
        },
        **{
            f"single_layers.{{}}.mlp.{layer}": f"{_SINGLE}.ff.{name}"
            for layer, name in {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}.items()
        },
        "double_layers.{}.modX.1": f"{_AURA_JOINT}.norm1.linear",
        "double_layers.{}.modC.1": f"{_AURA_JOINT}.norm1_context.linear",
        "single_layers.{}.modCX.1": f"{_SINGLE}.norm1.linear",
        "cond_seq_linear": "context_embedder",
        "final_linear": "proj_out",
    }
)
_REFINER, _TOKEN = "txt_in.individual_token_refiner.blocks.{}", "context_embedder.token_refiner.refiner_blocks.{}"
HUNYUANVIDEO: Names = {
    "double_blocks.{}.img_attn_qkv": _qkv(f"{_JOINT}.attn"),
    "double_blocks.{}.txt_attn_qkv": _qkv(f"{_JOINT}.attn", *_ADDED),
    "single_blocks.{}.linear1": (*_qkv(f"{_SINGLE}.attn"), f"{_SINGLE}.proj_mlp"),
    f"{_REFINER}.self_attn_qkv": _qkv(f"{_TOKEN}.attn"),
    **_one(
        {
            "double_blocks.{}.img_attn_proj": f"{_JOINT}.attn.to_out.0",
            "double_blocks.{}.txt_attn_proj": f"{_JOINT}.attn.to_add_out",
            "double_blocks.{}.img_mlp.fc1": f"{_JOINT}.ff.net.0.proj",
            "double_blocks.{}.img_mlp.fc2": f"{_JOINT}.ff.net.2",
            "double_blocks.{}.txt_mlp.fc1": f"{_JOINT}.ff_context.net.0.proj",
            "double_blocks.{}.txt_mlp.fc2": f"{_JOINT}.ff_context.net.2",
            "double_blocks.{}.img_mod.linear": f"{_JOINT}.norm1.linear",
            "double_blocks.{}.txt_mod.linear": f"{_JOINT}.norm1_context.linear",
            "single_blocks.{}.linear2": f"{_SINGLE}.proj_out",
            "single_blocks.{}.modulation.linear": f"{_SINGLE}.norm.linear",
            f"{_REFINER}.self_attn_proj": f"{_TOKEN}.attn.to_out.0",
            f"{_REFINER}.mlp.fc1": f"{_TOKEN}.ff.net.0.proj",
            f"{_REFINER}.mlp.fc2": f"{_TOKEN}.ff.net.2",
        }
    ),
}
WAN: Names = _one(
    {
        **{
            f"blocks.{{}}.{original}_attn.{linear}": f"blocks.{{}}.{own}.{name}"
            for original, own in {"self": "attn1", "cross": "attn2"}.items()
            for linear, name in {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}.items()
        },
        "blocks.{}.cross_attn.k_img": "blocks.{}.attn2.add_k_proj",
        "blocks.{}.cross_attn.v_img": "blocks.{}.attn2.add_v_proj",
        "blocks.{}.ffn.0": "blocks.{}.ffn.net.0.proj",
        "blocks.{}.ffn.2": "blocks.{}.ffn.net.2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "head.head": "proj_out",
    }
)


def _next_dit(block: str, attention: str, feed_forward: Mapping[str, str]) -> Names:
    """A block of Lumina 2 or Z-Image, whose original attention fuses queries, keys and values into one linear."""
    return {
        f"{block}.attention.qkv": _qkv(f"{block}.{attention}"),
        f"{block}.attention.out": (f"{block}.{attention}.to_out.0",),
        **{f"{block}.feed_forward.{name}": (f"{block}.feed_forward.{other}",) for name, other in feed_forward.items()},
    }


_STACKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
LUMINA2: Names = {
    **{
        original: own
        for stack in _STACKS
        for original, own in _next_dit(stack, "attn", {"w1": "linear_1", "w2": "linear_2", "w3": "linear_3"}).items()
    },
    "layers.{}.adaLN_modulation.1": ("layers.{}.norm1.linear",),
    "noise_refiner.{}.adaLN_modulation.1": ("noise_refiner.{}.norm1.linear",),
}
Z_IMAGE: Names = {
    original: own
    for stack in _STACKS
    for original, own in _next_dit(stack, "attention", {"w1": "w1", "w2": "w2", "w3": "w3"}).items()
}
COSMOS: Names = _one(
    {
        **{
            f"blocks.{{}}.{original}.{linear}": f"transformer_blocks.{{}}.{own}.{name}"
            for original, own in {"self_attn": "attn1", "cross_attn": "attn2"}.items()
            for linear, name in {
                "q_proj": "to_q",
                "k_proj": "to_k",
                "v_proj": "to_v",
                "output_proj": "to_out.0",
            }.items()
        },
        "blocks.{}.mlp.layer1": "transformer_blocks.{}.ff.net.0.proj",
        "blocks.{}.mlp.layer2": "transformer_blocks.{}.ff.net.2",
    }
)
KREA2: Names = _one(
    {
        f"{original}.{linear}": f"{own}.{name}"
        for original, own in {
            "blocks.{}": "transformer_blocks.{}",
            "txtfusion.layerwise_blocks.{}": "text_fusion.layerwise_blocks.{}",
            "txtfusion.refiner_blocks.{}": "text_fusion.refiner_blocks.{}",
        }.items()
        for linear, name in {
            **{"attn.wq": "attn.to_q", "attn.wk": "attn.to_k", "attn.wv": "attn.to_v", "attn.wo": "attn.to_out.0"},
            **{"attn.gate": "attn.to_gate", "mlp.gate": "ff.gate", "mlp.up": "ff.up", "mlp.down": "ff.down"},
        }.items()
    }
)


def _kept(*linears: str) -> Names:
    """Linears of blocks with the same name in diffusers and in the release."""
    return {f"{_JOINT}.{name}": (f"{_JOINT}.{name}",) for name in linears}


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LTX: Names = {
    **_kept(*(f"{attention}.{linear}" for attention in ("attn1", "attn2") for linear in _ATTENTION)),
    **_kept("ff.net.0.proj", "ff.net.2"),
    **_one({"patchify_proj": "proj_in", "proj_out": "proj_out"}),
}
LTX2: Names = {
    **LTX,
    **_kept(
        *(
            f"{attention}.{linear}"
            for attention in ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
            for linear in _ATTENTION
        )
    ),
    **_kept("audio_ff.net.0.proj", "audio_ff.net.2"),
}
QWEN_IMAGE: Names = {
    **_kept(*(f"attn.{linear}" for linear in (*_ATTENTION, *_ADDED, "to_add_out")), "img_mod.1", "txt_mod.1"),
    **_kept(*(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2"))),
    **_one({name: name for name in ("img_in", "txt_in", "proj_out")}),
}
QWEN_IMAGE21: Names = {
    **_kept(*(f"attn.{linear}" for linear in _ATTENTION), "img_mlp.out"),
    f"{_JOINT}.img_mlp.gate_up": (f"{_JOINT}.img_mlp.gate_layer", f"{_JOINT}.img_mlp.proj"),
    **_one({name: name for name in ("img_in", "proj_out")}),
}
HIDREAM: Names = _one(
    {
        name: name
        for block in ("double_stream_blocks.{}.block", "single_stream_blocks.{}.block")
        for name in (
            f"{block}.attn1.{linear}{text}" for linear in ("to_q", "to_k", "to_v", "to_out") for text in ("", "_t")
        )
    }
)

NAMES: dict[str, Names] = {
    "flux": FLUX,
    "chroma": CHROMA,
    "flux2": FLUX2,
    "sd3": SD3,
    "auraflow": AURAFLOW,
    "hunyuanvideo1": HUNYUANVIDEO,
    "wan": WAN,
    "ltxvideo": LTX,
    "ltxvideo2": LTX2,
    "qwen_image": QWEN_IMAGE,
    "qwen_image21": QWEN_IMAGE21,
    "qwen_layered": QWEN_IMAGE,
    "lumina2": LUMINA2,
    "z_image": Z_IMAGE,
    "cosmos": COSMOS,
    "cosmos_video": COSMOS,
    "krea2": KREA2,
    "hidream": HIDREAM,
}
"""The table of each model_family that has one."""
LAYOUTS: dict[Layout, tuple[str, ...]] = {
    "comfyui": tuple(NAMES),
    "kohya": ("flux", "chroma", "flux2", "sd3", "hunyuanvideo1", "wan", "qwen_image", "lumina2", "z_image"),
}
"""The families for which each layout is defined: kohya's trainers (sd-scripts, musubi-tuner) train fewer."""
