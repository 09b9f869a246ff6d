"""Sampling: from labels to images.

- The noise of a sample is a hash of the seed and the sample's index in the whole job, so a sample depends
  neither on the batch size nor on the number of processes: a process passes its slice of the labels and the
  index of the first one, `first_index`, or its slice of the seeds.
- The network runs in eval mode without gradients, so a routed model runs dense except in guidance branches that drop
  tokens. The mode of every module is restored, also after an error.
- FLOPs are counted by torch over all levels and branches of one sample, on the meta device.
- Autocast is the caller's choice: the state stays float32 and the objectives convert the network's output.
"""

import copy
import warnings
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from tread.errors import ConfigError, RiskWarning, check_choice
from tread.eval_mode import evaluating
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
    seed: int | Tensor,
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

    `seed` is one for all samples, or one below 2**32 for each, (N,): each sample is then the first one of its seed.
    `solver` is a name in `solvers.SOLVERS`, by default the objective's own; `churn` goes with EDM and heun.
    `guidance` is the scale, `null_label` and `interval` are those of `guidance.classifier_free`, which is used unless
    `branches` says otherwise; `weak` is the other network of the guidance kinds `ag` and `ag+sg`.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; sampling needs at least 1.")
    if labels.ndim != 1:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; sampling needs one label a sample, (N,).")
    name = check_choice(solver or objective.default_solver, "solver", SOLVERS)
    if churn is not None and not (objective.additive_noise and name == "heun"):
        raise ConfigError("churn is set, but it needs the objective 'edm' with the solver 'heun'; set it to 0.")
    solve: Solver = SOLVERS[name]
    levels = objective.levels(steps)
    check_scale(guidance, interval)
    if guidance != 1 and not any(within(level, interval) for level in levels[:-1]):
        warnings.warn(
            f"guidance does nothing: none of the levels {levels[0]:.4g} to {levels[-2]:.4g} is in its interval "
            f"{interval}. Choose one in the objective's levels (flow: t, EDM: sigma), or leave it out.",
            RiskWarning,
            stacklevel=1,  # shown once for all callers
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
    )
    count = labels.shape[0]
    samples = torch.empty(count, *shape, device=device)  # (N, C, H, W)
    with (
        evaluating(net),
        evaluating(weak),
        tqdm(total=count, desc="sampling", unit="img", disable=not progress) as bar,
    ):
        for first in range(0, count, batch_size):
            here = slice(first, min(first + batch_size, count))
            index = first_index + torch.arange(here.start, here.stop, device=device)  # (B,)
            seeds = seed
            if isinstance(seed, Tensor):
                seeds, index = seed[here].to(device), torch.zeros_like(index)  # (B,) each
            field = guided(samples=index, seed=seeds)
            start = levels[0] * noise.per_sample_normal(seeds, index, shape)  # (B, C, H, W)
            if churn is not None:
                solve = partial(edm_heun, churn=churn, draw=partial(noise.per_sample_normal, seeds, index, shape))
            samples[here] = solve(field, start, labels[here].to(device), levels)
            bar.update(index.shape[0])
    return samples


def flops_per_sample(net: nn.Module, objective: Objective, *, weak: nn.Module | None = None, **settings: Any) -> int:
    """FLOPs per sample of `generate` with these settings: multiplications and additions of matrix products and
    attention, by torch's counter."""
    meters = [_Meter(net), None if weak is None else _Meter(weak)]
    label = torch.zeros(1, dtype=torch.int64, device="meta")
    generate(meters[0], objective, label, weak=meters[1], **settings, device="meta", progress=False)  # pyright: ignore[reportArgumentType]
    return sum(meter.flops for meter in meters if meter is not None)


class _Meter:
    """A network on the meta device that sums the FLOPs of its forwards; forwards of equal shapes are counted once."""

    def __init__(self, net: nn.Module) -> None:
        tensors = chain(net.parameters(), net.buffers())  # the memo makes deepcopy use meta tensors instead
        self.net = copy.deepcopy(net, {id(tensor): tensor.to("meta") for tensor in tensors}).eval()
        self.routing: Handle | None = getattr(self.net, "routing", None)
        self.flops = 0
        self._known: dict[tuple[int, tuple[float, ...]], tuple[int, Tensor]] = {}

    def __call__(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        shape = x.shape[0], () if self.routing is None else self.routing.ratios(training=False)
        if shape not in self._known:
            with FlopCounterMode(display=False) as counter:
                answer = self.net(x, time, labels)
            self._known[shape] = counter.get_total_flops(), answer
        flops, answer = self._known[shape]
        self.flops += flops
        return answer
