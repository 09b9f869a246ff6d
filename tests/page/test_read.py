"""What a run's files say of it: of several starts, of damaged facts, of runs with one name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import write_run
from tread.errors import ConfigError
from tread.page.read import read_run, read_runs
from tread.training.checkpoint import CHECKPOINTS, MANIFEST

ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}
PLAN = {"routes": [ROUTE], "schedule": {"cooldown_fraction": 0.25}}
LINES: list[dict[str, Any]] = [{"step": 1, "loss": 1.0}]


def test_a_fine_tune_that_was_resumed_with_fewer_processes(tmp_path: Path) -> None:
    """Its last start counts, and the furthest step, which the last line need not have."""
    lines = [{"step": step, "loss": 1.0} for step in (1, 3, 2)]
    sizes = {"train_batch_size": 2, "gradient_accumulation_steps": 3}
    facts = {"tread_config": PLAN, "depth": 8}
    path = write_run(tmp_path / "run", lines, facts=facts, model_family="flux", train={}, max_train_steps=8, **sizes)
    record = json.loads((path / "run.json").read_text())
    record["starts"] = [record["starts"][0] | {"processes": count} for count in (4, 2)]
    (path / "run.json").write_text(json.dumps(record))
    run = read_run(path)
    assert (run.kind, run.processes, run.batch) == ("fine-tuning", 2, 12)
    assert (run.steps, run.last_step) == (8, 3)
    assert run.plan is not None
    assert run.plan.schedule is not None
    assert run.plan.schedule.total_steps == 8


def test_a_batch_of_pretraining_is_that_of_all_processes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LINES)
    record = json.loads((path / "run.json").read_text())
    record["starts"][0]["processes"] = 4
    (path / "run.json").write_text(json.dumps(record))
    assert read_run(path).batch == 10


def test_a_plan_whose_steps_or_depth_are_unknown(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "endless", LINES, facts={"tread_config": PLAN, "depth": 8}, train={}))
    assert run.plan is None, "its cool-down begins nobody knows when"
    run = read_run(write_run(tmp_path / "run", LINES, facts={"tread_config": {"routes": [ROUTE]}}))
    assert run.plan is not None
    assert run.plan.depth is None


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ([2, 3, 4], (2, 3, 4)),
        ([1, 1024, 1024], (1, 1024, 1024)),
        *((grid, None) for grid in ([1, 1024, 1025], [0, 4, 4], [4, 4], [1, True, 4], "1x4x4")),
    ],
)
def test_grids_that_can_be_drawn(tmp_path: Path, grid: Any, expected: Any) -> None:
    assert read_run(write_run(tmp_path / "run", LINES, facts={"grid": grid})).grid == expected


def test_values_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    values = [0.5, True, "1", None, 1e300, -1e300, 2]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values)]
    assert read_run(write_run(tmp_path / "run", lines)).values("loss") == [(0, 0.5), (6, 2)]


def test_without_a_record_the_newest_readable_checkpoint_tells(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LINES)
    (path / "run.json").unlink()
    for step, text in ((1, '{"depth": 1}'), (2, '{"depth": 2}'), (3, "[]"), (4, "{")):
        folder = path / CHECKPOINTS / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(text)
    run = read_run(path)
    assert run.facts == {"depth": 2}
    assert run.notes == ["The run has no record of its starts (run.json), so its command and versions are not known."]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, LINES) for name in ("a/run", "b/run", "other")]
    assert [run.name for run in read_runs(paths)] == ["a/run (1)", "b/run (2)", "other"]
    (tmp_path / "link").symlink_to(paths[0])
    with pytest.raises(ConfigError, match="are one run: name it once"):
        read_runs([paths[0], tmp_path / "link"])
