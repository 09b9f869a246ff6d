"""Sparse Guidance for an unmodified stock pipeline.

- Two hooks on the attached transformer: the first drops the strong branch's tokens, the second runs the weak branch
  and returns the guided output. The pipeline calls its transformer as usual.
- The pipeline's own classifier-free guidance is unchanged: each of its branches is guided.
- The level is the forward's timestep, in the unit of the model (FLUX: 0..1, SD3: 0..1000), read on the host once per
  forward, because a ratio decides shapes. Selections are a hash of it, so a pipeline call is reproducible.
- All samples of a batch drop the same tokens. Half of the batch may be the negative prompt: with other tokens there,
  classifier-free guidance would amplify that difference too.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tread.attach.attach import Attachment
from tread.errors import ConfigError, check_fraction
from tread.sampling.guidance.fields import Ratio, check_nested, check_scale, constant, dropping, within


@contextmanager
def guide(
    model: nn.Module,
    handle: Attachment,
    *,
    scale: float,
    strong_ratio: float | Ratio = 0.0,
    weak_ratio: float | Ratio = 0.7,
    interval: tuple[float, float] | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Inside, every forward of an attached model returns weak + scale * (strong - weak).

    `handle` is what `tread.attach(model, ...)` returned. Ratios are numbers or functions of the timestep; outside the
    `interval` (lo, hi] of timesteps the strong branch runs alone.

        handle = tread.attach(pipeline.transformer, {"preset": "paper"})
        with guide(pipeline.transformer, handle, scale=1.5, weak_ratio=0.7):
            image = pipeline("a red fox").images[0]
    """
    check_scale(scale, interval)
    strong, weak = _ratio(strong_ratio, "strong_ratio"), _ratio(weak_ratio, "weak_ratio")
    if isinstance(strong_ratio, float | int) and isinstance(weak_ratio, float | int):
        check_nested(strong_ratio, weak_ratio)
    _check_attached(model, handle)
    signature = inspect.signature(type(handle.model).forward)
    if "timestep" not in signature.parameters:
        name = type(handle.model).__name__
        raise ConfigError(f"{name} has no argument 'timestep', which guide reads the level from; it cannot be guided.")
    strong_branch, inside, level = ExitStack(), False, 0.0

    def level_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """The largest timestep: with one per token (Wan 2.2), those of a given first frame are 0."""
        return float(signature.bind(model, *args, **kwargs).arguments["timestep"].max())

    def drop(ratio: Ratio, level: float) -> AbstractContextManager[None]:
        return dropping(handle, ratio(level), seed=seed, level=level, samples=torch.zeros(1, dtype=torch.int64))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal level
        if not inside:
            level = level_of(args, kwargs)  # once: reading it again would wait for the strong branch
            strong_branch.enter_context(drop(strong, level))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        nonlocal inside
        if inside:
            return None
        strong_branch.close()
        if scale == 1 or not within(level, interval):
            return None
        inside = True
        try:
            with drop(weak, level):
                lesser = _sample(model(*args, **kwargs))
        finally:
            inside = False
        return _with_sample(answer, lesser + scale * (_sample(answer) - lesser))

    # prepended, so that the strong branch is set before attach opens the forward's state
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        strong_branch.close()
        for hook in hooks:
            hook.remove()


def _check_attached(model: nn.Module, handle: Attachment) -> None:
    """Refuse a handle that does not route `model`."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give guide the network, such as pipeline.transformer.")
    if not isinstance(handle, Attachment) or all(part is not handle.model for part in model.modules()):
        raise ConfigError("handle is not this model's; give guide what tread.attach(model, ...) returned.")
    handle.check_attached()


def _ratio(value: float | Ratio, name: str) -> Ratio:
    return value if callable(value) else constant(check_fraction(value, name, closed=False))


def _sample(answer: Any) -> Tensor:
    """The prediction in a stock model's output: the first of a tuple, or `sample`."""
    return answer[0] if isinstance(answer, tuple) else answer.sample


def _with_sample(answer: Any, sample: Tensor) -> Any:
    return (sample, *answer[1:]) if isinstance(answer, tuple) else type(answer)(**{**answer, "sample": sample})
