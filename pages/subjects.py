"""Models that run without weights: shallow copies on fake tensors, which have shapes and no values.

What runs is the family's own `predict`, with the product's adapters, as on a GPU: layer norm in float32, attention by
an operator that saves no scores, all experts for every token.
"""

import copy
import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from diffusers.models.transformers.transformer_hidream_image import HiDreamImageTransformer2DModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F

from pages.model_lines import Line
from pages.values import Values
from tread.attach.registry import family_of
from tread.finetune.families import cosmos3, family_class
from tread.finetune.family import Batch
from tread.finetune.model.adapters import add_adapter
from tread.kernels.attention import cudnn
from tread.kernels.experts import compute_all_experts
from tread.models import DiT, model_size

RANK = 16
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The targets that most LoRA scripts have."""
DEPTH = 2
"""Layers of each stack that run; the last one is counted, because the first may have an input without a gradient."""
BATCH = 13
"""Samples of a forward whose saved bytes are told apart: a prime that divides no width of a model."""

CLEANER = patch("diffusers.pipelines.prx.pipeline_prx.ftfy", create=True)
"""A stand-in for the package that PRX insists on to clean captions: none are read here."""


class Subject:
    """A model whose layers can be run: how it is made, and what one forward needs."""

    def __init__(self, line: Line) -> None:
        import diffusers

        self.line, self.cls = line, getattr(diffusers, line.model)
        with torch.device("meta"):
            self.model: Any = self.cls(**line.config)
        settings = dict(self.model.config)
        source: Any = Described(settings, line)
        with CLEANER if line.family == "prx" else nullcontext():
            self.family = family_class(line.family)(source)
        self.settings = settings
        self.stacks = [stack.name for stack in family_of(self.model).stacks]
        self.values = line.reads_values
        self.samples = 1 if self.family.one_sample else BATCH

    def batch(self, count: int, image: int, text: int) -> tuple[Tensor, Batch]:
        """Noisy latents of `image` tokens in one row, and the texts of a batch as the family collates them."""
        family = self.family
        frames, rows, columns = family.patch
        wide = columns * image // (2 if family.layered else 1)  # the image without layers, and itself as it is given
        grid = (frames, rows, wide) if family.video or family.layered else (rows, wide)
        noisy = torch.zeros(count, self.line.channels, *grid)
        each = text // self.line.texts
        sizes = {"T": each} | self.settings
        self.family.text_length = each  # some pad every text to it
        with unset_fake_temporarily():  # collating reads values
            shapes = {k: [sizes[x] if isinstance(x, str) else x for x in v] for k, v in self.line.text.items()}
            one = {name: torch.ones(s, dtype=torch.long if name == "ids" else None) for name, s in shapes.items()}
            texts = self.family.collate_text([one] * count)
        read = self.values  # floating-point numbers are made fake, and masks with them unless they are read
        made = {f"text.{k}": x if read and not x.is_floating_point() else torch.ones_like(x) for k, x in texts.items()}
        return noisy, {"mean": noisy} | made

    def loss(self, model: nn.Module, count: int, image: int, text: int) -> Tensor:
        """A loss of one forward."""
        noisy, batch = self.batch(count, image, text)
        with Values() if self.values else nullcontext():
            prediction = self.family.predict(model, noisy, torch.full((count,), 0.5), batch)
        return (prediction.float() - 1).square().mean()

    @cached_property
    def template(self) -> Any:
        """The model with as few layers as are ever run."""
        model = copy.deepcopy(self.model)
        for stack in self.stacks:
            del operator.attrgetter(stack)(model)[DEPTH + 1 :]
        return model

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """The linears of each kind of LoRA: the family's own, and attention's where that differs."""
        own, names = self.family.lora_targets, [name for name, _ in self.model.named_modules()]
        others = set(own) != set(ATTENTION) and all(any(n.endswith(f".{t}") for n in names) for t in ATTENTION)
        return {"lora": own} | ({"attention": ATTENTION} if others else {})

    @property
    def unit(self) -> int:
        return self.line.unit

    @property
    def registers(self) -> int:
        return self.line.registers

    @property
    def texts(self) -> int:
        return self.line.texts

    def adapt(self, model: nn.Module, way: str) -> None:
        """Put the product's LoRA on it."""
        add_adapter(model, kind="standard", rank=RANK, alpha=RANK, targets=self.targets[way], seed=0)


class Described:
    """A `Source` without files: the configs of a line."""

    def __init__(self, transformer: Mapping[str, Any], line: Line) -> None:
        self._configs = {"transformer": transformer, "vae": dict(line.vae), "scheduler": {}}
        self.pipeline_name = family_class(line.family).pipelines[line.pipeline]
        self.index: dict[str, Any] = {}
        self.parts, self.name_or_path = ("transformer", "vae", *family_class(line.family).text_parts), line.title

    def config(self, part: str) -> Any:
        return self._configs.get(part, {})


class DiTSubject:
    """The DiT of `tread train`, which takes classes instead of texts."""

    stacks = ("blocks",)
    unit, registers, texts, values, samples = 1, 0, 1, False, BATCH

    def __init__(self, size: str) -> None:
        self.arguments: dict[str, Any] = model_size(size)
        with torch.device("meta"):
            self.model = self.made(self.arguments["depth"], (32, 32))

    def made(self, depth: int, grid: tuple[int, int]) -> DiT:
        """A model of so many layers on latents of this size."""
        settings: dict[str, Any] = self.arguments | {"depth": depth}
        return DiT(input_size=grid, in_channels=4, num_classes=1000, **settings)

    def loss(self, model: Any, count: int, image: int, text: int) -> Tensor:
        x = torch.zeros(count, 4, *model.input_size)
        prediction = model(x, torch.full((count,), 0.5), torch.zeros(count, dtype=torch.int64))
        return (prediction.float() - 1).square().mean()


@contextmanager
def shallow(subject: Any, way: str, image: int, depths: Mapping[str, int]) -> Iterator[Any]:
    """The model with few layers, ready to run on a batch inside the context."""
    torch._dynamo.reset()
    if isinstance(subject, DiTSubject):
        side = subject.arguments["patch"]
        with torch.device("meta"):
            model: Any = subject.made(depths["blocks"], (side, side * image))
        model.stream = torch.bfloat16
    else:
        model = copy.deepcopy(subject.template)
        for stack, depth in depths.items():
            del operator.attrgetter(stack)(model)[depth:]
        if way != "full" or subject.family.one_dtype:
            kept = getattr(model, "_keep_in_fp32_modules", None) or ()
            for name, parameter in model.named_parameters():
                if not any(part in name.split(".") for part in kept):
                    parameter.data = parameter.data.bfloat16()
        if way != "full":
            subject.adapt(model, way)
    model.train()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(F, "layer_norm", _layer_norm))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attend))
        stack.enter_context(patch.object(HiDreamImageTransformer2DModel, "patchify", _square))
        stack.callback(compute_all_experts([model]))
        stack.enter_context(patch.object(cosmos3, "_layout", _real_layout))
        _make_fake(model)
        yield model


def _make_fake(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        for name, value in vars(module).items():  # tables that are no buffers
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                setattr(module, name, [torch.empty(x.shape, dtype=x.dtype) for x in value])


_LAYER_NORM = F.layer_norm


def _layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Layer norm as CUDA's autocast runs it, in float32; that of CPUs does not."""
    return _LAYER_NORM(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as GPUs run it: query, key, value, mask, output and one number per row are saved, no scores."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return cudnn.attend(query, key, value, attn_mask, scale)


_LAYOUT = cosmos3._layout


def _real_layout(*args: Any) -> dict[str, Any]:
    """Where the tokens of Cosmos 3 are: read by its forward, and cached beyond one fake mode."""
    with unset_fake_temporarily():
        return _LAYOUT(*args)


_PATCHIFY = HiDreamImageTransformer2DModel.patchify


def _square(model: Any, latents: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
    """HiDream's patches of latents in one row as if the grid were square: neither padded nor masked."""
    model.max_seq = latents.shape[2] * latents.shape[3] // model.config.patch_size**2
    tokens, _, sizes, positions = _PATCHIFY(model, latents)
    return tokens, None, sizes, positions
