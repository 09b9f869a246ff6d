"""LTX-2: of text, of a first frame, 2.3, whose text is projected for each modality, and 2.5; drawn without sound.

The stock pipeline draws both streams with attention between them; a hook isolates them, as its own guidance does.
"""

import importlib
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.tiny.autoencoders import ltx2_autoencoders
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import gemma3_text
from tests.tiny.tokenizers import gemma_tokenizer
from tests.tiny.weights import randomised

VIDEO = {"in_channels": 8, "out_channels": 8, "num_layers": 4, "attention_head_dim": 12, "cross_attention_dim": 24}
AUDIO = {"audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}
GATES = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
NEWER: dict[str, Any] = GATES | {"rope_type": "split", "perturbed_attn": True, "use_prompt_embeddings": False}
"""The transformer of LTX-2.3."""
NEWEST: dict[str, Any] = {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True}
"""What LTX-2.5 has beside it."""


def build(pipeline: str = "LTX2Pipeline", *, newer: bool = False, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    connectors: Any = importlib.import_module("diffusers.pipelines.ltx2.connectors")
    shifts = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    sizes = {**VIDEO, **AUDIO, "caption_channels": 16, **(NEWER if newer else {}), **config}
    heads = {"video_connector_num_attention_heads": 2, "audio_connector_num_attention_heads": 2}
    heads |= {"video_connector_attention_head_dim": 12 if newer else 8, "audio_connector_attention_head_dim": 8}
    heads |= {"video_connector_num_learnable_registers": 8, "audio_connector_num_learnable_registers": 8}
    projections = {"per_modality_projections": True, "video_hidden_dim": 24, "audio_hidden_dim": 16} if newer else {}
    text = connectors.LTX2TextConnectors(caption_channels=16, text_proj_in_factor=3, **heads, **projections)
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shifts, use_dynamic_shifting=True),
        text_encoder=gemma3_text(),
        tokenizer=gemma_tokenizer(),
        connectors=randomised(text),
        transformer=randomised(tiny(diffusers.LTX2VideoTransformer3DModel, **sizes)(), scale=1.0),
        **ltx2_autoencoders(),
    )


def isolate(pipeline: Any) -> None:
    """Make the pipeline draw video and sound apart; arguments are changed before others see them."""

    def apart(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, named | ({"isolate_modalities": True} if "audio_coords" in named else {})  # else it is no pipeline

    pipeline.transformer.register_forward_pre_hook(apart, with_kwargs=True, prepend=True)
    pipeline.scheduler._step_index = None  # sound is stepped by a copy, which goes on where the last call ended


def given(pipeline: Any, latents: Tensor) -> Tensor:
    """As the pipeline returns them."""
    vae = pipeline.vae
    return pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


PLAIN = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "use_cross_timestep": True}
AS_VIDEO = dict.fromkeys(("audio_guidance_scale", "audio_stg_scale", "audio_modality_scale", "audio_guidance_rescale"))
ltx = partial(
    Tiny,
    family="ltxvideo2",
    embedder="proj_in",
    frames=9,
    size=(128, 128),
    arguments=lambda pixels: PLAIN | AS_VIDEO,
    prepare=isolate,
    pack=given,
    decodes=False,  # the scheduler steps sound too
    unread=(
        *("audio_coords", "audio_num_frames", "audio_timestep", "use_cross_timestep"),
        *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
    ),
)
CASES = [
    ltx(name="ltxvideo2", build=build),
    ltx(
        name="ltxvideo2-first",
        build=partial(build, "LTX2ImageToVideoPipeline"),
        arguments=lambda pixels: first_frame(pixels) | PLAIN | AS_VIDEO | {"image_crf": 0},
    ),
    ltx(name="ltxvideo2-2.3", build=partial(build, newer=True)),
    ltx(name="ltxvideo2-2.5", build=partial(build, newer=True, **NEWEST)),
]
