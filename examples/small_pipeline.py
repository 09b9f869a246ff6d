"""A small pipeline to train from scratch: a tiny autoencoder, a small text encoder and the sizes of a transformer.

    python examples/small_pipeline.py data/small-auraflow
    tread finetune recipes/finetune/auraflow-scratch.yaml data=FOLDER

The autoencoder has 8 x 8 pixels per latent, the text encoder the width of `joint_attention_dim`. Name others with --vae
and --text, or write the pipeline of another family: `tread finetune` needs its folder in diffusers format, and none of
the transformer's weights.
"""

import argparse
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel
from diffusers.pipelines.aura_flow.pipeline_aura_flow import AuraFlowPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import AutoTokenizer, T5EncoderModel


def assemble(vae: Any, text_encoder: Any, tokenizer: Any) -> AuraFlowPipeline:
    """A pipeline around an autoencoder and a T5; its transformer has random weights, which training draws anew."""
    channels = vae.config.latent_channels
    transformer = AuraFlowTransformer2DModel(
        in_channels=channels,
        out_channels=channels,
        num_mmdit_layers=2,
        num_single_dit_layers=6,
        num_attention_heads=4,
        attention_head_dim=64,
        caption_projection_dim=256,  # heads times their size
        joint_attention_dim=text_encoder.config.d_model,
        pos_embed_max_size=1024,  # at most 32 x 32 patches of 2 x 2 latents: 512 pixels
    )
    return AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def main() -> None:
    """Write the pipeline to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae", default="madebyollin/taesd3", help="an AutoencoderTiny")
    parser.add_argument("--text", default="google-t5/t5-small", help="a T5 with its tokenizer")
    options = parser.parse_args()
    vae, text = AutoencoderTiny.from_pretrained(options.vae), T5EncoderModel.from_pretrained(options.text)
    assemble(vae, text, AutoTokenizer.from_pretrained(options.text)).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
