"""The settings of a planned run, checked against the model."""

from dataclasses import dataclass, replace

from tread.errors import ConfigError, check_choice, check_int
from tread.report.planning.models import Model
from tread.report.planning.tables import ADAPTER_PRECISIONS, CHECKPOINTING, FULL_PRECISIONS, OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: the size of its samples, the trained weights and the precision. `make_run` fills in defaults."""

    width: int
    height: int
    frames: int
    references: int
    """Reference images of the target's size; with `image_layers`, the input image counts as one."""
    image_layers: int
    """RGBA layers that the image is decomposed into, each as large as the image."""
    batch: int
    text: int
    way: str
    """`lora`: an adapter on the family's own linears, `attention`: on attention's alone, `full`: all weights."""
    rank: int
    precision: str
    optimizer: str
    checkpointing: str
    graphs: bool
    ema: bool
    offload: int = 0
    """Layers whose weights are in host memory."""

    @property
    def sides(self) -> tuple["Run", "Run"]:
        """The run of dense steps and of routed ones; they differ if only dense steps are checkpointed."""
        if self.checkpointing != "dense":
            return self, self
        return replace(self, checkpointing="full"), replace(self, checkpointing="none")


def make_run(
    model: Model,
    *,
    resolution: str | None = None,
    frames: int | None = None,
    references: int = 0,
    image_layers: int | None = None,
    batch: int | None = None,
    text: int | None = None,
    way: str | None = None,
    rank: int = 16,
    precision: str | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    graphs: bool = False,
    ema: bool | None = None,
) -> Run:
    """The run of a model; None takes the model's default. `resolution` is a side in pixels or WIDTHxHEIGHT."""
    way = model.ways[0] if way is None else way
    if way not in model.ways:
        what = "only all weights" if model.ways == ("full",) else "a LoRA on its own linears, which are attention's,"
        raise ConfigError(f"{model.name} has no plan for {way!r}: {what} can be trained; leave that option out.")
    allowed = precisions_of(model, way)
    precision = allowed[0] if precision is None else precision
    if precision not in allowed:
        what = "all weights are trained" if way == "full" else "an adapter is trained"
        raise ConfigError(f"--precision is {precision!r}; where {what} it must be one of: {', '.join(allowed)}.")
    width, height = _size(model, resolution)
    return Run(
        width=width,
        height=height,
        frames=_frames(model, frames),
        references=_references(model, references),
        image_layers=_image_layers(model, image_layers),
        batch=_batch(model, batch),
        text=_text(model, text),
        way=way,
        rank=check_int(rank, "--lora", 1),
        precision=precision,
        optimizer=check_choice(optimizer, "--optimizer", OPTIMIZERS),
        checkpointing=check_choice(checkpointing, "--checkpointing", CHECKPOINTING),
        graphs=graphs,
        ema=not model.pretrained if ema is None else ema,
    )


def precisions_of(model: Model, way: str) -> tuple[str, ...]:
    """Precisions of the base, the default first."""
    precisions = FULL_PRECISIONS if way == "full" else ADAPTER_PRECISIONS
    return tuple(name for name in precisions if not (model.one_dtype and name == "fp32"))


def _size(model: Model, resolution: str | None) -> tuple[int, int]:
    if resolution is None:
        return model.size
    sides = resolution.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ConfigError(f"--resolution is {resolution!r}; give a side in pixels such as 1024, or WIDTHxHEIGHT.")
    width, height = int(sides[0]), int(sides[-1])
    for side in (width, height):
        if side % model.multiple:
            below = max(side // model.multiple, 1) * model.multiple
            raise ConfigError(
                f"--resolution is {resolution}, and sides of {model.name} are multiples of {model.multiple} pixels: "
                f"use {below} or {below + model.multiple} instead of {side}."
            )
    tokens = (width // model.multiple) * (height // model.multiple)
    if model.padded and width != height and tokens > model.padded:
        raise ConfigError(
            f"--resolution is {resolution}, which is {tokens} tokens, and {model.name} takes {model.padded} unless the "
            "sides are equal: use smaller sides, or a square."
        )
    return width, height


def _frames(model: Model, frames: int | None) -> int:
    if frames is None:
        return model.frames
    check_int(frames, "--frames", 1)
    if frames > 1 and not model.video:
        raise ConfigError(f"--frames is {frames}, but {model.name} is a model of images; leave it out.")
    step = model.frame_factor * model.patch[0]
    if (frames - 1) % step:
        below = (frames - 1) // step * step + 1
        raise ConfigError(
            f"--frames is {frames}, and clips of {model.name} have 1 + a multiple of {step} frames: use {below} or "
            f"{below + step}."
        )
    return frames


def _text(model: Model, text: int | None) -> int:
    if text and not model.text:
        raise ConfigError(f"--text is {text}, but {model.name} reads no text; leave it out.")
    return check_int(model.text if text is None else text, "--text", 0)


def _batch(model: Model, batch: int | None) -> int:
    count = check_int(model.batch if batch is None else batch, "--batch", 1)
    if count > 1 and model.one_sample:
        raise ConfigError(
            f"--batch is {count}, but {model.name} is trained with one sample at a time: leave it out, and raise "
            "gradient_accumulation_steps in the run's config."
        )
    return count


def _image_layers(model: Model, layers: int | None) -> int:
    if layers is None:
        return model.image_layers
    check_int(layers, "--image-layers", 1)
    if not model.image_layers:
        raise ConfigError(
            f"--image-layers is {layers}, but {model.name} does not take images apart into layers; leave it out."
        )
    return layers


def _references(model: Model, references: int) -> int:
    check_int(references, "--references", 0)
    if references and not model.references:
        raise ConfigError(f"--references is {references}, but {model.name} takes no reference images; leave it out.")
    return 1 if model.image_layers else references
