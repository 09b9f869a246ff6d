"""Inception-v3: the graph's resize, the shapes, and the names of the published state dict."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tread.errors import ConfigError
from tread.evaluate.features import INCEPTION_FILE, Extractor, load_extractor
from tread.evaluate.inception import InceptionV3, MixedE, inception_pixels


@pytest.fixture(scope="module")
def network() -> InceptionV3:
    torch.manual_seed(0)
    return InceptionV3().eval()


@pytest.mark.parametrize("size", [(32, 48), (299, 64), (512, 400)])
def test_pixels_are_those_of_the_graph(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, size=(*size, 3), dtype=np.uint8)
    found = inception_pixels(torch.from_numpy(image).permute(2, 0, 1)[None])[0]  # (3, 299, 299)
    assert found.shape == (3, 299, 299)
    for row, column in ((0, 0), (1, 2), (150, 37), (298, 298)):  # resize_bilinear, written out for one pixel
        y, x = row * size[0] / 299, column * size[1] / 299
        top, left = int(y), int(x)
        bottom, right = min(top + 1, size[0] - 1), min(left + 1, size[1] - 1)
        upper = image[top, left] + (image[top, right].astype(float) - image[top, left]) * (x - left)
        lower = image[bottom, left] + (image[bottom, right].astype(float) - image[bottom, left]) * (x - left)
        expected = (upper + (lower - upper) * (y - top) - 128) / 128
        np.testing.assert_allclose(found[:, row, column].numpy(), expected, atol=2e-4)


def test_an_image_of_the_networks_own_size_is_only_scaled() -> None:
    image = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 299, 299)
    assert inception_pixels(image)[0, :, 7, 9].tolist() == [-1, 0, 127 / 128]


def test_shapes_and_the_number_of_weights(network: InceptionV3) -> None:
    with torch.no_grad():
        found = network(torch.randn(1, 3, 299, 299))
    assert found.pool.shape == (1, 2048)
    assert found.spatial.shape == (1, 2023)
    assert found.probabilities.shape == (1, 1008)
    assert float(found.probabilities.sum()) == pytest.approx(1)
    # the usual Inception-v3 has 27,161,264 with 1,000 classes and an auxiliary head of 3,326,696
    assert sum(p.numel() for p in network.parameters()) == 27_161_264 - 3_326_696 + 8 * (2048 + 1)


def test_names_and_shapes_of_the_published_state_dict(network: InceptionV3) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    published = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_mean": (192,),
        "Mixed_5b.branch5x5_2.conv.weight": (64, 48, 5, 5),
        "Mixed_5c.branch_pool.conv.weight": (64, 256, 1, 1),
        "Mixed_6a.branch3x3.conv.weight": (384, 288, 3, 3),
        "Mixed_6b.branch7x7dbl_2.conv.weight": (128, 128, 7, 1),
        "Mixed_6e.branch7x7_2.conv.weight": (192, 192, 1, 7),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch3x3_2b.conv.weight": (384, 384, 3, 1),
        "Mixed_7c.branch3x3dbl_1.conv.weight": (448, 2048, 1, 1),
        "fc.weight": (1008, 2048),
    }
    assert published.items() <= shapes.items()
    assert len([name for name in shapes if name.endswith("conv.weight")]) == 94


def test_only_the_last_mixed_layer_pools_by_maximum(network: InceptionV3) -> None:
    assert [m.maximum for m in network.modules() if isinstance(m, MixedE)] == [False, True]


def test_weights_load_from_a_file_and_give_the_same_features(network: InceptionV3, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    without_counters = {k: v for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(without_counters, path)
    extractor = load_extractor("inception", str(path))
    assert extractor.distance == "FID"
    image = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = network(inception_pixels(torch.from_numpy(image).permute(2, 0, 1)[None])).pool
    assert torch.equal(extractor([image]).pool, expected)
    torch.save(without_counters | {"fc.weight": torch.zeros(1000, 2048)}, path)
    with pytest.raises(ConfigError, match=r"another shape of fc\.weight \(1 such\): it is no InceptionV3"):
        load_extractor("inception", str(path))


def test_a_missing_file_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_extractor("inception")
    for words in (str(tmp_path), f"https://github.com/mseitzer/pytorch-fid/.*/{INCEPTION_FILE}".split(".*")[0]):
        assert words in str(error.value)
    assert "`weights` (a file, or a URL to download)" in str(error.value)
    assert "`features`: inception, efflite0, dinov2. Only inception's distance is FID." in str(error.value)


def test_a_damaged_download_is_refused(tmp_path: Path) -> None:
    path = tmp_path / INCEPTION_FILE
    path.write_bytes(b"half of it")
    begins = hashlib.sha256(b"half of it").hexdigest()[:8]
    with pytest.raises(ConfigError, match=f"is damaged: its SHA-256 begins with {begins}"):
        load_extractor("inception", str(path))


def test_no_other_network_may_call_its_distance_fid() -> None:
    with pytest.raises(ConfigError, match="belongs to FID's own network"):
        Extractor("Inception", torch.nn.Identity(), lambda x: x)
    assert Extractor("MyNet", torch.nn.Identity(), lambda x: x).distance == "FD-MyNet"
