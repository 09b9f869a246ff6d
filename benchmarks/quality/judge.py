"""How good a model's samples are: drawn by the product's sampler, judged by the product's metrics.

- Labels and noise are functions of a sample's index alone, so all models are asked for the same images, and the first
  samples of many are the same as the few.
- The compiled layers see one shape: classifier-free guidance doubles its batches, so it gets half as many samples.
- Distances are computed on the host while the device samples with the next guidance.
- The Frechet distance is to all training images; precision, recall and the kernel distance to some of them. Both
  distances are computed to the test images too: a model that memorises comes closer to the training images alone.
- Another test of memorisation is the share of samples whose nearest real image is a training image, among equally many
  training and test images: one half without memorisation.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.record import Facts
from tread.data.dataset import to_uint8
from tread.errors import DataError
from tread.evaluate.features import Extractor, load_efflite0
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.metrics import kernel_distance, precision_recall
from tread.evaluate.statistics import Gaussian, Moments
from tread.models import DiT
from tread.objectives import Objective
from tread.sampling.generate import flops_per_sample, generate

from .arms import Guide, Scale
from .images import CLASSES, SIDE, count_images, load

SHAPE = (3, SIDE, SIDE)
SEED = 0
EXTRACTOR = "extractor.safetensors"
REFERENCE, REFERENCE_FACTS, FEATURES = "reference.npz", "reference.json", "features.npy"
EXTRACT_BATCH = 250
COMPARED = 1000
"""Rows of the distance matrix computed at once."""


def load_judge_network(work: Path, device: torch.device, *, smoke: bool) -> Extractor:
    """EfficientNet-Lite0; at tiny size the pixels themselves, on a coarse grid."""
    if smoke:
        net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())
        return Extractor("Pixels", net, lambda images: images.float() / 255, device)
    return load_efflite0(str(work / EXTRACTOR), device)


def extract(extractor: Extractor, images: np.ndarray) -> np.ndarray:
    """Features (N, D) of uint8 images (N, H, W, 3)."""
    batches = range(0, len(images), EXTRACT_BATCH)
    features = [extractor(list(images[i : i + EXTRACT_BATCH])).pool.float().cpu().numpy() for i in batches]
    return np.concatenate(features)


def gaussian(features: np.ndarray) -> Gaussian:
    """Mean and covariance in float64."""
    moments = Moments(features.shape[1])
    moments.add(features)
    return moments.gaussian()


def write_reference(work: Path, extractor: Extractor, scale: Scale) -> Facts:
    """Measure the training images, and the test images against them: the distance that no model need beat."""
    start = time.monotonic()
    features = extract(extractor, load(work / "data", "train")[0])
    mean, covariance = gaussian(features)
    test_features = extract(extractor, load(work / "data", "test")[0])
    test_mean, test_covariance = gaussian(test_features)
    np.save(work / FEATURES, features.astype(np.float16))
    np.savez(
        work / REFERENCE,
        mean=mean,
        covariance=covariance,
        vectors=spread(features, scale.shown),
        test_mean=test_mean,
        test_covariance=test_covariance,
        test_vectors=spread(test_features, scale.shown),
    )
    figures = Judge(work, extractor, scale).figures(test_features[: scale.samples])
    facts = {
        "train_images": len(features),
        "test_images": len(test_features),
        # without the test images' distances to themselves
        "test": {name: figures[name] for name in figures if not name.endswith((" test", " training"))},
        "seconds": round(time.monotonic() - start, 1),
    }
    (work / REFERENCE_FACTS).write_text(json.dumps(facts))
    return facts


def spread(features: np.ndarray, count: int) -> np.ndarray:
    """`count` rows at even distances, or all."""
    return features[np.linspace(0, len(features) - 1, min(count, len(features))).astype(int)]


def forget_reference(work: Path) -> None:
    """Delete the reference; call it when the training images change."""
    for name in (REFERENCE, REFERENCE_FACTS, FEATURES):
        (work / name).unlink(missing_ok=True)


def read_reference_facts(work: Path) -> Facts:
    """What `write_reference` found, of the images that are trained on."""
    again = "prepare again with --weights"
    if not all((work / name).is_file() for name in (REFERENCE, REFERENCE_FACTS, FEATURES)):
        raise DataError(f"no reference in {work}: {again}")
    facts, trained = json.loads((work / REFERENCE_FACTS).read_text()), count_images(work / "data", "train")
    if facts["train_images"] != trained:
        raise DataError(f"the reference is of {facts['train_images']} images, and {trained} are trained on: {again}")
    return facts


class Judge:
    """Compares samples with the reference statistics."""

    def __init__(self, work: Path, extractor: Extractor, scale: Scale) -> None:
        with np.load(work / REFERENCE, allow_pickle=False) as file:
            self.reference = Gaussian(file["mean"], file["covariance"])
            self.vectors = torch.from_numpy(file["vectors"]).to(extractor.device)
            self.test_reference = Gaussian(file["test_mean"], file["test_covariance"])
            self.test_vectors = torch.from_numpy(file["test_vectors"]).to(extractor.device)
        self.work, self.extractor, self.scale = work, extractor, scale

    def figures(self, features: np.ndarray) -> Facts:
        """Metrics of features (N, D). Names with `few` use the first samples only, to compare with runs that drew no
        more; names with `test` compare with the test images instead of the training images."""
        few = min(self.scale.few, len(features))
        name = self.extractor.distance
        vectors = torch.from_numpy(features).to(self.vectors.device)
        first = precision_recall(vectors[:few], self.vectors)
        precision, recall = first if few == len(features) else precision_recall(vectors, self.vectors)
        kernel, test_kernel = (kernel_distance(vectors, other)[0] for other in (self.vectors, self.test_vectors))
        seen, unseen = (nearest(vectors, other)[0] for other in self._equally_many())
        whole = gaussian(features)
        distance = frechet_distance(*gaussian(features[:few]), *self.reference)
        return {
            "count": len(features),
            name: distance if few == len(features) else frechet_distance(*whole, *self.reference),
            f"{name} few": distance,
            f"{name} test": frechet_distance(*whole, *self.test_reference),
            f"KD-{self.extractor.name}": kernel,
            f"KD-{self.extractor.name} test": test_kernel,
            "closer to training": float((seen < unseen).double().mean()),
            "precision": precision,
            "recall": recall,
            "precision few": first[0],
            "recall few": first[1],
        }

    def _equally_many(self) -> tuple[Tensor, Tensor]:
        """Equally many training and test features."""
        count = min(len(self.vectors), len(self.test_vectors))
        return self.vectors[:count], self.test_vectors[:count]

    def nearest_in_training(self, images: np.ndarray) -> np.ndarray:
        """The training images nearest to some images by their features, both (N, H, W, 3)."""
        ours = torch.from_numpy(extract(self.extractor, images))
        theirs = torch.from_numpy(np.load(self.work / FEATURES)).float()
        indices = nearest(*(one.to(self.extractor.device) for one in (ours, theirs)))[1]
        return load(self.work / "data", "train")[0][indices.cpu().numpy()]

    def judge(
        self,
        model: DiT,
        objective: Objective,
        guides: Sequence[Guide],
        *,
        weak: DiT | None,
        autocast: Callable[..., AbstractContextManager[Any]],
    ) -> tuple[dict[str, Facts], np.ndarray]:
        """The figures of each way to sample, by name, and 100 images of the first one, a row for each class."""
        found: dict[str, Facts] = {}
        shown = np.empty(0)
        with ThreadPoolExecutor(1) as pool:
            coming = {}
            for guide in guides:
                start = time.perf_counter()
                with autocast():
                    images = draw(
                        model, objective, guide, self.scale.samples, self.scale, weak=weak, device=self.extractor.device
                    )
                seconds = time.perf_counter() - start
                if not coming:
                    shown = by_class(images)
                flops = flops_per_sample(model, objective, **settings_of(guide, self.scale, weak))
                found[guide.name] = {"sampling_seconds": round(seconds, 2), "gflops_per_sample": flops / 1e9}
                coming[guide.name] = pool.submit(self.figures, extract(self.extractor, images))
            for name, figures in coming.items():
                found[name] = figures.result() | found[name]
        return found, shown


def nearest(vectors: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to and index of the nearest of `others` (M, D) for each of `vectors` (N, D); (N,) each."""
    minima = [torch.cdist(part, others).min(1) for part in vectors.split(COMPARED)]  # (N', M)
    return torch.cat([one.values for one in minima]), torch.cat([one.indices for one in minima])


def settings_of(guide: Guide, scale: Scale, weak: DiT | None) -> Facts:
    """The arguments of `generate`."""
    return {
        "shape": SHAPE,
        "seed": SEED,
        "steps": scale.solver_steps,
        "guidance": guide.scale,
        "null_label": CLASSES,
        "branches": guide.branches,
        "weak": weak if guide.branches.needs_weak else None,
        "solver": "euler",
    }


def draw(
    model: DiT,
    objective: Objective,
    guide: Guide,
    count: int,
    scale: Scale,
    *,
    weak: DiT | None,
    device: torch.device | str,
) -> np.ndarray:
    """uint8 samples (N, H, W, 3); sample i is of class i % 10."""
    doubled = guide.kind == "cfg" and guide.scale != 1
    labels = torch.arange(count) % CLASSES
    samples = generate(
        model,
        objective,
        labels,
        **settings_of(guide, scale, weak),
        batch_size=scale.sample_batch // (2 if doubled else 1),
        device=device,
        progress=False,
    )
    return to_uint8(samples).cpu().numpy()


def by_class(images: np.ndarray) -> np.ndarray:
    """The first 10 of each class, class after class, (100, H, W, 3)."""
    return images[:100].reshape(10, CLASSES, *images.shape[1:]).swapaxes(0, 1).reshape(-1, *images.shape[1:])
