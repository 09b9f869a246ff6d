"""A custom training loop as the tuner measures it: an attached model, a step and the loss of each token."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tread.attach.attach import Attachment
from tread.autotune.jobs.job import Job, stacks_of
from tread.autotune.subject import Loop, Opened, check_depth
from tread.errors import ConfigError
from tread.eval_mode import evaluating
from tread.kernels.fast import Fast
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.training.parts import parameter_counts
from tread.training.trial import turned

Step = Callable[[Any], Any]
TokenLosses = Callable[[Any, float], Tensor]
OPTION = re.compile(r"--(target-speedup|max-loss-gap|budget-minutes|ratios|edges|windows|out)\b")
"""Options of the command that are arguments of `choose_routes`."""


def renamed(text: str) -> str:
    """A message of the command for a caller of `choose_routes`.

    >>> renamed("give the same command again, or raise --budget-minutes")
    'give the same call again, or raise budget_minutes'
    """
    text = OPTION.sub(lambda found: found[1].replace("-", "_"), text)
    return text.replace("the same command", "the same call")


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Loop):
    """A `subject.Loop` that calls the user's functions."""

    handle: Attachment
    take_step: Step
    token_losses: TokenLosses
    routed_loss: Literal["kept", "all"]

    @property
    def model(self) -> nn.Module:
        return self.handle.model

    @property
    def handles(self) -> Sequence[Handle]:
        return [self.handle]

    @property
    def fast(self) -> Sequence[Fast]:
        return [] if self.handle.fast is None else [self.handle.fast]

    def step(self, batch: Any) -> None:
        """See `Loop.step`; refuses a step that changes the weights."""
        before = self._versions()
        self.handle.set_step(0)
        self.take_step(batch)
        if self._versions() != before:
            raise ConfigError(
                "the step that is to be timed changed the model's weights, on which sensitivity is measured next: "
                "leave the optimizer out of it."
            )
        for parameter in self.model.parameters():
            parameter.grad = None

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.model.parameters()]

    def losses_at(self, batch: Any, u: float, kept: Tensor | None = None) -> Tensor:
        losses = self.token_losses(batch, u)  # (B, S)
        if losses.ndim != 2:
            raise ConfigError(f"token_losses returned shape {tuple(losses.shape)}; it must be (samples, tokens).")
        if self.routed_loss == "kept" and kept is None:
            kept = self.handle.kept
        if self.routed_loss == "all" or kept is None:
            return losses.mean(1)
        if losses.shape != kept.shape:
            raise ConfigError(
                f"token_losses returned shape {tuple(losses.shape)} and the model routes {tuple(kept.shape)}, so which "
                'losses belong to kept tokens is not known: return one for each of them, or give routed_loss="all".'
            )
        return (losses * kept).sum(1) / kept.sum(1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with evaluating(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield

    def close(self) -> None:
        """Release the memory of CUDA graphs; layers that the user compiled stay compiled."""
        for fast in self.fast:
            fast.release()


class OwnTuning(Job):
    """The job of a custom loop: all of `tread autotune` except verifying runs."""

    def __init__(self, loop: OwnLoop, batches: Sequence[Any], plan: RoutePlan) -> None:
        self.loop, self.batches, self.plan = loop, batches, plan

    @property
    def routing(self) -> dict[str, Any]:
        return {key: value for key, value in self.plan.to_config().items() if key != "routes"}

    def identity(self) -> dict[str, Any]:
        model, leaves = self.loop.model, pytree.tree_leaves(self.batches[0])
        weights, trained = parameter_counts(model)
        return {
            "job": "loop",
            "model": type(model).__name__,
            "layers": self.plan.depth,
            "weights": weights,
            "trained": trained,
            "norm": _trained_norm(model),
            "compiled": bool(self.loop.fast),
            "batches": len(self.batches),
            "batch": [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)],
            "routed_loss": self.loop.routed_loss,
            "tread_config": self.routing,
        }

    def said(self, text: str) -> str:
        return renamed(text)

    def explained(self) -> AbstractContextManager[None]:
        """See `Job.explained`; adds nothing, since the settings of a custom loop are unknown."""
        return nullcontext()

    def open(self, folder: Path, ratios: Sequence[float]) -> Opened:
        """See `Job.open`; the model is already loaded."""
        loop, handle = self.loop, self.loop.handle
        check_depth(self.plan.depth or 0, ratios)
        with loop.evaluating(), turned(loop.handles, "routed"):
            loop.losses_at(self.batches[0], 0.5)
        references = handle.references or 0
        return Opened(
            loop=loop,
            batches=self.batches,
            stacks=stacks_of(handle.model, handle.family),
            tokens=handle.seen.tokens - references,
            forced=None,
            always=references,
            adapts=not all(parameter.requires_grad for parameter in loop.model.parameters()),
            start=None,
        )

    def command(self, config: str | None, settings: Sequence[str], path: Path) -> str:
        return f"tread.attach(model, {str(path)!r})"


def _trained_norm(model: nn.Module) -> float:
    """The norm of the trained weights to six digits: a model that has been trained further is another one."""
    norms = [torch.linalg.vector_norm(p.detach(), dtype=torch.float32) for p in model.parameters() if p.requires_grad]
    return float(f"{float(torch.stack(norms).norm()) if norms else 0.0:.6g}")
