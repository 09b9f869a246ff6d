"""What fine-tuning needs to know of a model family: text, latents, the call, the target, the sampler.

- A family leans on its stock pipeline wherever that has a method: prompts are encoded by `pipeline.encode_prompt`,
  samples drawn by `pipeline(...)`. What is written here is what pipelines keep inside their `__call__`.
- A family is made for one `Source` and reads shapes from its configs; it holds no weights.
- Latents leave `encode_pixels` normalised, and `predict` takes and gives them in the same form: packing, ids and the
  sign and scale of time are inside it. Flow families predict the velocity noise - x at a time in (0, 1).
- One file per family in `families/`, one line in its table.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tread.finetune.families.autoencoders import encode_images, pixels_per_latent
from tread.finetune.source import Source
from tread.finetune.target import Distance, FlowTarget, Target

Text = dict[str, Tensor]
"""What a model reads of one caption, without a batch axis."""
Batch = dict[str, Tensor]
"""See the package's docs: `mean`, `std`, `weight`, `reference.mean`, `text.*` and what the family adds."""


JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""The linears of an attention that joins image and text: the image's, then the text's."""


class TuneFamily(ABC):
    """Subclass it, name it, and fill in what is abstract."""

    name: ClassVar[str]
    """`model_family` in a config."""
    pipelines: ClassVar[tuple[str, ...]]
    """The stock pipelines that are this family, as model_index.json names them."""
    text_parts: ClassVar[tuple[str, ...]]
    """What `encode_text` needs of the pipeline, e.g. ("tokenizer", "text_encoder")."""
    longest_text: ClassVar[int]
    """How many tokens of a caption the stock pipeline reads at most."""
    texts_differ: ClassVar[bool] = False
    """Whether batches have texts of different lengths, instead of all of them padded to the longest."""
    pixel_parts: ClassVar[tuple[str, ...]] = ("vae",)
    """What `encode_pixels` needs of it."""
    lora_targets: ClassVar[tuple[str, ...]]
    """The linears that get an adapter unless a config names others."""
    video: ClassVar[bool] = False
    """Whether latents have a frame axis; an image is then a video of one frame."""
    guidance: ClassVar[float]
    """The scale that previews are drawn with by default."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    steps: ClassVar[int]
    """The solver steps that previews are drawn with by default."""

    text_multiple = 1
    """Padded texts are a multiple of this long, so that compiled code sees few lengths."""

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        self.source = source
        self.text_length = text_length or self.longest_text

    @property
    def factor(self) -> int:
        """Pixels per latent, on each side."""
        return pixels_per_latent(self.source.config("vae"))

    @property
    def frame_factor(self) -> int:
        """Frames per latent frame; clips have 1 + a multiple of it."""
        return 1

    @property
    def patch(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns per token."""
        return 1, 2, 2

    @property
    def multiple(self) -> int:
        """Sides of training images are multiples of this many pixels."""
        return self.factor * self.patch[1]

    @property
    def takes_image(self) -> bool:
        """Whether the stock pipeline draws from an image beside the prompt."""
        import diffusers

        return "image" in inspect.signature(getattr(diffusers, self.source.pipeline_name).__call__).parameters

    @property
    def takes_references(self) -> bool:
        """Whether the model learns from pairs: a reference image beside each sample."""
        return False

    @property
    def experts(self) -> tuple[tuple[str, float, float], ...]:
        """The transformers, each with the range of times it is for; the first is called at the noisiest."""
        return (("transformer", 0.0, 1.0),)

    @abstractmethod
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        """What the model reads of each caption; without padding where the model has a text mask."""

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        """Texts of equal shape are stacked; a family with ragged text pads here and adds its mask."""
        return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        """Pixels (B, 3, F, H, W) in [-1, 1], F = 1 for images -> `mean` and, where the autoencoder has it, `std`.

        Normalised as the transformer sees them, (B, C, h, w), or (B, C, f, h, w) where `video`. What else the model
        is conditioned on (a first frame, say) goes beside them under its own name.
        """
        return encode_images(pipeline.vae, pixels)

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        """The training target; `shift` replaces the sampler's own."""
        return FlowTarget.from_scheduler(self.source.config("scheduler"), shift=shift, distance=distance)

    @abstractmethod
    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        """The model's prediction at the noisy latents, in their shape; time (B,) as `target` draws it."""

    def weight(self, batch: Batch) -> Tensor | None:
        """The loss weight that the family itself gives, like `mean` with one channel; None: all alike.

        Where it is 0 the model is given the clean latent (a first frame), whose tokens are forced.
        """
        return None

    def tokens(self, latents: Tensor) -> int:
        """How many target tokens latents of this shape have."""
        count = 1
        for size, patch in zip(self._grid(latents), self.patch, strict=True):
            count *= size // patch
        return count

    def any_in_token(self, latents: Tensor) -> Tensor:
        """Bool like latents with one channel -> (B, S): which tokens have a True anywhere in their patch."""
        grid = latents.reshape(len(latents), 1, *self._grid(latents)).float()  # (B, 1, F, H, W)
        return F.max_pool3d(grid, self.patch).flatten(1) > 0  # (B, S)

    def of_tokens(self, values: Tensor, latents: Tensor) -> Tensor:
        """A number per token, (B, S) -> the same for each latent of its patch, like latents with one channel."""
        frames, rows, columns = (size // patch for size, patch in zip(self._grid(latents), self.patch, strict=True))
        grid = values.reshape(len(values), 1, frames, rows, columns)
        for axis, patch in zip((2, 3, 4), self.patch, strict=True):
            grid = grid.repeat_interleave(patch, axis)
        return grid.reshape(len(values), 1, *latents.shape[2:])  # (B, 1, [F,] H, W)

    def _grid(self, latents: Tensor) -> tuple[int, int, int]:
        *frames, rows, columns = latents.shape[2:]
        return (frames[0] if frames else 1), rows, columns

    @abstractmethod
    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        """The stock pipeline's arguments for a prompt that is encoded already; `negative` where it is guided."""

    def exact_size(self, width: int, height: int) -> dict[str, Any]:
        """What else the stock pipeline must be told to draw this size and no other."""
        return {}

    def save_lora(self, folder: Any, layers: dict[str, dict[str, Tensor]], metadata: dict[str, dict[str, Any]]) -> None:
        """Write the LoRA of each transformer by the pipeline's own saver, so that its own loader reads it."""
        import diffusers

        cls: Any = getattr(diffusers, self.source.pipeline_name)
        cls.save_lora_weights(
            folder,
            **{f"{part}_lora_layers": tensors for part, tensors in layers.items()},
            **{f"{part}_lora_adapter_metadata": values for part, values in metadata.items()},
        )
