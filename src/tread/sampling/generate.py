"""From labels to samples.

- The noise of a sample is a hash of the seed and the sample's place in the whole job, so a sample depends
  neither on the batch size nor on how many processes share the work: a process passes its slice of the labels
  and the place of the first one, `first_index`.
- The network runs in eval mode without gradients, so a routed model runs dense but for the branches of guidance that
  drop tokens; every module gets its mode back, whatever happens.
- FLOPs are counted by torch along the whole way of one sample, on the meta device: every level with the branches it
  has, and nothing is computed.
- Autocast is the caller's choice: the state stays float32 and the objectives convert the network's answers.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from tread.errors import ConfigError, RiskWarning
from tread.objectives.objective import Net, Objective
from tread.routing import noise
from tread.routing.handle import Handle
from tread.sampling.guidance import Branches
from tread.sampling.guidance.fields import check_scale, within
from tread.sampling.solvers import SOLVERS, Churn, Solver, edm_heun


@torch.no_grad()
def generate(
    net: Net,
    objective: Objective,
    labels: Tensor,
    *,
    shape: tuple[int, int, int],
    seed: int,
    steps: int,
    guidance: float = 1.0,
    null_label: int | None,
    interval: tuple[float, float] | None = None,
    branches: Branches | None = None,
    weak: Net | None = None,
    solver: str | None = None,
    churn: Churn | None = None,
    batch_size: int = 64,
    first_index: int = 0,
    device: torch.device | str,
    progress: bool = True,
) -> Tensor:
    """One float32 sample for each of the labels (N,) -> (N, C, H, W) on `device`; `shape` is (C, H, W).

    `solver` is a name in `solvers.SOLVERS`, by default the objective's own; `churn` goes with EDM and heun.
    `guidance` is the scale, `null_label` and `interval` are those of `guidance.classifier_free`, which is used unless
    `branches` says otherwise; `weak` is the other network of its kinds `ag` and `ag+sg`.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; sampling needs at least 1.")
    if labels.ndim != 1:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; sampling needs one label a sample, (N,).")
    name = solver or objective.default_solver
    if name not in SOLVERS:
        raise ConfigError(f"solver is {name!r}; choose one of: {', '.join(SOLVERS)}.")
    if churn is not None and not (objective.additive_noise and name == "heun"):
        raise ConfigError("churn is set, but it needs the objective 'edm' with the solver 'heun'; leave it out.")
    solve: Solver = SOLVERS[name]
    levels = objective.levels(steps)
    check_scale(guidance, interval)
    if guidance != 1 and not any(within(level, interval) for level in levels[:-1]):
        warnings.warn(
            f"guidance does nothing: none of the levels {levels[0]:.4g} to {levels[-2]:.4g} is in its interval "
            f"{interval}. Choose one in the objective's levels (flow: t, EDM: sigma), or leave it out.",
            RiskWarning,
            stacklevel=1,  # said once, whoever calls
        )
    guided = partial(
        (branches or Branches()).field,
        objective,
        net,
        weak=weak,
        scale=guidance,
        interval=interval,
        null_label=null_label,
        levels=levels,
        seed=seed,
    )
    count = labels.shape[0]
    samples = torch.empty(count, *shape, device=device)  # (N, C, H, W)
    with (
        _evaluating(net),
        _evaluating(weak),
        tqdm(total=count, desc="sampling", unit="img", disable=not progress) as bar,
    ):
        for first in range(0, count, batch_size):
            here = slice(first, min(first + batch_size, count))
            index = first_index + torch.arange(here.start, here.stop, device=device)  # (B,)
            field = guided(samples=index)
            start = levels[0] * noise.per_sample_normal(seed, index, shape)  # (B, C, H, W)
            if churn is not None:
                solve = partial(edm_heun, churn=churn, draw=partial(noise.per_sample_normal, seed, index, shape))
            samples[here] = solve(field, start, labels[here].to(device), levels)
            bar.update(index.shape[0])
    return samples


def flops_per_sample(net: nn.Module, objective: Objective, *, weak: nn.Module | None = None, **settings: Any) -> int:
    """FLOPs that `generate` with these settings spends on each sample, as torch counts them: the multiplications and
    additions of matrix products and attention."""
    meters = [_Meter(net), None if weak is None else _Meter(weak)]
    label = torch.zeros(1, dtype=torch.int64, device="meta")
    generate(meters[0], objective, label, weak=meters[1], **settings, device="meta", progress=False)  # pyright: ignore[reportArgumentType]
    return sum(meter.flops for meter in meters if meter is not None)


class _Meter:
    """A network of shapes without numbers that adds up what its forwards cost; each kind of forward runs once."""

    def __init__(self, net: nn.Module) -> None:
        tensors = chain(net.parameters(), net.buffers())  # neither copied nor moved: only their shapes are
        self.net = copy.deepcopy(net, {id(tensor): tensor.to("meta") for tensor in tensors}).eval()
        self.routing: Handle | None = getattr(self.net, "routing", None)
        self.flops = 0
        self._known: dict[tuple[int, tuple[float, ...]], tuple[int, Tensor]] = {}

    def __call__(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        kind = x.shape[0], () if self.routing is None else self.routing.ratios(training=False)
        if kind not in self._known:
            with FlopCounterMode(display=False) as counter:
                answer = self.net(x, time, labels)
            self._known[kind] = counter.get_total_flops(), answer
        flops, answer = self._known[kind]
        self.flops += flops
        return answer


@contextmanager
def _evaluating(net: Net | None) -> Iterator[None]:
    """Eval mode inside; afterwards each module has the mode it had, frozen parts included."""
    if not isinstance(net, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        net.train(modes[0][1])  # modules() begins with the net itself; lets an override of train() know
        for module, mode in modes:
            module.training = mode
