"""`init: scratch`: a transformer with random weights, built from its config with the changes of `transformer`.

- The stock class initialises the weights, under a seed derived from the run's.
- A sharded run starts with the same weights, though no process holds the whole model: the constructor runs on each, and
  a layer is freed as soon as it is constructed, except for the process's own shards.
- Input and output sizes are fixed by the pipeline's other parts: the autoencoder's channels and the text encoder's
  embeddings.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tread.attach.registry import layers_of
from tread.errors import ConfigError, nearest, one_line, shown
from tread.finetune.model.source import Source
from tread.training.memory import give_back, is_out_of_memory
from tread.training.sharding.files import keep

INPUTS = (
    *("in_channels", "out_channels", "in_visual_dim", "out_visual_dim"),
    *("joint_attention_dim", "pooled_projection_dim", "caption_channels", "cap_feat_dim", "text_dim", "text_embed_dim"),
    *("in_text_dim", "in_text_dim2", "image_dim"),
)
"""Keys of transformers' configs that are fixed by the pipeline's other parts."""


def make(source: Source, part: str, *, seed: int) -> nn.Module:
    """The transformer `part` with new weights in float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _made(source, part)


def empty(source: Source, part: str) -> nn.Module:
    """The transformer `part` with parameters on the meta device, for `draw` to fill, and buffers computed."""
    from accelerate import init_empty_weights

    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        return _made(source, part)


def check(source: Source, part: str) -> nn.Module:
    """The transformer `part` on the meta device; refuses keys and values of `transformer` that it cannot take."""
    cls, released = source.class_of(part), source.released(part)
    known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    for name, value in source.changes.items():
        if name not in known:
            raise ConfigError(
                f"transformer has the key {name!r}{nearest(name, known)} A {cls.__name__} has: {', '.join(known)}."
            )
        if name in INPUTS and released.get(name) != value:
            raise ConfigError(
                f"{name} of transformer is {shown(value)}, but the other parts of {source.name_or_path} need "
                f"{shown(released.get(name))}; leave it out."
            )
    with torch.device("meta"):
        return _made(source, part)


def draw(source: Source, part: str, own: Mapping[str, Tensor], *, seed: int) -> None:
    """Fill the shards `own`, by name, with the weights of `make`, holding one full layer at a time.

    A constructor that writes to a layer again after it was freed (none of the tuned families does) is detected by
    `_LateWrites`; the whole model is then constructed in memory.
    """
    classes = {type(layer) for layer in layers_of(check(source, part))}
    layers: list[nn.Module] = []
    with torch.device("meta"), _when_made(classes, layers.append):
        model = _made(source, part)
    paths = {module: path for path, module in model.named_modules()}
    order = iter([paths[layer] for layer in layers])  # a module's name is only known once its parents exist

    def let_go(layer: nn.Module) -> None:
        _keep(layer, f"{next(order)}.", own)
        layer.to("meta")
        give_back()

    with _LateWrites() as late, _when_made(classes, let_go):
        model = make(source, part, seed=seed)
    _keep(make(source, part, seed=seed) if late.seen else model, "", own)


@contextmanager
def fitting(source: Source, part: str) -> Iterator[None]:
    """Turn shape errors of a first forward into a ConfigError about the sizes in `transformer`."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(error)[:200]
        raise ConfigError(
            f"a {source.class_of(part).__name__} with transformer {shown(source.changes)} cannot compute a batch "
            f"({reason}): sizes that depend on each other must be changed together."
        ) from error


def _made(source: Source, part: str) -> nn.Module:
    cls = source.class_of(part)
    try:
        return cls.from_config(source.config(part))
    except Exception as error:  # stock classes raise all kinds of errors for bad sizes
        reason = one_line(error)[:200]
        raise ConfigError(
            f"a {cls.__name__} cannot be made with transformer {shown(source.changes)}: {reason}"
        ) from error


def depth_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a transformer's config that count layers, blocks and heads: the sizes usually changed first."""
    return {
        name: value
        for name, value in config.items()
        if isinstance(value, int) and name.startswith("num_") and name.endswith(("layers", "heads", "blocks"))
    }


def _keep(module: nn.Module, prefix: str, own: Mapping[str, Tensor]) -> None:
    """Copy this process's shards of a module's tensors; those on the meta device were copied before."""
    for name, tensor in module.state_dict(prefix=prefix).items():
        if not tensor.is_meta:
            keep(own[name], tensor)


@contextmanager
def _when_made(classes: Collection[type[nn.Module]], then: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside this context, `then` is called with each module of the classes when its constructor returns."""
    before = {cls: vars(cls).get("__init__") for cls in classes}

    def calling(cls: Any) -> Callable[..., None]:
        own = cls.__init__

        @wraps(own)
        def made(self: nn.Module, *arguments: Any, **named: Any) -> None:
            own(self, *arguments, **named)
            if type(self) is cls:
                then(self)

        return made

    for cls in classes:
        cls.__init__ = calling(cls)
    try:
        yield
    finally:
        for cls, own in before.items():
            if own is None:
                del cls.__init__
            else:
                cls.__init__ = own


class _LateWrites(TorchDispatchMode):
    """Records in `seen` whether an op inside this context wrote to a tensor on the meta device."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.seen |= any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves((args, kwargs)))
        return func(*args, **kwargs)
