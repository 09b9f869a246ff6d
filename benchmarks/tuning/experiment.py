"""What all runs of the experiment share: images, networks, and the judge of their samples."""

import argparse
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.common.record import Facts
from benchmarks.quality.judge import extract, gaussian, load_judge_network, spread
from tread.data.dataset import to_uint8
from tread.evaluate.features import Extractor
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.metrics import kernel_distance
from tread.sampling.generate import generate
from tread.sampling.grid import make_grid

from .arms import CLASSES, GUIDANCE, SCALES, TUNED, Arm, Kind
from .model import FluxOfClasses, add_lora, caption_table
from .plan import run_name, run_seconds
from .training import OBJECTIVE, Images, Run

SHOWN = 8
"""Samples of each class in the picture of the base."""


class Experiment:
    """Images, networks and the judge of samples."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.work: Path = given.work
        self.scale = SCALES["smoke" if given.smoke else "full"]
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.smoke else "cpu")
        self.ends = time.monotonic() + given.budget_seconds
        # all runs compile the same layers in one process; beyond the limit they would silently run eager
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 4096
        self.captions = caption_table(self.work, smoke=given.smoke).to(self.device)
        self.trained, self.tuned, self.held_out = (
            Images.of(self.work / "data", split, tuned=tuned, scale=self.scale, device=self.device)
            for split, tuned in (("train", False), ("train", True), ("test", True))
        )
        self._compiled: dict[Kind, FluxOfClasses] = {}

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return self.ends - time.monotonic()

    def fits(self, arm: Arm, rate: float, *, first: bool) -> bool:
        """Whether a run ends within the budget; prints why where it does not."""
        needed = run_seconds(arm, self.given, first=first)
        if self.left >= needed or self.given.smoke:
            return True
        print(f"{run_name(arm, rate)}: needs {needed:.0f} s, {self.left:.0f} left", flush=True)
        return False

    @cached_property
    def extractor(self) -> Extractor:
        """The network that judges samples."""
        return load_judge_network(self.work, self.device, smoke=self.given.smoke)

    @cached_property
    def reference(self) -> np.ndarray:
        """Features of the test images of the tuned classes."""
        return extract(self.extractor, self.held_out.pixels.permute(0, 2, 3, 1).cpu().numpy())

    def network(self, kind: Kind, weights: Path | None = None) -> FluxOfClasses:
        """Fresh weights, or those in a file; with a new adapter for kind `lora`."""
        net = FluxOfClasses(self.scale, self.captions, seed=0).to(self.device)
        if weights is not None:
            net.load_state_dict(torch.load(weights, weights_only=True, map_location=self.device))
        if kind == "lora":
            add_lora(net, self.scale.rank)
        return net

    def look(self, run: Run, kind: Kind, file: Path) -> Facts:
        """Distances of samples of the tuned classes to their test images at each guidance scale; keeps some samples."""
        net = self.sampler(kind)
        net.load_state_dict(run.net.state_dict())
        labels = torch.tensor(TUNED).repeat(self.scale.samples // len(TUNED))
        found = {}
        for scale in self.given.guidance:
            pixels = self.draw(net, labels, scale)
            np.save(file.with_name(f"{file.stem}-{scale:g}.npy"), pixels[:64])
            found[f"{scale:g}"] = distances(extract(self.extractor, pixels), self.reference, self.extractor)
        return found

    def sampler(self, kind: Kind) -> FluxOfClasses:
        """A compiled network to sample from: a network in training has layers compiled for training alone."""
        if kind not in self._compiled:
            net = self._compiled[kind] = self.network(kind)
            if self.scale.compile:
                net.transformer.compile_repeated_blocks()
        return self._compiled[kind]

    def draw(self, net: FluxOfClasses, labels: Tensor, guidance: float) -> np.ndarray:
        """uint8 samples of some classes, (N, H, W, 3)."""
        scale = self.scale
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            images = generate(
                net.eval(),
                OBJECTIVE,
                labels,
                shape=(3, scale.side, scale.side),
                seed=0,
                steps=scale.solver_steps,
                guidance=guidance,
                null_label=len(CLASSES),
                batch_size=scale.sample_batch if guidance == 1 else scale.sample_batch // 2,
                device=self.device,
                progress=False,
            )
        return to_uint8(images).cpu().numpy()

    def show_base(self, run: Run, path: Path) -> None:
        """A picture of what the base draws, a row for each class; the tuned ones it cannot know."""
        images = self.draw(run.net, torch.arange(len(CLASSES)).repeat_interleave(SHOWN), GUIDANCE[-1])
        run.net.train()
        picture = make_grid(torch.from_numpy(images), columns=SHOWN)
        Image.fromarray(np.asarray(picture)).save(path)


def distances(features: np.ndarray, reference: np.ndarray, extractor: Extractor) -> Facts:
    """The Frechet and the kernel distance between two sets of features."""
    ours, theirs = (torch.from_numpy(spread(one, 2000)).to(extractor.device) for one in (features, reference))
    return {
        extractor.distance: frechet_distance(*gaussian(features), *gaussian(reference)),
        f"KD-{extractor.name}": kernel_distance(ours, theirs)[0],
    }
