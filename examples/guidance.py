"""Sparse Guidance in stock FLUX and SD3 pipelines: attach routes, and call the pipeline inside `guide`.

    python examples/guidance.py                                # two tiny pipelines with random weights
    python examples/guidance.py --model FOLDER --prompt "a red fox" --out fox.png

FOLDER is a diffusers model with a transformer that `tread families` lists. Sparse Guidance wants a model that was
trained or tuned with routing: a model that never missed a token has no useful weak branch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tread
from tread.sampling.guidance import guide

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -3}]}
ATTENTION: Any = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}


def autoencoder() -> AutoencoderKL:
    tiny: Any = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "latent_channels": 16}
    tiny |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return AutoencoderKL(**tiny, scaling_factor=0.3611, shift_factor=0.1159)


def tiny_flux() -> FluxPipeline:
    """FLUX without its text encoders: the call below brings embeddings."""
    parts: Any = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=3,
        num_single_layers=4,
        axes_dims_rope=(4, 6, 6),
        pooled_projection_dim=32,
        **ATTENTION,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return FluxPipeline(scheduler=scheduler, vae=autoencoder(), transformer=transformer, **parts)


def tiny_sd3() -> StableDiffusion3Pipeline:
    parts: Any = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")}
    transformer = SD3Transformer2DModel(
        sample_size=16,
        num_layers=6,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        **ATTENTION,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return StableDiffusion3Pipeline(scheduler=scheduler, vae=autoencoder(), transformer=transformer, **parts)


def prompt_of(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """Made-up embeddings, and the sizes of a tiny call; SD3 also gets classifier-free guidance of its own."""
    generator = torch.Generator().manual_seed(0)
    names = ["prompt_embeds", "pooled_prompt_embeds"]
    if isinstance(pipeline, StableDiffusion3Pipeline):
        names += ["negative_prompt_embeds", "negative_pooled_prompt_embeds"]
    shapes = {name: (1, 32) if "pooled" in name else (1, 8, 32) for name in names}
    call: dict[str, Any] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return call | {"height": 128, "width": 128, "num_inference_steps": 4}


def compare(pipeline: Any, call: dict[str, Any], *, scale: float, weak_ratio: float) -> Any:
    """The pipeline unguided and with Sparse Guidance from the same noise; returns the guided image."""
    model: nn.Module = pipeline.transformer
    drawn: list[tuple[Any, float]] = []
    with tread.attach(model, ROUTES) as handle:
        for each in (1.0, scale):
            generator = torch.Generator().manual_seed(0)
            with guide(model, handle, scale=each, weak_ratio=weak_ratio), FlopCounterMode(display=False) as counter:
                drawn.append(
                    (pipeline(**call, generator=generator, output_type="pt").images, counter.get_total_flops())
                )
    (plain, cost), (guided, more) = drawn
    change = (guided - plain).abs().mean().item()
    print(f"{type(pipeline).__name__}: guidance moves pixels by {change:.4f} at {more / cost:.2f} times the FLOPs")
    return pipeline.image_processor.numpy_to_pil(pipeline.image_processor.pt_to_numpy(guided))[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sparse Guidance in a stock pipeline.")
    parser.add_argument("--model", help="a diffusers model (default: tiny random FLUX and SD3)")
    parser.add_argument("--prompt", default="a red fox in the snow")
    parser.add_argument("--scale", type=float, default=1.5)
    parser.add_argument("--weak-ratio", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("guided.png"), help="with --model: the guided image")
    options = parser.parse_args(arguments)
    guidance = {"scale": options.scale, "weak_ratio": options.weak_ratio}
    if options.model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pipeline = DiffusionPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16).to(device)
        compare(pipeline, {"prompt": options.prompt}, **guidance).save(options.out)
        return
    torch.manual_seed(0)
    for pipeline in (tiny_flux(), tiny_sd3()):
        pipeline.set_progress_bar_config(disable=True)
        for parameter in pipeline.transformer.parameters():  # a fresh model answers zero, whatever it is asked
            nn.init.normal_(parameter, std=0.1)
        compare(pipeline, prompt_of(pipeline), **guidance)


if __name__ == "__main__":
    main()
