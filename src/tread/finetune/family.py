"""`TuneFamily`: the base class that describes a model family to fine-tuning.

- A family encodes text and pixels, calls the transformer, chooses the training target and names the arguments of the
  stock pipeline for previews. It uses methods of that pipeline wherever they exist (`encode_prompt`, `__call__`) and
  reimplements only what pipelines keep inside their `__call__`.
- A family is made for one `Source` and reads shapes from its configs; it holds no weights.
- Latents leave `encode_pixels` normalised, and `predict` takes and returns them in the same form: it does the packing,
  the position ids, and the sign and scale of time. Flow families predict the velocity noise - x at a time in (0, 1).
- Each family is one module in `families/` and one line in `TUNE_FAMILIES`.
"""

import inspect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.families.autoencoders import encode_images, frames_per_latent, pixels_per_latent
from tread.finetune.families.tokens import Patch
from tread.finetune.model.source import Source
from tread.finetune.target import Distance, EpsilonTarget, FlowTarget, Target, VelocityTarget

Text = dict[str, Tensor]
"""The embeddings of one caption by name, without a batch axis."""
Batch = dict[str, Tensor]
"""Tensors of a batch by name: `mean`, `std`, `weight`, `reference.mean` (`reference_2.mean`, ...), `text.*` and
tensors that the family adds."""


JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""The linears of an attention that joins image and text: the image's, then the text's."""
JOINT_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
"""The linears of the feed-forward layers beside it: the image's, then the text's."""

FEW_STEPS = frozenset(("turbo", "schnell", "flash", "fast", "lightning", "distilled"))
"""Words in the names of models that are distilled to a few steps."""


def reference_name(number: int) -> str:
    """The prefix of a reference's tensors in a batch: "reference", "reference_2", "reference_3", ..."""
    return "reference" if number == 0 else f"reference_{number + 1}"


def references(batch: Batch) -> list[Tensor]:
    """The latents of the reference images of a batch, in order."""
    names = (f"{reference_name(number)}.mean" for number in itertools.count())
    return [batch[name] for name in itertools.takewhile(batch.__contains__, names)]


class TuneFamily(ABC):
    """A model family; subclasses set the class variables without a default and implement the abstract methods."""

    name: ClassVar[str]
    """`model_family` in a config."""
    pipelines: ClassVar[tuple[str, ...]]
    """Classes of the stock pipelines of this family, as model_index.json names them."""
    text_parts: tuple[str, ...]
    """Parts of the pipeline that `encode_text` needs, e.g. ("tokenizer", "text_encoder")."""
    longest_text: ClassVar[int]
    """The most tokens of a caption that the stock pipeline reads."""
    whole_texts: ClassVar[bool] = False
    """Whether captions are always read whole and cannot be truncated."""
    texts_differ: ClassVar[bool] = False
    """Whether batches differ in text length; False: every text is padded to `text_length`."""
    one_length: ClassVar[bool] = False
    """Whether all texts of a batch must have the same length: the model has no text mask, or counts padding."""
    one_sample: ClassVar[bool] = False
    """Whether the stock model takes a batch size of 1 only; implies `one_length`."""
    one_dtype: ClassVar[bool] = False
    """Whether the stock model fails with float32 weights under autocast."""
    pixel_parts: tuple[str, ...] = ("vae",)
    """Parts of the pipeline that `encode_pixels` needs."""
    needed_parts: ClassVar[tuple[str, ...]] = ()
    """Parts without which the stock pipeline cannot be constructed."""
    drawing_parts: ClassVar[tuple[str, ...]] = ()
    """Further parts of the pipeline that previews need."""
    lora_targets: tuple[str, ...]
    """Names of the linears that get an adapter unless a config names others."""
    imported_first: ClassVar[str | None] = None
    """A module that must be imported before diffusers, else the stock pipeline does not load."""
    video: ClassVar[bool] = False
    """Whether latents have a frame axis; an image is then a video of one frame."""
    packages: tuple[str, ...] = ()
    """Packages that the stock pipeline needs beside diffusers and transformers."""
    alpha: ClassVar[bool] = False
    """Whether pixels have a fourth channel, for transparency."""
    layered: ClassVar[bool] = False
    """Whether a sample's references are its layers, which are generated too; a preview is given the image alone."""
    layers: int = 0
    """Layers of a preview, if `layered`."""
    sees_references: bool = False
    """Whether the text encoder sees the reference images too: `encode_seen` then encodes every caption."""
    sees_first_frame: bool = False
    """Whether the text encoder sees the first frame of a clip: `encode_seen` then encodes every caption."""
    guidance: float
    """Default guidance scale of previews."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for the guidance scale; `guider`: the scale belongs to that part of the pipeline."""
    target_class: ClassVar[type[FlowTarget | VelocityTarget | EpsilonTarget]] = FlowTarget
    """What the transformer predicts."""
    prompt_names: ClassVar[Mapping[str, str]] = {"embeds": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    """The pipeline's arguments for the tensors of a text; those of a negative prompt begin with `negative_`."""
    usual_side: ClassVar[int] = 1024
    """Pixels of the side of a square with the largest area that `tread init` suggests for images."""
    unguided: ClassVar[float] = 1.0
    """The guidance scale at which the pipeline does not guide."""
    steps: int
    """Default solver steps of previews."""
    few_steps: ClassVar[tuple[int, float] | None] = None
    """`steps` and `guidance` of a model that is distilled to a few steps; None: the same."""

    image_pipelines: ClassVar[dict[str, str]] = {}
    """Pipelines that draw from text alone -> the one that draws from a first frame with the same weights."""

    checkpoints_whole: ClassVar[bool] = True
    """Whether the stock model's activation checkpointing passes all arguments on; else layers checkpoint themselves."""

    result_name: ClassVar[str] = ""
    """The attribute of the stock pipeline's output that holds the pictures; empty: images, or frames of videos."""
    result_alone: ClassVar[bool] = False
    """Whether that attribute holds a single picture instead of a list."""

    text_multiple = 1
    """Texts are padded to a multiple of this many tokens, so that compiled code sees few lengths."""
    first_frame = False
    """Whether the model is conditioned on the first frame; `open_family` sets it for pipelines of `image_pipelines`."""
    frame_rate: float = 16
    """Frames per second of clips; `framerate` of a config replaces the family's."""
    sound_rate: int | None = None
    """Sampling rate of the sound that is trained with a clip, in Hz; None: sound is not trained."""

    def __init__(self, source: Source, text_length: int | None = None) -> None:
        if self.whole_texts and text_length is not None:
            raise ConfigError(
                f"tokenizer_max_length is {text_length}, but a {source.pipeline_name} reads captions whole: leave it "
                "out."
            )
        self.source = source
        self.text_length = text_length or self.longest_text
        if self.distilled and self.few_steps is not None:
            self.steps, self.guidance = self.few_steps

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The config of the transformer; of two, that of the first."""
        return self.source.config(self.experts[0][0])

    @property
    def factor(self) -> int:
        """Pixels per latent along height and width."""
        return pixels_per_latent(self.source.config("vae"))

    @property
    def frame_factor(self) -> int:
        """Frames per latent frame; a clip has 1 + a multiple of it."""
        return frames_per_latent(self.source.config("vae")) if self.video else 1

    @property
    def patch(self) -> Patch:
        """The patch of latents that makes one token, from the transformer's config."""
        config = self.transformer_config
        size = config.get("patch_size", 2)
        if isinstance(size, int):
            return Patch(config.get("patch_size_t") or 1, size, size)
        return Patch(*size)

    @property
    def multiple(self) -> int:
        """Sides of training images are multiples of this many pixels."""
        return self.factor * self.patch[1]

    @property
    def takes_image(self) -> bool:
        """Whether the stock pipeline takes an image beside the prompt."""
        return "image" in self.call_parameters

    @property
    def takes_last_image(self) -> bool:
        """Whether the model is conditioned on the last frame too."""
        return False

    @property
    def call_parameters(self) -> frozenset[str]:
        """Parameter names of the stock pipeline's `__call__`."""
        import diffusers

        return frozenset(inspect.signature(getattr(diffusers, self.source.pipeline_name).__call__).parameters)

    @property
    def needs_image(self) -> bool:
        """Whether the stock pipeline requires that image."""
        return self.takes_image and (self.needs_references or not self.takes_references)

    @property
    def reference_counts(self) -> range:
        """Numbers of reference images that a sample may have, e.g. range(1, 2) for pairs."""
        return range(1)

    @property
    def takes_references(self) -> bool:
        """Whether samples may have reference images."""
        return self.reference_counts.stop > 1

    @property
    def reference_fills(self) -> bool:
        """Whether a reference is resized to its sample: its latents are extra channels, not tokens of their own."""
        return False

    def reference_tokens(self, batch: Batch) -> int:
        """Number of tokens of a batch's references, which come after the target's."""
        return 0 if self.reference_fills else sum(map(self.tokens, references(batch)))

    @property
    def sees(self) -> Literal["references", "first frame"] | None:
        """The images of a sample that the text encoder sees beside its caption; None: none."""
        return "references" if self.sees_references else "first frame" if self.sees_first_frame else None

    @property
    def reference_shape(self) -> tuple[int, int] | None:
        """(pixels, multiple of the sides) of references if the stock pipeline scales them; None: as the data's."""
        return None

    @property
    def needs_references(self) -> bool:
        """Whether every sample must have a reference image."""
        return 0 not in self.reference_counts

    @property
    def distilled(self) -> bool:
        """Whether the model was distilled to a few steps, according to model_index.json or else to its name."""
        words = re.split(r"[\W_]+", Path(self.source.name_or_path).name.lower())
        return bool(self.source.index.get("is_distilled")) or not FEW_STEPS.isdisjoint(words)

    @property
    def experts(self) -> tuple[tuple[str, float, float], ...]:
        """(part, lowest time, highest time) of each transformer, the one for the noisiest times first."""
        return (("transformer", 0.0, 1.0),)

    def unfit(self, width: int, height: int, frames: int) -> str | None:
        """The reason why samples of this size (pixels, frames) cannot be trained on, with advice; None if they can."""
        return None

    @property
    def encoding(self) -> tuple[object, ...]:
        """Further inputs of `encode_pixels`, beside the pipeline class and its parts, for the cache key."""
        return ()

    @property
    def text_encoding(self) -> tuple[object, ...]:
        """Further inputs of `encode_text`, beside text length, pipeline class and parts, for the cache key."""
        return ()

    def stand_ins(self) -> dict[str, Any]:
        """Placeholders for parts that the stock pipeline's constructor requires but encoding does not use."""
        return {}

    @abstractmethod
    def encode_text(self, pipeline: Any, captions: Sequence[str]) -> list[Text]:
        """The embeddings of each caption, without padding if the model has a text mask."""

    def encode_seen(self, pipeline: Any, caption: str, images: Sequence[Image]) -> Text:
        """The embeddings of a caption with the images that the text encoder sees (`sees`)."""
        raise NotImplementedError

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        """One batch of texts. Texts of equal shape are stacked; a family with ragged text pads them and adds a mask."""
        return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}

    def collated(self, batch: Batch) -> Batch:
        """The batch with tensors added that depend on latents and text together; runs on the host, before the copy."""
        return batch

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Batch:
        """Pixels (B, 3, F, H, W) in [-1, 1], F = 1 for images -> latents `mean` and, if the autoencoder has it, `std`.

        They are normalised for the transformer: (B, C, h, w), or (B, C, f, h, w) if `video`. Other tensors that the
        model is conditioned on (a first frame, say) are returned under names of their own.
        """
        return encode_images(pipeline.vae, pixels)

    def target(self, *, shift: float | None, distance: Distance) -> Target:
        """The training target; `shift` replaces the shift of the stock scheduler."""
        return self.target_class.from_scheduler(self.source.config("scheduler"), shift=shift, distance=distance)

    def train_sound(self) -> None:
        """Train the sound of clips too; a family that draws sound sets `sound_rate`."""
        raise ConfigError(
            f"sound is 'train', but a {self.source.pipeline_name} draws no sound that tread finetune trains (that of "
            "LTX-2 is): leave sound out, or set it to 'keep'."
        )

    def encode_sound(self, pipeline: Any, waveform: Tensor) -> Batch:
        """Sound of clips (B, 2, N) at `sound_rate` -> normalised latents (B, L, D), `sound.mean` and `sound.std`."""
        raise NotImplementedError

    def predict_with_sound(
        self, model: nn.Module, noisy: Tensor, sound: Tensor, time: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The predictions for the noisy latents, as in `predict`, and for the noisy latents of their sound."""
        raise NotImplementedError

    @abstractmethod
    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Batch) -> Tensor:
        """The model's prediction for noisy latents, in their shape; time is (B,), as `target` draws it."""

    def weight(self, batch: Batch) -> Tensor | None:
        """The loss weight that the family itself sets, shaped like `mean` with one channel; None: 1 everywhere.

        Latents of weight 0 (a first frame) reach the model clean, by `predict`, and their tokens are forced.
        """
        return None

    def tokens(self, latents: Tensor) -> int:
        """Number of target tokens of latents of this shape."""
        return self.patch.tokens(latents)

    def shifting_tokens(self, latents: Tensor) -> int:
        """Number of tokens that determines the time shift of the target."""
        return self.tokens(latents)

    def complete(self, pipeline: Any) -> None:
        """Replace text parts that the stock pipeline calls even when it is given encoded prompts; for previews."""
        return

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        """The stock pipeline's arguments for an encoded prompt; `negative` is None without guidance."""
        texts = {"": text} if negative is None else {"": text, "negative_": negative}
        return {
            f"{prefix}{self.prompt_names[name]}": tensor
            for prefix, one in texts.items()
            for name, tensor in self.collate_text([one]).items()
        }

    def check_text_width(self, part: str, given: int | None, read: int) -> None:
        """Refuse a text encoder of another model; `given` is the width of its embeddings, None if unknown."""
        if given is not None and given != read:
            raise ConfigError(
                f"{part} of {self.source.name_or_path!r} gives embeddings of width {given}, but the transformer "
                f"reads {read}: it is another model's text encoder. Get that part of the model again."
            )

    def image_arguments(self, images: Sequence[Image], width: int, height: int) -> dict[str, Any]:
        """The stock pipeline's arguments for the images that a preview of this size starts from."""
        scaled = [image.resize((width, height)) for image in images]
        return {"image": scaled if len(scaled) > 1 else scaled[0]}

    def guide(self, pipeline: Any, scale: float) -> dict[str, float]:
        """The pipeline's argument that sets this guidance scale; for a `guider`, that part is replaced instead."""
        if self.guidance_argument != "guider":
            return {self.guidance_argument: scale}
        pipeline.guider = pipeline.guider.new(guidance_scale=scale)
        return {}

    def call_arguments(self) -> dict[str, Any]:
        """Further arguments for every call of the stock pipeline: the frame rate, where it takes one."""
        return {name: self.frame_rate for name in ("frame_rate", "fps") if name in self.call_parameters}

    def exact_size(self, width: int, height: int) -> dict[str, Any]:
        """Further arguments that make the stock pipeline draw exactly this size."""
        return {}
