"""Evaluation inside a run: the figures of `tread eval` for samples of the averaged weights, every so many steps.

- Samples are an image source like a folder, so measuring, sharing between processes and comparing are `tread eval`'s
  own code. Label and noise of a sample are functions of its index: every evaluation of every run draws the same ones.
- Every batch has the same size; a short last one is drawn in full and cut. So a sample does not depend on the number of
  processes, and with train.compile the layers see one shape more (two with sample.interval); validation and previews
  run eager. Guidance that drops tokens runs eager too: its ratios are shapes of their own.
- The reference is measured before training, so that errors in it are raised then, and is kept in the run's folder.
  Without one the training data is the reference, through the same decoder as the samples.
- The evaluation's networks draw nothing from torch's generator after they are built, and the model gets its mode and
  weights back: a run with evaluation trains as one without.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from tread.data import Dataset
from tread.errors import ConfigError, RiskWarning
from tread.evaluate.compare import Options, compare, measure, statistics_at
from tread.evaluate.features import load_extractor, settings_called
from tread.evaluate.images import ArrayImages, ImageSource
from tread.evaluate.statistics import Statistics
from tread.files import write_text
from tread.kernels.compiling import compiles
from tread.objectives import Objective
from tread.objectives.objective import Net
from tread.pretrain.decode import Decode
from tread.pretrain.settings import EvaluateConfig, PretrainConfig
from tread.sampling.generate import generate
from tread.together import gathered, together

FOLDER = "evaluation"
REFERENCE = int.from_bytes(b"refe")
"""The seed of the randomness in reading reference images."""


class DataImages(ImageSource):
    """The samples of a dataset as pictures; any randomness in reading one is a function of its index."""

    def __init__(self, dataset: Dataset, settings: Mapping[str, Any], decode: Decode, device: torch.device) -> None:
        self.dataset, self.decode, self.device = dataset, decode, device
        self._settings = json.dumps(dict(settings), sort_keys=True, default=str)
        self.read_ahead = device.type == "cpu"  # a thread that reads ahead would decode on the default GPU

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        indices = range(first, min(stop, len(self)))
        x = torch.stack([self.dataset[index][0] for index in indices]).to(self.device)
        x = self.dataset.prepare(x, REFERENCE, torch.arange(first, indices.stop, device=self.device))  # (B, C, H, W)
        return _pictures(self.decode(x))

    def identity(self) -> str:
        return hashlib.sha256(f"{self._settings} {len(self)}".encode()).hexdigest()


@dataclass(eq=False)
class ModelImages(ImageSource):
    """The samples of a model at one guidance scale; the label and the noise of image i are functions of i."""

    net: Net
    objective: Objective
    config: PretrainConfig
    evaluate: EvaluateConfig
    guidance: float
    shape: tuple[int, int, int]
    num_classes: int
    decode: Decode
    accelerator: Accelerator

    read_ahead = False

    def __len__(self) -> int:
        return self.evaluate.samples

    def labels(self, first: int, stop: int) -> Tensor:
        """Labels of the images first..stop - 1: class after class, or evenly spread classes if there are more classes
        than samples."""
        spread = max(self.num_classes, len(self))
        return torch.arange(first, stop) * spread // len(self) % self.num_classes  # (N,)

    @property
    def compiled(self) -> bool:
        """Whether compiled layers draw them: not if a branch that is run drops tokens."""
        branches = self.config.sample.branches
        drops = branches.strong_ratio > 0 or (self.guidance != 1 and branches.needs_routes)
        return compiles(self.config.train.compile, self.accelerator.device) and not drops

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        sample, size = self.config.sample, self.evaluate.batch_size
        # `Session.averaged` set it to eager
        stance = torch.compiler.set_stance("default") if self.compiled else nullcontext()
        with stance, self.accelerator.autocast():
            drawn = generate(
                self.net,
                self.objective,
                self.labels(first, first + size),
                shape=self.shape,
                guidance=self.guidance,
                null_label=self.num_classes,
                **sample.drawing,
                batch_size=size,
                first_index=first,
                device=self.accelerator.device,
                progress=False,
            )
        return _pictures(self.decode(drawn))[: stop - first]

    def identity(self) -> str:
        raise NotImplementedError("samples of a model in training are drawn anew, not kept")


class Evaluation:
    """`Evaluation(...)` loads the extractor and measures the reference; `run(images, step)` gives the figures.

    With several guidance scales each figure and each file carries its scale: `FID guidance 1.5`.
    """

    def __init__(
        self,
        config: PretrainConfig,
        evaluate: EvaluateConfig,
        accelerator: Accelerator,
        folder: Path,
        *,
        dataset: Dataset,
        decode: Decode,
    ) -> None:
        if config.data["name"] == "latents" and config.sample.vae is None:
            raise ConfigError(
                f"evaluate.every is {evaluate.every}, but latents are no images: name the autoencoder that decodes "
                "them with sample.vae, or set evaluate.every=0."
            )
        self.config, self.evaluate, self.accelerator, self.folder = config, evaluate, accelerator, folder / FOLDER
        settings = {**config.data, "vae weights": config.sample.vae}
        images = DataImages(dataset, settings, decode, accelerator.device)
        with settings_called("evaluate.{}"), together():
            if not accelerator.is_main_process:
                gathered(None)  # its download is complete
            self.extractor = load_extractor(evaluate.features, evaluate.weights, accelerator.device)
            if accelerator.is_main_process:
                gathered(None)
            self.reference = self._measure_reference(images)
        if evaluate.reference is not None:  # a file of statistics need not name its extractor, so widths are compared
            held, width = len(self.reference.pool.mean), self.extractor(images.read(0, 1)).pool.shape[1]
            if held != width:
                raise ConfigError(
                    f"evaluate.reference holds statistics of {held} features and evaluate.features "
                    f"{evaluate.features} has {width}: name another one of the two."
                )

    def _measure_reference(self, data: ImageSource) -> Statistics:
        options = self._options()
        options["work"] = self.folder / "reference"
        if self.evaluate.reference is None:
            return measure(data, self.extractor, "reference", **options)
        return statistics_at(Path(self.evaluate.reference), self.extractor, "reference", **options)

    def _options(self) -> Options:
        return Options(batch_size=self.evaluate.batch_size, keep_vectors=not self.evaluate.frechet_only)

    def run(self, images: ModelImages, step: int) -> dict[str, float]:
        """Measure on every process; rank 0 compares, writes `evaluation/step-00001000.json` and returns figures."""
        several, scale = len(self.evaluate.scales) > 1, f"guidance {images.guidance:g}"
        if self.config.train.sharded:
            self._draw_missing_batches(images)
        samples = measure(images, self.extractor, "samples", **self._options())
        figures = {}
        if self.accelerator.is_main_process:
            report = compare(samples, self.reference, device=self.accelerator.device)
            for note in report.notes:
                warnings.warn(note, RiskWarning, stacklevel=2)
            figures = {f"{name} {scale}" if several else name: value for name, value in report.metrics.items()}
            record = {"step": step, **asdict(report), "sampling": self._sampling(images.guidance)}
            self.folder.mkdir(parents=True, exist_ok=True)  # missing if the reference was a file of statistics
            suffix = f"-{scale.replace(' ', '-')}" if several else ""
            write_text(self.folder / f"step-{step:08d}{suffix}.json", json.dumps(record, indent=2) + "\n")
        return figures

    def _draw_missing_batches(self, images: ModelImages) -> None:
        """Draw and discard a batch if other ranks draw one more: a forward of a sharded model is a collective."""
        rank, world, size = self.accelerator.process_index, self.accelerator.num_processes, self.evaluate.batch_size
        shares = [len(images) * (part + 1) // world - len(images) * part // world for part in range(world)]
        batches = [-(-share // size) for share in shares]
        for _ in range(max(batches) - batches[rank]):
            images.read(0, 1)

    def _sampling(self, guidance: float) -> dict[str, Any]:
        names = ("steps", "solver", "churn", "churn_interval", "churn_noise", "interval", "guidance_kind")
        names += ("strong_ratio", "weak_ratio", "ratio_schedule", "seed")
        return {"guidance": guidance} | {name: getattr(self.config.sample, name) for name in names}


def _pictures(images: Tensor) -> list[np.ndarray]:
    """uint8 (N, H, W, 3 or 1) -> N times (H, W, 3)."""
    source = ArrayImages(images.cpu().numpy())
    return source.read(0, len(source))
