"""An extractor without a download."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny.weights import randomised
from tread.evaluate.efficientnet import EfficientNetLite0
from tread.evaluate.features import LITE0_FILE


@pytest.fixture(scope="session")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an EfficientNet-Lite0 with random weights."""
    folder = tmp_path_factory.mktemp("lite0")
    with torch.no_grad():
        save_file(randomised(EfficientNetLite0(), scale=1.4).state_dict(), folder / LITE0_FILE)
    return folder
