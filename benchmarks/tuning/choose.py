"""The tuner's own choice for the experiment: `choose_routes` in its plain loop, on the base with a fresh LoRA."""

import argparse
from itertools import islice

import torch
from torch import Tensor

from tread.autotune.choose import choose_routes
from tread.routing.plan import RoutePlan

from .arms import SCALES, Arm
from .model import FluxOfClasses, add_lora, caption_table
from .plan import BASE, CHOSEN
from .training import VALIDATION, Batch, Images, Run, losses

BATCHES = 2
"""Batches that sensitivity is measured on."""


def choose(given: argparse.Namespace) -> RoutePlan:
    """One window, which reaches the speed that is asked for at the least loss gap."""
    scale = SCALES["smoke" if given.smoke else "full"]
    device = torch.device("cuda" if torch.cuda.is_available() and not given.smoke else "cpu")
    net = FluxOfClasses(scale, caption_table(given.work, smoke=given.smoke), seed=0).to(device)
    net.load_state_dict(torch.load(given.work / BASE, weights_only=True, map_location=device))
    add_lora(net, scale.rank)
    data = Images.of(given.work / "data", "train", tuned=True, scale=scale, device=device)
    run = Run(net, Arm.parse("lora-0.25@3..-4").plan(1000), data, scale, dense=False, seed=0)

    def step(batch: Batch) -> None:
        run.loss(batch).backward()

    def token_losses(batch: Batch, u: float) -> Tensor:
        x, labels, where = batch
        with run.autocast():
            return losses(net, x, labels, where, torch.full(labels.shape, u, device=device), VALIDATION)

    return choose_routes(
        run.handle,
        step=step,
        token_losses=token_losses,
        batches=list(islice(data.batches(scale.batch, seed=0), BATCHES)),
        target_speedup=given.target_speedup,
        routed_loss="kept",
        windows=1,
        out=given.work / CHOSEN,
        budget_minutes=given.budget_minutes,
    )
