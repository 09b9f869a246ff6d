"""Every recipe for fine-tuning is read, keeps to the advice, and together they show every family."""

import json
import warnings
from pathlib import Path

import pytest

from tread.finetune.config import check, read_config
from tread.finetune.families import TUNE_FAMILIES
from tread.routing.risks import adapter_risks, layer_risks

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "finetune").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_as_it_stands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read_config(path)
    plan = config.plan()
    assert plan is not None
    assert layer_risks(plan.resolve(24)) == []
    if config.adapts:
        assert adapter_risks(plan) == []
    assert config.output_dir == f"runs/{path.stem}"
    assert f"recipes/finetune/{path.name}" in path.read_text()
    check(path, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert not [one for one in report["keys"] if one["verdict"] == "unsupported"]
    places = [str(entry["instance_data_dir"]) for entry in config.data_entries()]
    assert all(any(place in problem for place in places) for problem in report["problems"]), "nobody has the data"


def test_every_family_has_one() -> None:
    assert {read_config(path).model_family for path in RECIPES} == set(TUNE_FAMILIES)
