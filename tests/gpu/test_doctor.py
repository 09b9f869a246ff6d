"""`tread doctor` on a GPU: every check finds an answer, and a trial measures memory."""

import json
from pathlib import Path

import pytest

from tests.tiny.runs import TINY, forget
from tread.cli import main
from tread.report.machine import CHECKS, examine

pytestmark = pytest.mark.gpu


def test_every_check_has_an_answer() -> None:
    lines = {finding.name: str(finding) for finding in examine()}
    assert not [line for name, line in lines.items() if name in CHECKS and "cannot be used" in line]
    assert lines["device"].startswith("cuda, ")
    assert "GiB free" in lines["GPU memory"]
    assert lines["CUDA graphs"].startswith("yes")


@pytest.mark.parametrize("settings", [[], ["train.graphs=true"], ["train.precision=bf16", "train.compile=false"]])
def test_a_trial(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget()
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--json", *TINY, *settings])
    (network,) = json.loads(capsys.readouterr().out)["config"]["networks"]
    assert network["dense"]["peak_bytes"] > 0
    assert network["routed"]["finite"]
    assert network["kept_share"] == 0.5
    assert network["dense"]["loss"] == pytest.approx(network["eager_loss"], rel=2e-2)
