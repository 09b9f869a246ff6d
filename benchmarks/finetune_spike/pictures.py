"""What the models draw for a few captions, by the stock pipeline, with the adapter loaded as anybody would.

Guided by true classifier-free guidance, since the model has no guidance input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from .arms import TEXT_LENGTH

GUIDANCE = 3.0
SEED = 42


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The same prompts, noise and solver for every run."""

    base: Path
    """The pipeline that is tuned."""
    prompts: list[tuple[str, str]]
    """Captions, each with the folder that it is of: pretrain, tune or eval."""
    size: int
    steps: int

    def draw(self, folder: Path, results: Path, *, lora: bool) -> None:
        """One PNG per prompt in `results`, by the run in `folder`."""
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
        from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        # a LoRA goes on the transformer of its base; a full run has a transformer of its own
        given: dict[str, Any] = {}
        if not lora:
            given["transformer"] = FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=dtype)
        pipeline: Any = FluxPipeline.from_pretrained(self.base, dtype=dtype, **given)
        if lora:
            pipeline.load_lora_weights(folder)
        pipeline.to(device)
        pipeline.set_progress_bar_config(disable=True)
        count = len(self.prompts)
        output = pipeline(
            prompt=[caption for caption, _ in self.prompts],
            negative_prompt=[""] * count,
            true_cfg_scale=GUIDANCE,
            width=self.size,
            height=self.size,
            num_inference_steps=self.steps,
            max_sequence_length=TEXT_LENGTH,
            generator=[torch.Generator("cpu").manual_seed(SEED + index) for index in range(count)],
        )
        for index, image in enumerate(output.images):
            image.save(results / f"picture-{index}.png")


def save_pictures(rows: Mapping[str, Sequence[Path]], prompts: Sequence[tuple[str, str]], path: Path) -> None:
    """A labelled row of pictures per run, a column per prompt."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(rows),
        len(prompts),
        figsize=(1.2 * len(prompts) + 1, 1.2 * len(rows) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for axis, (caption, folder) in zip(axes[0], prompts, strict=True):
        axis.set_title(f"{caption[:18]}\n({folder})", fontsize=8)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
        for axis, picture in zip(line, pictures, strict=True):
            with Image.open(picture) as image:
                axis.imshow(image.convert("RGB").resize((128, 128)))
    figure.suptitle("the base trained on (pretrain), the others on (tune) too, none on (eval)", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
