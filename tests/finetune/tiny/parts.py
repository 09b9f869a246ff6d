"""What tiny pipelines are made of: real tokenizers and autoencoders, random text encoders, and the case itself.

- Every builder seeds itself, so a part has the same weights in every process and every pipeline.
- Text encoders keep the real vocabulary and lose everything else.
- Random weights everywhere: a projection that starts at zero would hide what comes before it.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
DATA = Path(os.environ.get("TREAD_TEST_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One tiny pipeline folder and what the contract of test_families.py needs to know of it."""

    name: str
    family: str
    """`model_family`."""
    build: Callable[[], Any]
    """Makes the stock pipeline."""
    embedder: str
    """The module of the transformer that makes tokens of latents: (B, S, D), or (B, D, F, H, W), comes out."""
    frames: int = 1
    """Pixel frames of a sample."""
    size: tuple[int, int] = (64, 96)
    """Pixel rows and columns of a sample."""
    arguments: Callable[[Tensor], dict[str, Any]] = lambda pixels: {}
    """More arguments for a call of the pipeline, from pixels (1, 3, F, H, W) in [-1, 1]."""
    reference: bool = False
    """The pixels are the source image of an edit, `reference.mean` in a batch."""
    text: tuple[str, str] | None = None
    """The transformer's text argument and its mask, where texts are padded to no fixed length."""
    negative: str = "two dogs"
    """What guidance leads away from."""
    one_time: bool = False
    """The pipeline gives every token a time though all are the same; the family gives each sample one."""
    waits: tuple[str, ...] = ()
    """Lines of the stock model that wait for the device in every forward, in part."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """Latents as the pipeline's loop holds them."""

    def __call__(self, folder: Path) -> None:
        """Write the pipeline."""
        self.build().save_pretrained(folder)


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(DATA / "tokenizers/clip", model_max_length=77)


def t5_tokenizer() -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.T5TokenizerFast.from_pretrained(DATA / "tokenizers/t5")


def clip_text(*, hidden: int = 16, projection: bool = False, seed: int = 0) -> Any:
    """CLIPTextModel, or CLIPTextModelWithProjection; its pooled text has `hidden` numbers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=hidden,
        projection_dim=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=49407,
    )
    return randomised(CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config), seed)


def t5_text(*, hidden: int = 16, seed: int = 0) -> Any:
    """T5EncoderModel."""
    from transformers import T5Config, T5EncoderModel

    return randomised(T5EncoderModel(T5Config(**_t5(hidden))), seed)


def umt5_text(*, hidden: int = 16, seed: int = 0) -> Any:
    """UMT5EncoderModel, with T5's vocabulary."""
    from transformers import UMT5Config, UMT5EncoderModel

    return randomised(UMT5EncoderModel(UMT5Config(**_t5(hidden))), seed)


def _t5(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 32128,
        "d_model": hidden,
        "d_kv": hidden // 2,
        "d_ff": 2 * hidden,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def tiny_autoencoder(name: str, **config: Any) -> Any:
    """AutoencoderTiny with the real weights of `taesd`, `taesd3` or `taef1`."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    folder = DATA / "taesd"
    weights = {f"encoder.layers.{key}": v for key, v in load_file(folder / f"{name}_encoder.safetensors").items()}
    for key, value in load_file(folder / f"{name}_decoder.safetensors").items():
        layer, _, rest = key.partition(".")
        weights[f"decoder.layers.{int(layer) - 1}.{rest}"] = value  # their layer 0 is a clamp without weights
    model = AutoencoderTiny(latent_channels=4 if name == "taesd" else 16, **config)
    model.load_state_dict(weights)
    return model.float()


def kl_autoencoder(*, channels: int, stages: int = 4, seed: int = 0, **config: Any) -> Any:
    """AutoencoderKL with random weights, 2 ** (stages - 1) pixels per latent."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(seed)
    return diffusers.AutoencoderKL(
        latent_channels=channels,
        block_out_channels=(8,) * stages,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        layers_per_block=1,
        norm_num_groups=4,
        **config,
    )


def randomised(model: Model, seed: int = 0, *, scale: float = 0.7) -> Model:
    """All parameters drawn anew; `scale` is about what a layer multiplies the size of its input by."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            gain = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            spread = scale / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + gain)
    return model.eval()
