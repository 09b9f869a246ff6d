"""What `tread plan` knows of each model, counted on the stock classes: `python -m pages.models [MODEL ...]`.

- A model is one line of `MODELS`: its class, what its released config changes of the class's defaults, the shapes of
  its latents and texts, and its autoencoder. Everything else is counted and written to
  `src/tread/report/planning/models.json`, which `tread plan` reads without torch.
- Weights are counted on the meta device. Layers run on fake tensors, which have shapes and no values, through the
  family's own `predict`, with the product's adapters, checkpointing and compiled layers.
- FLOPs are torch's count, fitted exactly by a polynomial of second degree in image and text tokens. Bytes that
  layers save for backward are those that torch's partitioner chooses for compiled code, counted once per storage.
- Image tokens, text tokens and the batch have sizes in distinct primes, so that the size of a saved tensor tells what
  it grows with.
"""

import json
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tread.attach.registry import family_of
from tread.finetune.families import family_class
from tread.finetune.family import Batch
from tread.finetune.model.adapters import add_adapter, find_linears
from tread.finetune.model.quantize import GROUP, layer_linears
from tread.kernels import cudnn
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.fast import Fast
from tread.models import DiT, model_size

FILE = Path(__file__).resolve().parents[1] / "src" / "tread" / "report" / "planning" / "models.json"
BATCH, IMAGE, TEXT = 13, 59, 44
"""13, 59, 11 and 103 = 59 + 44 divide no width of a model."""
PRIMES = {"both": 103, "image": 59, "text": 11}
POINTS = ((16, 8), (32, 8), (64, 8), (16, 16), (32, 16), (16, 32))
"""Image and text tokens at which FLOPs are counted: as many as a polynomial of second degree has terms."""
RANK = 16
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The targets that most LoRA scripts have."""
DEPTH = 2
"""Layers of each stack that run; the last one is counted, because the first may have an input without a gradient."""
BACKEND = "aot_eager_decomp_partition"
"""torch.compile up to the partitioner, which decides what is saved; no code is generated."""
HOW: dict[str, Checkpointing] = {"none": False, "full": True, "selective": "selective"}
SD_VAE = {"block_out_channels": (128, 256, 512, 512)}
WAN_VAE = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model; shapes may name settings of the transformer's config, and `T` is the number of text tokens."""

    family: str
    model: str
    title: str
    channels: int
    text: Mapping[str, tuple[int | str, ...]]
    vae: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    pipeline: int = 0
    """Index of the pipeline in the family's `pipelines`."""
    reads: int | None = None
    """Text tokens of a step; None: the longest that the family reads."""
    references: bool = False
    """Whether samples may have reference images."""
    real: bool = False
    """Whether the forward reads values of its inputs, so that layers run on real tensors."""
    frames: int = 1
    """Usual frames of a clip."""


MODELS: dict[str, Line] = {
    "auraflow": Line(
        family="auraflow",
        model="AuraFlowTransformer2DModel",
        title="AuraFlow v0.3",
        channels=4,
        text={"embeds": ("T", "joint_attention_dim")},
        vae=SD_VAE,
        config={"pos_embed_max_size": 9216},
    ),
    "flux": Line(
        family="flux",
        model="FluxTransformer2DModel",
        title="FLUX.1 dev and Krea",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={"guidance_embeds": True},
    ),
    "flux/kontext": Line(
        family="flux",
        model="FluxTransformer2DModel",
        title="FLUX.1 Kontext",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={"guidance_embeds": True},
        pipeline=1,
        references=True,
    ),
    "lumina2": Line(
        family="lumina2",
        model="Lumina2Transformer2DModel",
        title="Lumina-Image 2.0",
        channels=16,
        text={"embeds": ("T", "cap_feat_dim"), "mask": ("T",)},
        vae=SD_VAE,
        config={"cap_feat_dim": 2304},
        real=True,
    ),
    "pixart_sigma": Line(
        family="pixart_sigma",
        model="PixArtTransformer2DModel",
        title="PixArt-Sigma XL/2 1024",
        channels=4,
        text={"embeds": ("T", "caption_channels"), "mask": ("T",)},
        vae=SD_VAE,
        config={"sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False},
    ),
    "qwen_image": Line(
        family="qwen_image",
        model="QwenImageTransformer2DModel",
        title="Qwen-Image",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim")},
        vae={"temperal_downsample": (False, True, True)},
        reads=256,
    ),
    "sd3": Line(
        family="sd3",
        model="SD3Transformer2DModel",
        title="Stable Diffusion 3.5 medium",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "dual_attention_layers": tuple(range(13)),
        },
        reads=333,
    ),
    "sd3/large": Line(
        family="sd3",
        model="SD3Transformer2DModel",
        title="Stable Diffusion 3.5 large",
        channels=16,
        text={"embeds": ("T", "joint_attention_dim"), "pooled": ("pooled_projection_dim",)},
        vae=SD_VAE,
        config={
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        reads=333,
    ),
    "wan": Line(
        family="wan",
        model="WanTransformer3DModel",
        title="Wan 2.1 and 2.2, 14B",
        channels=16,
        text={"embeds": ("T", "text_dim")},
        vae=WAN_VAE,
        frames=81,
    ),
    "wan/1.3b": Line(
        family="wan",
        model="WanTransformer3DModel",
        title="Wan 2.1, 1.3B",
        channels=16,
        text={"embeds": ("T", "text_dim")},
        vae=WAN_VAE,
        config={"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        frames=81,
    ),
}
DITS = ("S/2", "B/2", "L/2", "XL/2")
"""Sizes of the DiT that `tread train` trains, for latents of 8 pixels each."""


class Subject:
    """A model whose layers can be run: how it is made, and what one forward needs."""

    def __init__(self, line: Line) -> None:
        import diffusers

        self.line, self.cls = line, getattr(diffusers, line.model)
        with torch.device("meta"):
            self.model: Any = self.cls(**line.config)
        settings = dict(self.model.config)
        source: Any = Described(settings, line)
        self.family = family_class(line.family)(source)
        self.settings = settings
        self.stacks = [stack.name for stack in family_of(self.model).stacks]

    def batch(self, count: int, image: int, text: int, references: int = 0) -> tuple[Tensor, Batch]:
        """Noisy latents of `image` tokens in one row, and the tensors of a batch."""
        frames, rows, columns = self.family.patch
        grid = (frames, rows, columns * image) if self.family.video else (rows, columns * image)
        noisy = torch.zeros(count, self.line.channels, *grid)
        sizes = {"T": text} | self.settings
        batch: Batch = {"mean": noisy}
        for name, shape in self.line.text.items():
            made = torch.ones(count, *(sizes[size] if isinstance(size, str) else size for size in shape))
            batch[f"text.{name}"] = made.long() if name == "mask" else made
        if references:
            batch["reference.mean"] = torch.zeros(count, self.line.channels, rows, columns * references)
        return noisy, batch

    def loss(self, model: nn.Module, count: int, image: int, text: int) -> Tensor:
        """A loss of one forward."""
        noisy, batch = self.batch(count, image, text)
        prediction = self.family.predict(model, noisy, torch.full((count,), 0.5), batch)
        return (prediction.float() - 1).square().mean()

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """The linears of each kind of LoRA: the family's own, and attention's where that differs."""
        own = self.family.lora_targets
        return {"lora": own} | ({} if set(own) == set(ATTENTION) else {"attention": ATTENTION})

    def adapt(self, model: nn.Module, way: str) -> None:
        """Put the product's LoRA on it."""
        add_adapter(model, kind="standard", rank=RANK, alpha=RANK, targets=self.targets[way], seed=0)


class Described:
    """A `Source` without files: the configs of a line."""

    def __init__(self, transformer: Mapping[str, Any], line: Line) -> None:
        self._configs = {"transformer": transformer, "vae": dict(line.vae), "scheduler": {}}
        self.pipeline_name = family_class(line.family).pipelines[line.pipeline]
        self.index: dict[str, Any] = {}
        self.parts, self.place = ("transformer", "vae"), line.title

    def config(self, part: str) -> Any:
        return self._configs[part]


class DiTSubject:
    """The DiT of `tread train`, which takes classes instead of texts."""

    stacks = ("blocks",)

    def __init__(self, size: str) -> None:
        self.arguments: dict[str, Any] = model_size(size)
        with torch.device("meta"):
            self.model = self._made(self.arguments["depth"], 32)

    def _made(self, depth: int, columns: int) -> DiT:
        patch = self.arguments["patch"]
        settings = self.arguments | {"depth": depth}
        grid = (32, 32) if columns == 32 else (patch, patch * columns)
        return DiT(input_size=grid, in_channels=4, num_classes=1000, **settings)

    def loss(self, model: Any, count: int, image: int, text: int) -> Tensor:
        x = torch.zeros(count, 4, *model.input_size)
        prediction = model(x, torch.full((count,), 0.5), torch.zeros(count, dtype=torch.int64))
        return (prediction.float() - 1).square().mean()


def derive(line: Line) -> dict[str, Any]:
    """Everything that is counted of a stock model."""
    subject = Subject(line)
    family, model = subject.family, subject.model
    found = {
        "title": line.title,
        "family": line.family,
        "class": line.model,
        "factor": family.factor,
        "patch": list(family.patch),
        "frame_factor": family.frame_factor,
        "frames": line.frames,
        "video": family.video,
        "references": line.references,
        "text": line.reads or family.longest_text,
        "pretrained": True,
        "lora": {way: sides(model, targets) for way, targets in subject.targets.items()},
        "weights": weights(model),
    }
    return found | counted_once(subject)


def derive_dit(size: str) -> dict[str, Any]:
    """Everything that is counted of a DiT."""
    subject = DiTSubject(size)
    patch = subject.arguments["patch"]
    found = {
        "title": f"DiT-{size} of `tread train`",
        "family": "dit",
        "class": "DiT",
        "factor": 8,
        "patch": [1, patch, patch],
        "frame_factor": 1,
        "frames": 1,
        "video": False,
        "references": False,
        "text": 0,
        "pretrained": False,
        "lora": {},
        "weights": weights(subject.model),
    }
    return found | counted(subject, ("full",))


def sides(model: nn.Module, targets: Sequence[str]) -> int:
    """Weights of a LoRA per rank: inputs and outputs of all linears that it is on."""
    return sum(linear.in_features + linear.out_features for linear in find_linears(model, targets).values())


def weights(model: nn.Module) -> dict[str, int]:
    """Elements of the weights: all, those of linears that quantizing packs, their rows and groups, and float32 ones."""
    linears = list(layer_linears(model).values()) if not isinstance(model, DiT) else []
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "packed": sum(x.weight.numel() for x in linears),
        "rows": sum(x.out_features for x in linears),
        "groups": sum(x.weight.numel() // GROUP for x in linears),
        "float32": sum(p.numel() for n, p in model.named_parameters() if any(part in n.split(".") for part in kept)),
    }


_COUNTED: dict[str, dict[str, Any]] = {}


def counted_once(subject: Subject) -> dict[str, Any]:
    """`counted`, shared by models that differ in their inputs alone."""
    key = json.dumps([subject.line.model, dict(subject.line.config)])
    if key not in _COUNTED:
        _COUNTED[key] = counted(subject, (*subject.targets, "full"), real=subject.line.real)
    return _COUNTED[key]


def counted(subject: Any, ways: Sequence[str], *, real: bool = False) -> dict[str, Any]:
    """Layers of each stack, with FLOPs and saved bytes of one layer; and those outside layers."""
    lengths = [len(operator.attrgetter(stack)(subject.model)) for stack in subject.stacks]
    flops = {way: fitted(subject, way, real=real) for way in ways}
    saved = {way: {name: saved_bytes(subject, way, how, real=real) for name, how in HOW.items()} for way in ways}
    stacks = [
        {
            "name": name,
            "layers": length,
            "flops": {way: flops[way][name] for way in ways},
            "saved": {way: {how: counts[name] for how, counts in saved[way].items()} for way in ways},
        }
        for name, length in zip(subject.stacks, lengths, strict=True)
    ]
    outside = {
        "flops": {way: flops[way][""] for way in ways},
        "saved": {way: {how: counts[""] for how, counts in saved[way].items()} for way in ways},
    }
    return {"stacks": stacks, "outside": outside}


def fitted(subject: Any, way: str, *, real: bool) -> dict[str, dict[str, list[int]]]:
    """Forward and backward FLOPs of one layer of each stack and, under "", outside of them, as polynomials.

    Terms are 1, n, t, n^2, n t and t^2 for n image and t text tokens, per sample.
    """
    texts = not isinstance(subject, DiTSubject)
    points = POINTS if texts else [(image, 0) for image in (16, 32, 64)]
    terms = [_terms(image, text) if texts else [1, image, image * image] for image, text in points]
    rows = [flops_at(subject, way, image, text, real=real) for image, text in points]
    found: dict[str, dict[str, list[int]]] = {}
    for name in ("", *subject.stacks):
        solved = {part: solve(terms, [row[name][part] for row in rows]) for part in ("forward", "backward")}
        found[name] = {part: x if texts else [x[0], x[1], 0, x[2], 0, 0] for part, x in solved.items()}
    return found


def _terms(image: int, text: int) -> list[int]:
    return [1, image, text, image * image, image * text, text * text]


def solve(matrix: Sequence[Sequence[int]], values: Sequence[int]) -> list[int]:
    """The solution of a linear system, which must be whole: FLOPs are counts."""
    rows = [[Fraction(x) for x in row] + [Fraction(value)] for row, value in zip(matrix, values, strict=True)]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    found = [row[-1] for row in rows]
    assert all(x.denominator == 1 for x in found), found
    return [int(x) for x in found]


def flops_at(subject: Any, way: str, image: int, text: int, *, real: bool) -> dict[str, dict[str, int]]:
    """FLOPs of one sample, forward and backward: of one more layer of each stack, and of what is outside of them."""
    base = dict.fromkeys(subject.stacks, DEPTH)
    whole = total_flops(subject, way, image, text, base, real=real)
    found, outside = {}, dict(whole)
    for stack in subject.stacks:
        longer = total_flops(subject, way, image, text, base | {stack: DEPTH + 1}, real=real)
        found[stack] = {part: longer[part] - whole[part] for part in whole}
        outside = {part: outside[part] - DEPTH * found[stack][part] for part in whole}
    return found | {"": outside}


def total_flops(
    subject: Any, way: str, image: int, text: int, depths: Mapping[str, int], *, real: bool
) -> dict[str, int]:
    """FLOPs of one sample in a model with so many layers."""
    with shallow(subject, way, image, depths, real=real) as model:
        with FlopCounterMode(display=False) as forward, torch.autocast("cpu", torch.bfloat16):
            loss = subject.loss(model, 1, image, text)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def saved_bytes(subject: Any, way: str, how: Checkpointing, *, real: bool) -> dict[str, dict[str, int]]:
    """Bytes saved for backward by one layer of each stack and, under "", outside of the layers.

    `constant` whatever the batch; per sample `sample`, `image` per image token and `text` per text token.
    """
    where: list[str] = [""]
    found: dict[str, dict[str, int]] = {}
    depths = dict.fromkeys(subject.stacks, DEPTH)
    with shallow(subject, way, IMAGE, depths, real=real) as model:
        layers = {f"{s}.{i}": operator.attrgetter(s)(model)[i] for s in subject.stacks for i in range(DEPTH)}
        said: list[str] = []
        fast = Fast(
            model,
            list(layers.values()),
            checkpointing=how,
            graphs=False,
            shapes=2,
            say=said.append,
            backend=BACKEND,
        )
        for name, layer in layers.items():
            layer._compiled_call_impl = Marked(layer._compiled_call_impl, where, name)
        known = {_storage(x) for x in (*model.parameters(), *model.buffers())}
        held: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            key = _storage(tensor)
            if key not in known:
                known.add(key)
                held.append(tensor)
                _add(found.setdefault(where[0], {}), tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            loss = subject.loss(model, BATCH, IMAGE, TEXT)
        assert loss.requires_grad
        fast.remove()
        assert not fast.failed, said
    nothing = {"constant": 0, "sample": 0, "image": 0, "text": 0}
    last = {stack: nothing | found.get(f"{stack}.{DEPTH - 1}", {}) for stack in subject.stacks}
    return last | {"": nothing | found.get("", {})}


def _add(counts: dict[str, int], tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    size, per_item = storage.nbytes() // tensor.element_size(), tensor.element_size()
    kind = next((name for name, prime in PRIMES.items() if size % prime == 0), None)
    if kind is None:
        batched = size % BATCH == 0
        name = "sample" if batched else "constant"
        counts[name] = counts.get(name, 0) + size // (BATCH if batched else 1) * per_item
        return
    tokens = {"both": IMAGE + TEXT, "image": IMAGE, "text": TEXT}[kind]
    batched = size % (tokens * BATCH) == 0
    if not batched:  # a table that all samples share: it is counted as if each had its own
        each = size // tokens * per_item if size % tokens == 0 else 0
    else:
        each = size // (tokens * BATCH) * per_item
    for name in ("image", "text") if kind == "both" else (kind,):
        counts[name] = counts.get(name, 0) + each


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


class Marked:
    """A layer's call that says which layer runs."""

    def __init__(self, call: Callable[..., Any], where: list[str], name: str) -> None:
        self.call, self.where, self.name = call, where, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.where[0] = self.name
        try:
            return self.call(*args, **kwargs)
        finally:
            self.where[0] = ""


@contextmanager
def shallow(subject: Any, way: str, image: int, depths: Mapping[str, int], *, real: bool) -> Iterator[Any]:
    """The model with few layers, ready to run on a batch inside the context; fake unless `real`."""
    torch._dynamo.reset()
    with torch.device("cpu" if real else "meta"):
        if isinstance(subject, DiTSubject):
            model: Any = subject._made(depths["blocks"], image)
            model.stream = torch.bfloat16
        else:
            model = subject.cls(**subject.line.config)
            for stack, depth in depths.items():
                parent, _, last = stack.rpartition(".")
                owner = operator.attrgetter(parent)(model) if parent else model
                setattr(owner, last, nn.ModuleList(list(getattr(owner, last))[:depth]))
            if way != "full":
                kept = getattr(model, "_keep_in_fp32_modules", None) or ()
                for name, parameter in model.named_parameters():
                    if not any(part in name.split(".") for part in kept):
                        parameter.data = parameter.data.bfloat16()
                subject.adapt(model, way)
    model.train()
    mode = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(patch.object(F, "layer_norm", _layer_norm))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attend))
        if not real:
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
    """Attention as GPUs run it: query, key, value, output and one number per row are saved, no scores."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return cudnn.attend(query, key, value, scale)


def main(names: Sequence[str]) -> None:
    """Count the models named, or all of them, and write the file anew after each."""
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    every = [*MODELS, *(f"dit/{size}" for size in DITS)]
    for name in names or every:
        made = derive(MODELS[name]) if name in MODELS else derive_dit(name.removeprefix("dit/"))
        known = {key: (known | {name: made})[key] for key in every if key in known or key == name}
        text = json.dumps(known, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
        print(f"counted: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
