"""Ways in which people checkpoint the layers of a model; `tests.tiny.toy` takes them all."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.tiny.toy import Arguments, Block, Form, Toy, plain
from tread.kernels.checkpointing import checkpoint_layers


def each(call: Callable[..., Tensor], *, which: slice = slice(None)) -> Form:
    """Checkpoint single layers: `call(block, x, c, rope, mod, mask)`."""

    def form(blocks: Any, arguments: Arguments) -> Tensor:
        x, *rest = arguments
        chosen = set(range(len(blocks))[which])
        for i, block in enumerate(blocks):
            x = call(block, x, *rest) if i in chosen else block(x, *rest)
        return x

    return form


def segments(size: int, *, reentrant: bool, inner: Form = plain) -> Form:
    """Checkpoint `size` layers at a time; `inner` runs them."""

    def form(blocks: Any, arguments: Arguments) -> Tensor:
        x, *rest = arguments
        for i in range(0, len(blocks), size):
            part = blocks[i : i + size]
            x = checkpoint(lambda *given, part=part: inner(part, given), x, *rest, use_reentrant=reentrant)
        return x

    return form


def _tuples(blocks: Any, arguments: Arguments) -> Tensor:
    """Two layers at a time, which hand on the other inputs too."""
    x, *rest = arguments
    for i in range(0, len(blocks), 2):
        part = blocks[i : i + 2]
        x, *rest = checkpoint(lambda *given, part=part: (plain(part, given), *given[1:]), x, *rest, use_reentrant=True)
    return x


def custom(block: nn.Module) -> Callable[..., Any]:
    """What many models call create_custom_forward."""

    def custom_forward(*args: Any) -> Any:
        return block(*args)

    return custom_forward


def _keywords(block: nn.Module, x: Tensor, c: Tensor, rope: Tensor, mod: Tensor, mask: Tensor) -> Any:
    return checkpoint(block, x, c=c, mask=mask, rope=rope, mod=mod, use_reentrant=False)


def _sequential(blocks: Any, arguments: Arguments, *, reentrant: bool) -> Tensor:
    x, *rest = arguments
    if reentrant:  # what a closure captures has no gradient there, checkpointed or not
        rest = [one.detach() for one in rest]
    functions = [functools.partial(_closed, block, rest) for block in blocks]
    return checkpoint_sequential(functions, 2, x, use_reentrant=reentrant)


def _closed(block: nn.Module, rest: Sequence[Tensor], x: Tensor) -> Tensor:
    return block(x, *rest)


def _selective(policy: Callable[..., CheckpointPolicy]) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda block, *args: checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The usual policy."""
    save = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def save_pointwise(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that saves what selections are made of too."""
    save = operator in (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.index_select.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _early_stop_off(form: Form) -> Form:
    def run(blocks: Any, arguments: Arguments) -> Tensor:
        with set_checkpoint_early_stop(False):
            return form(blocks, arguments)

    return run


def _offloaded(form: Form) -> Form:
    def run(blocks: Any, arguments: Arguments) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return form(blocks, arguments)

    return run


def _both(name: str, make: Callable[[bool], Form]) -> dict[str, Form]:
    return {f"{name}, {'' if reentrant else 'non-'}reentrant": make(reentrant) for reentrant in (True, False)}


def _through(wrap: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[bool], Form]:
    """Checkpoint what `wrap` makes of each layer."""
    return lambda reentrant: each(lambda block, *args: checkpoint(wrap(block), *args, use_reentrant=reentrant))


FORMS: dict[str, Form] = {
    **_both("a layer", _through(lambda block: block)),
    "a layer by keywords, non-reentrant": each(_keywords),
    **_both("block.forward", _through(lambda block: block.forward)),
    **_both("block.__call__", _through(lambda block: block.__call__)),
    **_both("a lambda", _through(lambda block: lambda *args: block(*args))),
    **_both("a partial", _through(lambda block: functools.partial(block.__call__))),
    **_both("create_custom_forward", _through(custom)),
    **_both(
        "every other layer",
        lambda reentrant: each(
            lambda block, *args: checkpoint(block, *args, use_reentrant=reentrant), which=slice(0, None, 2)
        ),
    ),
    **_both(
        "the other layers",
        lambda reentrant: each(
            lambda block, *args: checkpoint(block, *args, use_reentrant=reentrant), which=slice(1, None, 2)
        ),
    ),
    **_both("two layers", lambda reentrant: segments(2, reentrant=reentrant)),
    **_both("halves", lambda reentrant: segments(3, reentrant=reentrant)),
    "two layers that return a tuple, reentrant": _tuples,
    **_both("checkpoint_sequential", lambda reentrant: functools.partial(_sequential, reentrant=reentrant)),
    **{
        f"{outer_name} in which {inner_name}": segments(3, reentrant=outer, inner=segments(size, reentrant=inner))
        for outer_name, outer in (("reentrant halves", True), ("non-reentrant halves", False))
        for inner_name, size, inner in (("layers are reentrant", 1, True), ("pairs are non-reentrant", 2, False))
    },
    "halves without early stop": _early_stop_off(segments(3, reentrant=False)),
    "layers without early stop": _early_stop_off(
        each(lambda block, *args: checkpoint(block, *args, use_reentrant=False))
    ),
    "saved on the CPU": _offloaded(plain),
    "halves saved on the CPU": _offloaded(segments(3, reentrant=False)),
    "reentrant halves saved on the CPU": _offloaded(segments(3, reentrant=True)),
    "products are saved": each(_selective(save_products)),
    "pointwise results are saved": each(_selective(save_pointwise)),
    "everything is saved": each(_selective(save_all)),
    "halves whose products are saved": lambda blocks, arguments: _selective(save_products)(
        lambda *given: plain(blocks, given), *arguments
    ),
    "halves whose pointwise results are saved": lambda blocks, arguments: _selective(save_pointwise)(
        lambda *given: plain(blocks, given), *arguments
    ),
}
"""Forms that a model's own forward uses."""


Call = Callable[[Any, dict[str, Tensor]], Tensor]
"""Calls a model."""


def _whole(of: Callable[[Any], Callable[..., Tensor]], *, reentrant: bool) -> Call:
    return lambda model, arguments: checkpoint(of(model), *arguments.values(), use_reentrant=reentrant)


def _nested(model: Any, *, reentrant: bool) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(model, *args, use_reentrant=reentrant)


def _saved_whole(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    return _selective(save_pointwise)(model, *arguments.values())


WHOLE: dict[str, Call] = {
    **{
        f"the {name}, {'' if reentrant else 'non-'}reentrant": _whole(of, reentrant=reentrant)
        for name, of in (
            ("model", lambda model: model),
            ("model.forward", lambda model: model.forward),
            ("model in a closure", custom),
            ("model in a checkpoint", functools.partial(_nested, reentrant=False)),
            ("model in a reentrant checkpoint", functools.partial(_nested, reentrant=True)),
        )
        for reentrant in (True, False)
    },
    "the model, whose pointwise results are saved": _saved_whole,
}
"""Forms that stand around the call of a model."""


WRAPPED: dict[str, Callable[[Toy], Toy]] = {}
"""Forms that are put on a model from outside."""


def _wrapped(name: str) -> Callable[[Callable[[Toy], None]], Callable[[Toy], None]]:
    def add(put_on: Callable[[Toy], None]) -> Callable[[Toy], None]:
        def run(model: Toy) -> Toy:
            put_on(model)
            return model

        WRAPPED[name] = run
        return put_on

    return add


def _each_block(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Toy], None]:
    def put_on(model: Toy) -> None:
        for stack in (model.first, model.second):
            for i, block in enumerate(stack):
                stack[i] = wrap(block)

    return put_on


_wrapped("checkpoint_wrapper")(_each_block(checkpoint_wrapper))
_reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
_wrapped("checkpoint_wrapper, reentrant")(_each_block(_reentrant))
_wrapped("offload_wrapper")(_each_block(offload_wrapper))


@_wrapped("apply_activation_checkpointing")
def _apply(model: Toy) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


@_wrapped("the composable checkpoint")
def _composable(model: Toy) -> None:
    for block in {*model.first, *model.second}:
        composable(block)


@_wrapped("checkpoint_layers")
def _by_layers(model: Toy) -> None:
    checkpoint_layers({*model.first, *model.second}, True)


@_wrapped("linear layers inside a layer")
def _inside(model: Toy) -> None:
    for block in {*model.first, *model.second}:
        block.out = checkpoint_wrapper(block.get_submodule("out"))
