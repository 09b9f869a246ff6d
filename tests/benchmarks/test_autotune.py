"""The benchmarks of the tuner: prediction errors by a known law, and rank correlations by hand."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.autotune import predict, rank
from benchmarks.autotune.__main__ import main
from tests.autotune.conftest import law
from tests.autotune.tuned import SCRATCH, Law
from tests.programs import ROOT
from tests.tiny.runs import forget
from tests.training.conftest import use_cpu
from tread.autotune.measure import steady

pytestmark = pytest.mark.filterwarnings("ignore")
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("quality-430s*.json"))
__all__ = ["law"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    use_cpu(monkeypatch)
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


def test_a_known_law_is_predicted_exactly(law: Law) -> None:
    def timer(step: Any) -> float:
        step()
        return law.seconds()

    found = predict.measure(None, SCRATCH, timer=timer)
    assert len(found["plans"]) == 6
    assert found["worst"] < 1e-9
    for row in found["plans"].values():
        assert row["predicted_seconds"] == pytest.approx(row["timed_seconds"], rel=1e-9)
    law_of = {name: row["timed_seconds"] for name, row in found["plans"].items()}
    assert law_of["dense"] == pytest.approx(law.fixed + 8 * (law.linear + law.square))


@pytest.mark.parametrize("depth", [5, 8, 12, 28, 57])
def test_unseen_plans_run(depth: int) -> None:
    from tread.routing.plan import RoutePlan

    for routes in predict.unseen(depth):
        RoutePlan(routes=routes).resolve(depth)


def test_a_step_is_timed(law: Law) -> None:
    """The real timer, whatever it says."""
    import torch

    calls: list[int] = []
    assert steady(torch.device("cpu"))(lambda: calls.append(1)) >= 0
    assert len(calls) >= 5


def brute_kendall(one: list[float], other: list[float]) -> float:
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    same = sum((one[i] - one[j]) * (other[i] - other[j]) > 0 for i, j in pairs)
    opposite = sum((one[i] - one[j]) * (other[i] - other[j]) < 0 for i, j in pairs)
    return (same - opposite) / len(pairs)


def test_rank_correlations() -> None:
    one = [3.0, 1.0, 2.0, 5.0]
    for other in itertools.permutations([1.0, 2.0, 3.0, 4.0]):
        assert rank.kendall(one, other) == pytest.approx(brute_kendall(one, list(other)))
        squared = sum((a - b) ** 2 for a, b in zip(rank.ranks(one), rank.ranks(list(other)), strict=True))
        assert rank.spearman(one, other) == pytest.approx(1 - 6 * squared / (4 * 15))
    assert rank.ranks([1.0, 2.0, 2.0]) == [0.0, 1.5, 1.5]
    assert rank.kendall([1.0, 1.0], [1.0, 2.0]) == 0.0
    assert rank.chance([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(1 / 6)
    assert rank.chance([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == 1


def test_the_arms_that_were_run_at_length() -> None:
    """Those of docs/results.md, and what the rules say about each of them."""
    arms = {arm.name: arm for arm in rank.read_arms(RESULTS, 430.0)}
    assert {"dense", "routed", "ratio-0.75"} <= set(arms)
    assert arms["routed"].seeds >= 2
    assert arms["routed"].distance < arms["ratio-0.75"].distance < arms["dense"].distance
    told = rank.correlate(list(arms.values()), {"dense": 0.0, "routed": 0.1, "ratio-0.75": 0.3})
    assert told["arms"]["routed"]["breaks"] == told["arms"]["dense"]["breaks"] == []
    assert "keeps 64 of 256 tokens" in told["arms"]["ratio-0.75"]["breaks"][0]
    if len(arms) == 3:
        assert "3 arms were run at length" in told["verdict"]
        assert "proves nothing" in told["verdict"]
        assert told["scores"]["speed-up"]["kendall"] == pytest.approx(1 / 3)
        assert told["scores"]["loss gap"]["kendall"] == pytest.approx(-1 / 3)


def test_few_arms_prove_nothing() -> None:
    assert "proves nothing" in rank.verdict(5)
    assert "proves nothing" not in rank.verdict(6)
    assert "once in 120" in rank.verdict(5)


def test_the_arms_of_the_paper() -> None:
    """The rules order them better than speed alone, which does no better than chance; 1..8 is allowed, 0..8 is not."""
    figure, known = rank.long_runs(["paper"], 0.0)
    assert figure.startswith("FID after 400,000 steps")
    told = rank.correlate(known, {})
    arms = told["arms"]
    assert len(arms) == 12
    assert arms["0.5@2..8"]["distance"] == min(arm["distance"] for arm in arms.values())
    assert arms["0.5@1..8"]["distance"] == pytest.approx(21.77)  # 43.47 dense, 21.7 less
    assert arms["0.5@2..8"]["speed"] == pytest.approx(1.43, abs=0.01)
    broken = {name for name, arm in arms.items() if arm["breaks"]}
    assert broken == {"0.75@2..8", "0.5@0..4", "0.5@0..8", "0.5@0..10"}
    assert told["scores"]["speed-up"]["chance"] > 0.5
    assert told["scores"]["rules, then speed-up"]["kendall"] == pytest.approx(0.595, abs=0.001)
    assert told["scores"]["rules, then speed-up"]["chance"] < 0.01


def test_gaps_of_arms_are_measured_and_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size: the routes of the recorded arms on a DiT of twelve layers."""
    files = list(map(str, RESULTS))
    settings = [*SCRATCH, "model.depth=12"]
    assert main(["gaps", *settings, "--arms", *files, "--start-steps", "3", "--out", "gaps.json"]) == 0
    gaps = json.loads(Path("gaps.json").read_text())["gaps"]
    assert gaps["dense"] == 0
    assert gaps["routed"] != gaps["ratio-0.75"]
    capsys.readouterr()
    assert main(["rank", *files, "--gaps", "gaps.json", "--out", "rank.json"]) == 0
    assert "rules, then loss gap" in capsys.readouterr().out
    assert json.loads(Path("rank.json").read_text())["command"].startswith("python -m benchmarks.autotune rank ")
