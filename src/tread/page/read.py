"""Read a run's folder: settings, metrics, the record of its starts, metrics of an evaluation.

Files may be of an earlier version, half written, or by someone else: unusable parts are left out with a note, and only
a folder with nothing to show is refused.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tread.config.layers import flatten
from tread.errors import ConfigError, masked, shown
from tread.files import is_file, is_folder
from tread.routing.plan import RoutePlan
from tread.training import metrics
from tread.training.checkpoint import CHECKPOINTS, MANIFEST, list_checkpoints
from tread.training.job import CONFIG_FILE, saved_settings
from tread.training.record import read_record, starts
from tread.words import counted

Kind = Literal["pretraining", "fine-tuning", "evaluation"]
FIGURES = "evaluation.json"
"""The file that `tread eval --work FOLDER` writes."""
TUNING = "measurements.json"
"""The file that `tread autotune` writes."""
MOST_TOKENS, MOST_STEPS, LARGEST = 2**20, 2**53, 1e100
"""Limits of plausible values; larger ones mean a damaged file."""
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; `lines` are its metrics, `facts` describe the model, from its record or newest checkpoint."""

    path: Path
    name: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings by dotted name, without secrets."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics of an evaluation."""

    def values(self, name: str) -> Points:
        """(step, value) of one metric, without values that are not numbers."""
        return [(line["step"], line[name]) for line in self.lines if is_number(line.get(name))]

    @property
    def last_step(self) -> int:
        """The last optimizer step in the metrics."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def steps(self) -> int | None:
        """Optimizer steps set in the config."""
        return whole(self.settings.get("train.steps", self.settings.get("max_train_steps")))

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Command, versions and device of each start."""
        return starts(self.record)

    @property
    def processes(self) -> int:
        """Processes of the last start."""
        return (whole(self.starts[-1].get("processes")) if self.starts else None) or 1

    @property
    def batch(self) -> int | None:
        """Samples per optimizer step, over all processes."""
        if self.kind == "pretraining":
            return whole(self.settings.get("train.batch_size"))
        sizes = [whole(self.settings.get(name)) for name in ("train_batch_size", "gradient_accumulation_steps")]
        return None if None in sizes else math.prod(size or 1 for size in sizes) * self.processes

    @property
    def plan(self) -> RoutePlan | None:
        """The resolved plan, with the seed of its selections; None if the run is dense or its plan is unknown."""
        config, depth = self.facts.get("tread_config"), self.facts.get("depth")
        if not isinstance(config, dict):
            return None
        with suppress(ConfigError):
            plan = RoutePlan.from_config(config)
            plan = plan.with_total_steps(self.steps) if self.steps else plan
            if plan.schedule is not None:
                plan.schedule.scale(0)  # raises on a schedule without the number of steps
            return plan if depth is None else plan.resolve(depth)
        return None

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """The token grid of a sample: frames, rows, columns; None if it is unknown."""
        grid = self.facts.get("grid")
        if not isinstance(grid, list) or len(grid) != 3 or not all((whole(size) or 0) > 0 for size in grid):
            return None
        return (grid[0], grid[1], grid[2]) if math.prod(grid) <= MOST_TOKENS else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of a report, all of the same `kind`, with unique names."""
    runs = [read_run(path) for path in paths]
    real = [path.resolve() for path in paths]
    if repeated := [path for path, one in zip(paths, real, strict=True) if real.count(one) > 1]:
        raise ConfigError(f"{' and '.join(shown(str(path), 150) for path in repeated[:2])} are one run: name it once.")
    other = next((run for run in runs if run.kind != runs[0].kind), None)
    if other is not None:
        raise ConfigError(
            f"{runs[0].path} is {_a(runs[0].kind)} and {other.path} {_a(other.kind)}: their figures mean different "
            "things, so one report has runs of one kind. Write a report of each."
        )
    names = [run.name for run in runs]
    clashes = {name for name in names if names.count(name) > 1}
    return [_renamed(run, index) if run.name in clashes else run for index, run in enumerate(runs)]


def read_run(path: Path) -> Run:
    """The run in a folder, or the evaluation in a folder or a JSON file."""
    if is_file(path):
        return _evaluation(path, path.stem)
    if not is_folder(path):
        raise ConfigError(f"there is no {shown(str(path), 300)}; name the folder of a run.")
    if is_file(path / CONFIG_FILE):
        return _training(path)
    if is_file(path / FIGURES):
        return _evaluation(path / FIGURES, _name(path))
    if is_file(path / TUNING):
        raise ConfigError(
            f"{shown(str(path), 200)} is the folder of a tuning, whose report `tread autotune` has written there, "
            "report.html; name runs, such as those below its folder verify."
        )
    raise ConfigError(
        f"{shown(str(path), 200)} is not the folder of a run: it has no {CONFIG_FILE}, and no {FIGURES} of "
        "`tread eval --work`."
    )


def _training(folder: Path) -> Run:
    settings = saved_settings(folder)
    readable, damaged = metrics.read_lines(folder) if is_file(folder / metrics.FILE) else ([], 0)
    lines = [line for line in readable if 0 <= line["step"] < MOST_STEPS]
    damaged += len(readable) - len(lines)
    if not lines:
        every = "logging_steps" if "model_family" in settings else "log.every"
        raise ConfigError(
            f"{folder} has no metrics yet: a run writes the first lines of {metrics.FILE} after {every} steps."
        )
    notes = [f"{counted(damaged, 'line')} of {metrics.FILE} cannot be read, and {_is(damaged)} left out."] * (
        damaged > 0
    )
    record = read_record(folder)
    facts = record.get("facts")
    if not isinstance(facts, dict):
        facts = _checkpoint_facts(folder)
        notes.append("The run has no record of its starts (run.json), so its command and versions are not known.")
    return Run(
        path=folder,
        name=_name(folder),
        kind="fine-tuning" if "model_family" in settings else "pretraining",
        settings=masked(flatten(settings)),
        lines=lines,
        record=record,
        facts=facts,
        notes=notes,
    )


def _evaluation(path: Path, name: str) -> Run:
    try:
        saved = json.loads(path.read_bytes())
        figures = {str(key): value for key, value in saved["metrics"].items() if is_number(value)}
        settings: dict[str, Any] = {key: saved.get(key) for key in ("features", "samples", "reference")}
        paths, start = saved.get("paths", {}), saved.get("start")
        notes = [str(note) for note in saved.get("notes", ())]
        settings |= {f"{key} path": value for key, value in paths.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{shown(str(path), 200)} has no figures of an evaluation: give what `tread eval --json` printed, or the "
            "folder of a run."
        ) from None
    record = {"starts": [start]} if isinstance(start, dict) else {}
    return Run(path=path, name=name, kind="evaluation", settings=settings, figures=figures, notes=notes, record=record)


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Facts from the newest checkpoint's manifest, for runs of earlier versions, which have no record."""
    for path in reversed(list_checkpoints(folder / CHECKPOINTS)):
        with suppress(OSError, ValueError, RecursionError):
            facts = json.loads((path / MANIFEST).read_bytes())
            if isinstance(facts, dict):
                return facts
    return {}


def is_number(value: object) -> bool:
    """Whether a value of a JSON file is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _renamed(run: Run, index: int) -> Run:
    return replace(run, name=f"{run.path.resolve().parent.name}/{run.name} ({index + 1})")


def _a(kind: Kind) -> str:
    return "an evaluation" if kind == "evaluation" else f"a {kind} run"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
