"""From labels to samples.

- The noise of a sample is a hash of the seed and the sample's place in the whole job, so a sample depends
  neither on the batch size nor on how many processes share the work: a process passes its slice of the labels
  and the place of the first one, `first_index`.
- The network runs in eval mode without gradients, so a routed model runs dense; every module gets its mode
  back, whatever happens.
- Autocast is the caller's choice: the state stays float32 and the objectives convert the network's answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tread.objectives.objective import Net, Objective
from tread.routing import noise
from tread.routing.errors import ConfigError
from tread.sampling.guidance import classifier_free
from tread.sampling.solvers import SOLVERS, Churn, Solver, edm_heun


def sample_noise(seed: int, index: Tensor, shape: tuple[int, ...], *words: int) -> Tensor:
    """Standard normal noise of the samples `index` (B,) -> (B, *shape), on the device of `index`; further
    words, such as a solver's step, ask for noise for another purpose."""
    element = torch.arange(prod(shape), device=index.device)
    return noise.normal(seed, index[:, None], *words, element).unflatten(1, shape)  # (B, E) -> (B, *shape)


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
    solver: str | None = None,
    churn: Churn | None = None,
    batch_size: int = 64,
    first_index: int = 0,
    device: torch.device | str,
    progress: bool = True,
) -> Tensor:
    """One float32 sample for each of the labels (N,) -> (N, C, H, W) on `device`; `shape` is (C, H, W).

    `solver` is a name in `solvers.SOLVERS`, by default the objective's own; `churn` goes with EDM and heun.
    `guidance`, `null_label` and `interval` are those of `guidance.classifier_free`.
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
    field = classifier_free(objective.field(net), scale=guidance, null_label=null_label, interval=interval)
    count = labels.shape[0]
    samples = torch.empty(count, *shape, device=device)  # (N, C, H, W)
    with _evaluating(net), tqdm(total=count, desc="sampling", unit="img", disable=not progress) as bar:
        for first in range(0, count, batch_size):
            here = slice(first, min(first + batch_size, count))
            index = first_index + torch.arange(here.start, here.stop, device=device)  # (B,)
            start = levels[0] * sample_noise(seed, index, shape)  # (B, C, H, W)
            if churn is not None:
                solve = partial(edm_heun, churn=churn, draw=partial(sample_noise, seed, index, shape))
            samples[here] = solve(field, start, labels[here].to(device), levels)
            bar.update(index.shape[0])
    return samples


@contextmanager
def _evaluating(net: Net) -> Iterator[None]:
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
