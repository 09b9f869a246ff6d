"""The official scripts' loop with two lines added: checkpointing, validation and resuming change no weight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.attach.script import HALFWAY, main

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("accelerates_state")]


def _reentrant(transformer: Any) -> None:
    """As older scripts had it."""
    transformer.enable_gradient_checkpointing(
        gradient_checkpointing_func=lambda block, *args: checkpoint(block, *args, use_reentrant=True)
    )


CHECKPOINTING: dict[str, Callable[[Any], None]] = {
    "the model's own": lambda transformer: transformer.enable_gradient_checkpointing(),
    "reentrant": _reentrant,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


TRAINED: dict[str, Tensor] = {}


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter trained without checkpointing, once for all tests."""
    if not TRAINED:
        TRAINED.update(main(tmp_path_factory.mktemp("plain")))
    return TRAINED


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_routing_makes_a_difference(plain: dict[str, Tensor], tmp_path: Path):
    assert difference(main(tmp_path, routed=False), plain) > 1e-3


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_checkpointing_changes_no_weight(name: str, plain: dict[str, Tensor], tmp_path: Path):
    found = main(tmp_path, checkpointing=CHECKPOINTING[name], reentrant=name == "reentrant")
    assert difference(found, plain) == 0.0 if name != "reentrant" else difference(found, plain) < 1e-5


@pytest.mark.parametrize("name", [None, *CHECKPOINTING])
def test_a_resumed_run_goes_on_where_it_was(name: str | None, plain: dict[str, Tensor], tmp_path: Path):
    settings = {} if name is None else {"checkpointing": CHECKPOINTING[name], "reentrant": name == "reentrant"}
    main(tmp_path, **settings, stop_at=HALFWAY)
    found = main(tmp_path, **settings, resume=True)
    assert difference(found, plain) == 0.0 if name != "reentrant" else difference(found, plain) < 1e-5


@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.contract), "the model's own"])
def test_with_the_call_for_speed_the_weights_stay(name: str | None, plain: dict[str, Tensor], tmp_path: Path):
    """Resumed too; on a CPU there are no graphs, and tracing stands for generated code."""
    settings: dict[str, Any] = {} if name is None else {"checkpointing": CHECKPOINTING[name]}
    settings |= {"compiled": {"backend": "aot_eager"}}
    main(tmp_path, **settings, stop_at=HALFWAY)
    assert difference(main(tmp_path, **settings, resume=True), plain) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "the model's own"])
def test_with_graphs_the_weights_stay(name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings: dict[str, Any] = {"device": "cuda"}
    settings |= {} if name is None else {"checkpointing": CHECKPOINTING[name]}
    torch.backends.cuda.enable_cudnn_sdp(False)
    expected = main(tmp_path, **settings)
    found = main(tmp_path, **settings, compiled={"attention": "math", "graphs": True})
    assert difference(found, expected) < 1e-4
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_precision(device: str, tmp_path: Path):
    """`prepare` wraps the model's forward, around which routing goes on."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # in torch 2.11 its kernel for these tiny heads is not finite
    routed = main(tmp_path, mixed_precision="bf16", device=device)
    again = main(tmp_path, mixed_precision="bf16", device=device, checkpointing=CHECKPOINTING["the model's own"])
    assert difference(main(tmp_path, mixed_precision="bf16", device=device, routed=False), routed) > 1e-3
    assert difference(again, routed) <= (0.0 if device == "cpu" else 2e-2)
    assert all(value.dtype == torch.float32 for value in routed.values())
