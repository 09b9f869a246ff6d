"""What travels to the GPU: a FLUX pipeline without its transformer, and the emoji in folders.

- The autoencoder is the real taef1.
- Text is WordLlama's table of token embeddings: it is the embedding of a T5 encoder with no layers, whose final norm
  is all that happens to it. FLUX gives its text tokens no position, so a caption is a bag of words.
- The pooled text is CLIP's by form only: its weights are random and frozen, a fingerprint of the caption.
- The transformer's weights are made where they are trained: they would be four times as large as all the rest.
- Two groups are held out from the base. A fifth of them is never trained on at all.
"""

import csv
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .arms import POOLED_WIDTH, TEXT_WIDTH, Scale

HELD_OUT = ("Animals & Nature", "Food & Drink")
EVERY = 5
"""One of so many images of the held-out groups is for validation."""


def prepare(data: Path, out: Path, scale: Scale) -> None:
    """Write OUT/base and OUT/data."""
    counts = write_images(data / "emoji3d", out / "data", scale)
    print(", ".join(f"{name}: {count} images" for name, count in counts.items()))
    write_pipeline(data, out / "base", scale)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


def write_images(emoji: Path, folder: Path, scale: Scale) -> dict[str, int]:
    """The emoji with their captions in pretrain/, tune/ and eval/; returns how many of each."""
    groups: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    with (emoji / "captions.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["skin_tone_variant"] == "0":
                groups[row["group"]].append(row)
    counts = {"pretrain": 0, "tune": 0, "eval": 0}
    with zipfile.ZipFile(emoji / "emoji3d_256.zip") as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        for group, rows in groups.items():
            for index, row in enumerate(rows[: scale.images_per_group]):
                held_out = "eval" if index % EVERY == EVERY - 1 else "tune"
                name = held_out if group in HELD_OUT else "pretrain"
                path = folder / name / row["file"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(members[row["file"]]))
                path.with_suffix(".txt").write_text(row["caption"], encoding="utf-8")
                counts[name] += 1
    return counts


def some_captions(folder: Path, count: int) -> list[str]:
    """The captions of some images of a folder, spread evenly over it."""
    paths = sorted(folder.glob("*.txt"))
    chosen = [paths[index * len(paths) // count] for index in range(count)]
    return [path.read_text(encoding="utf-8") for path in chosen]


def write_pipeline(data: Path, folder: Path, scale: Scale) -> None:
    """A FluxPipeline; of its transformer, the config alone."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**scale.transformer)
    tokenizer, text_encoder = clip(data / "tokenizers" / "clip")
    tokenizer_2, text_encoder_2 = wordllama(data / "wordllama")
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=taef1(data / "taesd"),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=None,  # pyright: ignore[reportArgumentType]
    )
    pipeline.save_pretrained(folder)
    transformer.save_config(folder / "transformer")
    pipeline.register_modules(transformer=transformer)
    pipeline.save_config(folder)


def taef1(folder: Path) -> Any:
    """AutoencoderTiny with the published weights of taef1, whose names differ from diffusers'."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    encoder, decoder = (load_file(folder / f"taef1_{half}.safetensors") for half in ("encoder", "decoder"))
    weights = {f"encoder.layers.{name}": tensor for name, tensor in encoder.items()}
    for name, tensor in decoder.items():
        layer, _, rest = name.partition(".")
        weights[f"decoder.layers.{int(layer) - 1}.{rest}"] = tensor  # their layer 0 is a clamp, which has no weights
    vae = AutoencoderTiny(latent_channels=16)
    vae.load_state_dict(weights)
    return vae.half()


def wordllama(folder: Path) -> tuple[Any, Any]:
    """Its tokenizer, and its table as a T5 encoder without layers."""
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    padding = "</s>"  # which WordLlama's tokenizer never adds by itself
    table = load_file(folder / "l2_supercat_256.safetensors")["embedding.weight"]  # (V, D)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "l2_supercat_tokenizer_config.json"),
        unk_token="<unk>",
        bos_token="<s>",
        pad_token=padding,
        model_max_length=512,
    )
    pad = tokenizer.get_vocab()[padding]
    config = T5Config(vocab_size=len(table), d_model=TEXT_WIDTH, num_layers=0, pad_token_id=pad)
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        encoder.shared.weight.copy_(table)
        encoder.shared.weight[pad] = 0  # nine tenths of a text are padding, which says nothing
    return tokenizer, encoder.half().eval()


def clip(folder: Path) -> tuple[Any, Any]:
    """The real tokenizer, and a random encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=77)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=POOLED_WIDTH,
        intermediate_size=2 * POOLED_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tokenizer, CLIPTextModel(config).half()
