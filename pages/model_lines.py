"""The models that `tread plan` knows by name, one line each; `python -m pages.models NAME` counts a new one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

SD_VAE = {"block_out_channels": (128, 256, 512, 512)}
WAN_VAE = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}
COSMOS_VAE = {"temperal_downsample": (False, True, True)}
COSMOS = {"num_attention_heads": 16, "extra_pos_embed_type": None, "concat_padding_mask": False}
"""Cosmos resizes a padding mask with torchvision and appends it; here it is one more channel of the latents."""
COSMOS_14B = {**COSMOS, "num_attention_heads": 40, "num_layers": 36}
COSMOS_TEXT = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 28 * 3584}
"""Cosmos Predict 2.5 projects the states of all layers of Qwen2.5-VL."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model; shapes may name settings of the transformer's config, and `T` is the number of text tokens."""

    family: str
    model: str
    title: str
    channels: int
    text: Mapping[str, tuple[int | str, ...]]
    vae: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    pipeline: int = 0
    """Index of the pipeline in the family's `pipelines`."""
    reads: int | None = None
    """Text tokens of a step; None: the longest that the family reads."""
    references: bool = False
    """Whether samples may have reference images."""
    reads_values: bool = False
    """Whether the forward reads the values of masks, such as the lengths of texts (`values.py`)."""
    frames: int = 1
    """Usual frames of a clip."""
    unit: int = 1
    """Token counts are multiples of it: the model pads to it, or its text has at least as many registers."""
    registers: int = 0
    """Tokens that the model adds to the text: learned ones, or inputs of one length."""
    texts: int = 1
    """Tokens in the sequence for each token of a text: several encoders read it."""
    padded: int = 0
    """Tokens that the model pads images to unless they are square."""
    idle: tuple[str, ...] = ()
    """Modules of a layer that do not run in training."""


_qwen = partial(
    Line,
    model="QwenImageTransformer2DModel",
    channels=16,
    text={"embeds": ("T", "joint_attention_dim")},
    vae={"temperal_downsample": (False, True, True)},
)
MODELS: dict[str, Line] = {
    "auraflow": Line(
        family="auraflow",
        model="AuraFlowTransformer2DModel",
        title="AuraFlow v0.3",
        channels=4,
        text={"embeds": ("T", "joint_attention_dim")},
        vae=SD_VAE,
        config={"pos_embed_max_size": 9216},
        registers=8,
    ),
    "cogvideox": Line(
        family="cogvideox",
        model="CogVideoXTransformer3DModel",
        title="CogVideoX 5B",
        channels=16,
        text={"embeds": ("T", "text_embed_dim")},
        vae={**SD_VAE, "temporal_compression_ratio": 4},
        config={"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        frames=49,
    ),
    "cosmos": Line(
        family="cosmos",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2, text to image, 2B",
        channels=17,
        text={"embeds": ("T", "text_embed_dim")},
        vae=COSMOS_VAE,
        config={**COSMOS, "in_channels": 17},
    ),
    "cosmos/14b": Line(
        family="cosmos",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2, text to image, 14B",
        channels=17,
        text={"embeds": ("T", "text_embed_dim")},
        vae=COSMOS_VAE,
        config={**COSMOS_14B, "in_channels": 17},
    ),
    "cosmos_video": Line(
        family="cosmos_video",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2, video to world, 2B",
        channels=17,
        text={"embeds": ("T", "text_embed_dim")},
        vae=COSMOS_VAE,
        config={**COSMOS, "in_channels": 18},
        frames=93,
    ),
    "cosmos_video/14b": Line(
        family="cosmos_video",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2, video to world, 14B",
        channels=17,
        text={"embeds": ("T", "text_embed_dim")},
        vae=COSMOS_VAE,
        config={**COSMOS_14B, "in_channels": 18},
        frames=93,
    ),
    "cosmos25": Line(
        family="cosmos25",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2.5, 2B",
        channels=17,
        text={"embeds": ("T", "crossattn_proj_in_channels")},
        vae=COSMOS_VAE,
        config={**COSMOS, **COSMOS_TEXT, "in_channels": 18},
        frames=93,
    ),
    "cosmos25/14b": Line(
        family="cosmos25",
        model="CosmosTransformer3DModel",
        title="Cosmos Predict 2.5, 14B",
        channels=17,
        text={"embeds": ("T", "crossattn_proj_in_channels")},
        vae=COSMOS_VAE,
        config={**COSMOS_14B, **COSMOS_TEXT, "in_channels": 18},
        frames=93,
    ),
    "cosmos3": Line(
        family="cosmos3",
        model="Cosmos3OmniTransformer",
        title="Cosmos 3 Nano",
        channels=48,
        text={"ids": ("T",)},
        vae={"scale_factor_spatial": 16, "scale_factor_temporal": 4},
        reads=256,
        frames=189,
    ),
    "flux": Line(
        family="flux",
        model="FluxTransformer2DModel",
        title="FLUX.1 dev and Krea",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={"guidance_embeds": True},
    ),
    "flux/kontext": Line(
        family="flux",
        model="FluxTransformer2DModel",
        title="FLUX.1 Kontext",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={"guidance_embeds": True},
        pipeline=1,
        references=True,
    ),
    "hidream": Line(
        family="hidream",
        model="HiDreamImageTransformer2DModel",
        title="HiDream-I1",
        channels=16,
        text={"t5": ("T", 4096), "llama": (32, "T", 4096), "pooled": ("text_emb_dim",)},
        vae=SD_VAE,
        config={
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": (4096, 4096),
            "axes_dims_rope": (64, 32, 32),
            "max_resolution": (128, 128),
            "llama_layers": (*range(32), *(31,) * 16),
        },
        reads=384,
        unit=3,  # a third of the text goes to each encoder
        texts=3,
        padded=4096,
    ),
    "hunyuanvideo": Line(
        family="hunyuanvideo",
        model="HunyuanVideo15Transformer3DModel",
        title="HunyuanVideo 1.5",
        channels=32,
        text={"embeds": ("T", "text_embed_dim"), "quoted": (8, "text_embed_2_dim")},
        vae={"spatial_compression_ratio": 16, "temporal_compression_ratio": 4},
        reads=256,
        reads_values=True,
        frames=121,
        unit=32,
        registers=256 + 729,  # quoted text, and the first frame or zeros in its place
    ),
    "hunyuanvideo1": Line(
        family="hunyuanvideo1",
        model="HunyuanVideoTransformer3DModel",
        title="HunyuanVideo 1.0",
        channels=16,
        text={"embeds": ("T", "text_embed_dim"), "pooled": ("pooled_projection_dim",)},
        vae={"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
        frames=129,
    ),
    "kandinsky5_image": Line(
        family="kandinsky5_image",
        model="Kandinsky5Transformer3DModel",
        title="Kandinsky 5 Image Lite",
        channels=16,
        text={"embeds": ("T", "in_text_dim"), "pooled": ("in_text_dim2",)},
        vae=SD_VAE,
        config={
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "model_dim": 2560,
            "ff_dim": 10240,
            "num_visual_blocks": 50,
            "axes_dims": (32, 48, 48),
        },
    ),
    "kandinsky5_video": Line(
        family="kandinsky5_video",
        model="Kandinsky5Transformer3DModel",
        title="Kandinsky 5 Video Lite",
        channels=16,
        text={"embeds": ("T", "in_text_dim"), "pooled": ("in_text_dim2",)},
        vae={"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
        config={"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True},
        frames=121,
    ),
    "krea2": Line(
        family="krea2",
        model="Krea2Transformer2DModel",
        title="Krea 2",
        channels=16,
        text={"embeds": ("T", "num_text_layers", "text_hidden_dim")},
        vae={"temperal_downsample": (False, True, True)},
    ),
    "ltxvideo": Line(
        family="ltxvideo",
        model="LTXVideoTransformer3DModel",
        title="LTX-Video 2B",
        channels=128,
        text={"embeds": ("T", "caption_channels")},
        vae={"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        frames=161,
    ),
    "ltxvideo2": Line(
        family="ltxvideo2",
        model="LTX2VideoTransformer3DModel",
        title="LTX-2 19B",
        channels=128,
        text={"embeds": ("T", "caption_channels"), "mask": ("T",)},
        vae={"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        frames=121,
        idle=("audio_to_video_attn", "video_to_audio_attn"),
    ),
    "lumina2": Line(
        family="lumina2",
        model="Lumina2Transformer2DModel",
        title="Lumina-Image 2.0",
        channels=16,
        text={"embeds": ("T", "cap_feat_dim")},
        vae=SD_VAE,
        config={"cap_feat_dim": 2304},
        reads_values=True,
    ),
    "pixart_sigma": Line(
        family="pixart_sigma",
        model="PixArtTransformer2DModel",
        title="PixArt-Sigma XL/2 1024",
        channels=4,
        text={"embeds": ("T", "caption_channels")},
        vae=SD_VAE,
        config={"sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False},
    ),
    "prx": Line(
        family="prx",
        model="PRXTransformer2DModel",
        title="PRX with FLUX's autoencoder",
        channels=16,
        text={"embeds": ("T", "context_in_dim")},
        vae=SD_VAE,
    ),
    "qwen_image": _qwen(
        family="qwen_image",
        title="Qwen-Image",
        reads=256,
    ),
    "qwen_image/edit": _qwen(
        family="qwen_image",
        title="Qwen-Image-Edit-Plus",
        pipeline=2,
        reads=448,  # 256 of a caption, and those of the reference that the text encoder sees
        references=True,
    ),
    "qwen_image21": Line(
        family="qwen_image21",
        model="QwenImage21Transformer2DModel",
        title="Qwen-Image 2.1",
        channels=64,
        text={"embeds": ("T", "context_in_dim")},
        vae={"scale_factor_spatial": 16},
        reads=256,
        reads_values=True,
        unit=4,
    ),
    "qwen_layered": _qwen(
        family="qwen_layered",
        title="Qwen-Image-Layered",
        config={"use_additional_t_cond": True, "use_layer3d_rope": True},
        reads=256,
        unit=2,  # as many tokens of the clean image as of the one that is drawn
    ),
    "sd3": Line(
        family="sd3",
        model="SD3Transformer2DModel",
        title="Stable Diffusion 3.5 medium",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "dual_attention_layers": tuple(range(13)),
        },
        reads=333,
    ),
    "sd3/large": Line(
        family="sd3",
        model="SD3Transformer2DModel",
        title="Stable Diffusion 3.5 large",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        reads=333,
    ),
    "wan": Line(
        family="wan",
        model="WanTransformer3DModel",
        title="Wan 2.1 and 2.2, 14B",
        channels=16,
        text={"embeds": ("T", "text_dim")},
        vae=WAN_VAE,
        frames=81,
    ),
    "wan/1.3b": Line(
        family="wan",
        model="WanTransformer3DModel",
        title="Wan 2.1, 1.3B",
        channels=16,
        text={"embeds": ("T", "text_dim")},
        vae=WAN_VAE,
        config={"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        frames=81,
    ),
    "chroma": Line(
        family="chroma",
        model="ChromaTransformer2DModel",
        title="Chroma1",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "mask": ("T",)},
        vae=SD_VAE,
    ),
    "flux2": Line(
        family="flux2",
        model="Flux2Transformer2DModel",
        title="FLUX.2 dev",
        channels=128,
        text={"embeds": ("T", "joint_attention_dim")},
        vae=SD_VAE,
        references=True,
    ),
    "z_image": Line(
        family="z_image",
        model="ZImageTransformer2DModel",
        title="Z-Image",
        channels=16,
        text={"embeds": ("T", "cap_feat_dim")},
        vae=SD_VAE,
        unit=32,
    ),
}
DITS = ("S/2", "B/2", "L/2", "XL/2")
"""Sizes of the DiT that `tread train` trains, for latents of 8 pixels each."""
