"""`tread autotune` on a GPU: compiled layers and CUDA graphs follow every plan.

The time of a step is a known law of the tokens that its handle says were kept. A graph of another plan, replayed, would
bring back that plan's selections, and the fit would no longer be exact.
"""

import json
from pathlib import Path

import pytest

from tests.autotune.conftest import law
from tests.autotune.tuned import SCRATCH, Law, config_file, measurements, tune_cli
from tests.report.conftest import Tune, tune

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
__all__ = ["law", "tune"]


@pytest.mark.parametrize("settings", [["train.graphs=true"], ["train.compile=false"], ["train.precision=bf16"]])
def test_from_scratch(law: Law, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    law.steps = 5
    given = [*SCRATCH, *settings, "--target-speedup", "1.05", "--edges", "3", "--ratios", "0.25,0.5"]
    assert tune_cli(*given, "--start-steps", "3") == 0
    facts = measurements(Path("autotune/train"))
    assert facts["result"]["cost"]["error"] < 1e-9
    assert not any("no GPU" in note for note in facts["result"]["notes"])
    for one in facts["result"]["finalists"]:
        assert one["timed_speedup"] == pytest.approx(one["speedup"], rel=1e-9)


def test_a_fine_tune(
    law: Law, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One ratio, because layers are compiled for each: of the second stack, dense and routed, also once more where a
    window begins or ends, with inputs in another layout."""
    monkeypatch.chdir(tmp_path)
    law.steps = 5
    config = tune("flux", graphs=True, mixed_precision="bf16", max_train_steps=4, validation_prompt=None)
    assert tune_cli(config_file(config), "--target-speedup", "1.01", "--ratios", "0.4") == 0
    assert "a first step that compiles layers for 2 lengths: 16 and 10 tokens" in capsys.readouterr().out
    facts = measurements(Path("autotune/c"))
    assert facts["result"]["cost"]["error"] < 1e-9
    assert json.loads(Path("autotune/c/tread_config.json").read_text())["tread_config"]["routes"]
