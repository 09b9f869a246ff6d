"""The official scripts' loop on FLUX.1-dev's shapes: with the call for speed it trains the same adapter, sooner."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import flux
from benchmarks.common.lora import build
from tests.attach.script import main

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ENOUGH = 80 * 2**30


class Full:
    """FLUX.1-dev's shapes with random weights in bf16, and batches of any size."""

    def model(self) -> Any:
        return build(flux.SHAPES["full"], torch.device("cuda"))

    def inputs(self, batch: int) -> dict[str, Any]:
        one = flux.SHAPES["full"].inputs(torch.device("cuda"))
        return {name: x if "ids" in name else x.expand(batch, *x.shape[1:]) for name, x in one.items()}

    def call(self, model: Any, arguments: dict[str, Any]) -> Tensor:
        return model(**arguments, return_dict=False)[0]


def _checkpointing(transformer: Any) -> None:
    transformer.enable_gradient_checkpointing()


def test_full_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.get_device_properties(0).total_memory < ENOUGH:
        pytest.skip("needs 80 GiB of GPU memory")
    torch.backends.cuda.enable_cudnn_sdp(False)  # fails in torch 2.11
    settings: dict[str, Any] = {"device": "cuda", "mixed_precision": "bf16"}
    found, seconds = {}, {}
    for name, compiled in {"eager": None, "fast": {}, "warm": {}}.items():
        start = time.perf_counter()
        weights = main(
            tmp_path / name,
            Full(),
            checkpointing=lambda x: x.enable_gradient_checkpointing(),
            compiled=compiled,
            **settings,
        )
        seconds[name] = time.perf_counter() - start
        found[name] = torch.cat([value.flatten() for key, value in weights.items() if "lora_B" in key])
        torch.cuda.empty_cache()
    with capsys.disabled():
        print({name: round(value, 1) for name, value in seconds.items()})
    assert found["eager"].isfinite().all()
    alike = torch.nn.functional.cosine_similarity(found["eager"], found["fast"], dim=0)
    assert alike > 0.95
    assert "failed" not in capsys.readouterr().out
