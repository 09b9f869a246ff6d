"""The small FLUX: the stock transformer on pixels, called with class labels; and its captions."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tread.finetune.families.flux import Flux

from .arms import CLASSES, Scale

WORDS = 8
"""Tokens of a caption."""
MODULATIONS = ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")


def write_captions(wordllama: Path, path: Path) -> None:
    """Embed `a photo of a NAME` for each class by WordLlama's table; the last row is the empty caption."""
    from tokenizers import Tokenizer

    table = load_file(wordllama / "l2_supercat_256.safetensors")["embedding.weight"].float()  # (V, D)
    tokenizer = Tokenizer.from_file(str(wordllama / "l2_supercat_tokenizer_config.json"))
    found = torch.zeros(len(CLASSES) + 1, WORDS, table.shape[1])
    for row, name in enumerate(CLASSES):
        ids = tokenizer.encode(f"a photo of a {name}", add_special_tokens=False).ids[:WORDS]
        found[row, : len(ids)] = table[ids]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"captions": found}, path)


def caption_table(work: Path, *, smoke: bool) -> Tensor:
    """The captions that `write_captions` wrote, (C + 1, T, D)."""
    return random_captions() if smoke else load_file(work / "captions.safetensors")["captions"]


def random_captions() -> Tensor:
    """Captions for a run without WordLlama, (C + 1, T, D)."""
    return torch.randn(len(CLASSES) + 1, WORDS, 16, generator=torch.Generator().manual_seed(0))


class FluxOfClasses(nn.Module):
    """FluxTransformer2DModel as a network of images (B, 3, H, W), time (B,) and labels (B,); a pixel is a token."""

    captions: Tensor
    image_positions: Tensor
    text_positions: Tensor

    def __init__(self, scale: Scale, captions: Tensor, *, seed: int) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.transformer = FluxTransformer2DModel(
                in_channels=3,
                num_layers=scale.double_layers,
                num_single_layers=scale.single_layers,
                attention_head_dim=sum(scale.head_axes),
                num_attention_heads=scale.heads,
                joint_attention_dim=captions.shape[2],
                pooled_projection_dim=captions.shape[2],
                axes_dims_rope=scale.head_axes,
                guidance_embeds=False,
            )
        start_as_identity(self.transformer)
        rows = torch.arange(scale.side)
        grid = torch.stack([torch.zeros(scale.side**2, dtype=torch.long), *(
            axis.flatten() for axis in torch.meshgrid(rows, rows, indexing="ij")
        )], dim=1)  # (S, 3)  # fmt: skip
        self.register_buffer("captions", captions, persistent=False)
        self.register_buffer("image_positions", grid.float(), persistent=False)
        self.register_buffer("text_positions", torch.zeros(captions.shape[1], 3), persistent=False)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """The velocity, (B, 3, H, W)."""
        text = self.captions[labels]  # (B, T, D)
        found = self.transformer(
            hidden_states=x.flatten(2).mT,  # (B, S, 3)
            encoder_hidden_states=text,
            pooled_projections=text.mean(1),
            timestep=time,
            img_ids=self.image_positions,
            txt_ids=self.text_positions,
            return_dict=False,
        )[0]
        return found.mT.reshape(x.shape)


def start_as_identity(transformer: nn.Module) -> None:
    """adaLN-Zero: every layer starts as the identity (Peebles and Xie 2022, arXiv 2212.09748).

    The layers' own proj_out stays: behind a gate of zero it would never get a gradient.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (name == "proj_out" or name.endswith(MODULATIONS)):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def add_lora(net: FluxOfClasses, rank: int, targets: Sequence[str] = Flux.lora_targets) -> None:
    """A LoRA on the frozen transformer, by diffusers and peft; on the linears that `tread finetune` has by default."""
    from peft import LoraConfig

    net.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)))
