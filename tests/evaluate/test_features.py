"""Extractors: EfficientNet-Lite0 knows real pets, sizes may differ, weights come from files and URLs."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tread.errors import ConfigError
from tread.evaluate.efficientnet import MEAN, STD, EfficientNetLite0, SameConv, imagenet_pixels
from tread.evaluate.features import load_extractor

# breeds of Oxford-IIIT Pet that are classes of ImageNet under one name in both
BREEDS = {"pug": 254, "beagle": 162, "samoyed": 258, "Siamese": 284, "keeshond": 261, "boxer": 242, "leonberger": 255}


def test_same_padding_is_tensorflows() -> None:
    conv = SameConv(1, 1, 3, stride=2)
    torch.nn.init.ones_(conv.weight)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    with torch.no_grad():
        found = conv(x)[0, 0]
    assert found.tolist() == [
        [x[0, 0, :3, :3].sum(), x[0, 0, :3, 2:].sum()],
        [x[0, 0, 2:, :3].sum(), x[0, 0, 2:, 2:].sum()],
    ]


def test_pixels_are_cropped_in_the_centre_and_normalised() -> None:
    image = torch.zeros(1, 3, 256, 320, dtype=torch.uint8)
    image[..., 16:240, 48:272] = 255
    found = imagenet_pixels(image, shorter=256, crop=224)
    expected = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert found.shape == (1, 3, 224, 224)
    assert torch.allclose(found, expected.view(1, 3, 1, 1).expand_as(found))
    assert imagenet_pixels(torch.zeros(1, 3, 32, 40, dtype=torch.uint8), shorter=256, crop=224).shape[-2:] == (224, 224)


@pytest.mark.realdata
def test_lite0_names_real_pets(real_data: Path) -> None:
    extractor = load_extractor("efflite0", str(real_data / "efficientnet-lite0"))
    assert extractor.distance == "FD-EffLite0"
    images, labels = [], []
    with zipfile.ZipFile(real_data / "oxford-pets" / "pets256_512.zip") as archive:
        for breed, label in BREEDS.items():
            names = [name for name in sorted(archive.namelist()) if name.startswith(f"images/{breed}_")][:3]
            images += [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
            labels += [label] * len(names)
    assert isinstance(extractor.module, EfficientNetLite0)
    pixels = extractor.prepare(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))
    with torch.no_grad():
        right = extractor.module._fc(extractor.module(pixels)).argmax(1) == torch.tensor(labels)
    assert right.float().mean() > 0.7
    features = extractor(images).pool
    assert features.isfinite().all()
    distances = torch.cdist(features, features)

    def within(order: np.ndarray) -> float:
        """Mean distance of two images that share a label."""
        shuffled = torch.tensor(labels)[torch.from_numpy(order)]
        same = (shuffled[:, None] == shuffled) & ~torch.eye(len(labels), dtype=torch.bool)
        return float(distances[same].mean())

    rng = np.random.default_rng(0)
    assert within(np.arange(len(labels))) < min(within(rng.permutation(len(labels))) for _ in range(500))


def test_sizes_may_differ_within_a_batch(lite0: Path) -> None:
    extractor = load_extractor("efflite0", str(lite0))
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, size=(*size, 3), dtype=np.uint8) for size in ((32, 32), (60, 40))]
    apart = torch.cat([extractor([image]).pool for image in images])
    assert torch.allclose(extractor(images).pool, apart, atol=1e-5)
    assert apart.std() > 0.01


def test_a_url_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = "http://127.0.0.1:9/none.pth"  # nobody listens there
    with pytest.raises(ConfigError) as error:
        load_extractor("inception", url)
    assert str(error.value).startswith(f"cannot download {url} (")
    assert str(error.value).endswith("): get it by hand and name the file with `weights`.")


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_a_file_that_holds_no_weights(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("# Notes\nnothing to load")
    with pytest.raises(ConfigError) as error:
        load_extractor("efflite0", str(path))
    assert str(error.value) == f"{path} is no file of weights, or damaged; check `weights`."


def test_a_tiny_dinov2_gives_its_class_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    model = transformers.Dinov2Model(config).eval()
    model.save_pretrained(tmp_path / "tiny")
    extractor = load_extractor("dinov2", str(tmp_path / "tiny"))
    assert extractor.distance == "FD-DINOv2(tiny)"
    image = np.random.default_rng(0).integers(0, 256, size=(40, 40, 3), dtype=np.uint8)
    with torch.no_grad():
        pixels = imagenet_pixels(torch.from_numpy(image).permute(2, 0, 1)[None], shorter=224, crop=224)
        expected = model(pixel_values=pixels).last_hidden_state[:, 0]
    assert torch.allclose(extractor([image]).pool, expected, atol=1e-6)
    state = model.state_dict()
    model.save_pretrained(tmp_path / "cut", state_dict={name: state[name] for name in state if "layernorm" not in name})
    with pytest.raises(
        ConfigError, match=r"cut is not whole: .*/model\.safetensors lacks 2 tensors \(layernorm\.bias, "
    ):
        load_extractor("dinov2", str(tmp_path / "cut"))
