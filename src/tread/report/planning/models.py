"""The models that `tread plan` knows by name, as `pages.models` counted them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tread.errors import ConfigError, nearest, shown

Saved = Mapping[str, int]
"""Bytes kept for backward: `constant`, and per sample `sample`, `image` per image token, `text` per text token, and
`square` per pair of tokens, if a layer makes an attention mask."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one stack that cost the same, or the modules outside all stacks (`count` 1).

    `flops[way]["forward"]` and `["backward"]` are the coefficients of 1, n, t, n^2, n t and t^2 for n image and t text
    tokens, and `["again"]` those of recomputation, if it leaves products of the forward out. What one layer keeps is
    `saved[way][checkpointing]`. A way is `lora`, `attention` or `full`.
    `adapted[way]` is the widest input or output of a linear with an adapter that sees image tokens.
    """

    name: str
    count: int
    flops: Mapping[str, Mapping[str, Sequence[float]]]
    saved: Mapping[str, Mapping[str, Saved]]
    adapted: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model: sizes of its inputs, weights, and the cost of its layers."""

    name: str
    title: str
    factor: int
    """Pixels per latent along height and width."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of one token."""
    size: tuple[int, int]
    """Width and height of a usual sample in pixels."""
    multiple: int
    """Sides of images are multiples of this many pixels."""
    padded: int
    """Tokens that non-square images are padded to, also the most that an image may have; 0 for no padding."""
    frame_factor: int
    """Frames per latent frame."""
    frames: int
    """Frames of a usual clip; 1 for images."""
    video: bool
    references: bool
    """Whether samples may have reference images."""
    image_layers: int
    """RGBA layers that an image is usually decomposed into; 0 if the model does not decompose images."""
    one_sample: bool
    """Whether a step takes one sample: the model has no batch axis, or would read the padding of captions."""
    one_dtype: bool
    """Whether the stock model fails with float32 weights under autocast."""
    text: int
    """Text tokens of a step."""
    pretrained: bool
    """Whether it is a released model, for adapters; False if it is trained from scratch."""
    lora: Mapping[str, int]
    """Weights of a LoRA per rank, by its target linears: the family's defaults (`lora`) or `attention`."""
    weights: Mapping[str, int]
    """Elements: `all`, `packed` by quantizing, the `rows` and `groups` of those, `float32` ones. Bytes: `buffers`, and
    what weights of so many bits leave unused of their segments, `spare_32`, `spare_16`, `spare_8` and `spare_4`."""
    stacks: tuple[Layers, ...]
    outside: Layers

    @property
    def layers(self) -> list[Layers]:
        """The stack of each layer, in order."""
        return [stack for stack in self.stacks for _ in range(stack.count)]

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def batch(self) -> int:
        """A usual batch per GPU: one sample of a released model, and the paper's 256 images from scratch."""
        return 1 if self.pretrained else 256

    @property
    def ways(self) -> tuple[str, ...]:
        """What can be trained: adapters on some linears, or all weights."""
        return (*self.lora, "full")


@cache
def documents() -> dict[str, dict[str, Any]]:
    """The counts of every model, by name."""
    return json.loads((files("tread.report.planning") / "models.json").read_text(encoding="utf-8"))


def find_model(name: str) -> Model:
    """The model of that name: a family, or a family and a flavour such as sd3/large."""
    known = documents()
    if name not in known:
        raise ConfigError(
            f"{shown(name, 40)} is no model that `tread plan` knows{nearest(name, known)} It knows {_listed(known)}."
        )
    entry = known[name]
    return Model(
        name=name,
        patch=tuple(entry["patch"]),
        size=tuple(entry["size"]),
        stacks=tuple(_layers(stack["name"], stack["layers"], stack) for stack in entry["stacks"]),
        outside=_layers("outside", 1, entry["outside"]),
        **{
            key: entry[key]
            for key in (
                *("title", "factor", "multiple", "padded", "frame_factor", "frames", "video", "references"),
                *("image_layers", "one_sample", "one_dtype", "text", "pretrained", "lora", "weights"),
            )
        },
    )


def _listed(names: Iterable[str]) -> str:
    """Names as one line, with the flavours of a family grouped.

    >>> _listed(["flux", "flux/kontext", "prx", "dit/S/2", "dit/B/2"])
    'flux[/kontext], prx, dit/S/2|B/2'
    """
    families: dict[str, list[str]] = {}
    for name in names:
        family, _, flavour = name.partition("/")
        families.setdefault(family, []).append(flavour)
    said = []
    for family, flavours in families.items():
        others = "|".join(filter(None, flavours))
        said.append(family if not others else f"{family}[/{others}]" if "" in flavours else f"{family}/{others}")
    return ", ".join(said)


def _layers(name: str, count: int, found: Mapping[str, Any]) -> Layers:
    adapted = found.get("adapted", {})
    return Layers(name=name, count=count, flops=found["flops"], saved=found["saved"], adapted=adapted)
