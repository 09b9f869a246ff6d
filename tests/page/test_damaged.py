"""Whatever a folder holds, a report is written or refused by one of our errors: a run may be half written."""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from PIL import Image

from tread.errors import USER_ERRORS
from tread.page.png import write_pngs
from tread.page.write import write_report

pytestmark = pytest.mark.filterwarnings("ignore")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([2**63, -(10**400), 1e308, -1e-320, 0.5, float("nan"), float("inf"), "", "<b>", "1"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
METRICS = ("step", "loss", "val_loss", "tokens_kept", "images_per_second", "memory_gib", "learning_rate", "FID", "")
LINES = st.lists(
    st.dictionaries(st.sampled_from(METRICS), SCALARS).map(lambda line: {"step": 1, **line}), min_size=1, max_size=8
)
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 2}
PLAN = {"routes": [ROUTE], "schedule": {"cooldown_fraction": 0.5}}
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "tread_config": st.one_of(VALUES, st.just(PLAN), st.just({"routes": [ROUTE]})),
        "grid": st.one_of(VALUES, st.just([1, 2, 2]), st.just([2, 4, 2])),
        "depth": st.one_of(SCALARS, st.just(4)),
        "shape": st.one_of(VALUES, st.just([1, 8, 8])),
        "num_classes": SCALARS,
        "speedup": SCALARS,
    },
)
STARTS = st.one_of(
    VALUES, st.lists(st.dictionaries(st.sampled_from(("command", "versions", "device", "step")), VALUES))
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "model_family": SCALARS,
        "validation_prompt": VALUES,
        "max_train_steps": SCALARS,
        "train": st.one_of(SCALARS, st.fixed_dictionaries({"batch_size": SCALARS, "steps": SCALARS})),
        "sample": st.fixed_dictionaries({"per_class": SCALARS, "classes": SCALARS}),
    },
)


def written(folder: Path, settings: Any, lines: Any, record: Any) -> Path:
    for name in ("samples", "previews"):
        (folder / name).mkdir()
        Image.new("RGB", (20, 9)).save(folder / name / ("step-1.png" if name == "samples" else "step-1-0.png"))
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@hypothesis.given(SETTINGS, LINES, FACTS, STARTS, st.text(max_size=5))
@hypothesis.settings(max_examples=60)
def test_any_run_is_shown_or_refused(settings: Any, lines: Any, facts: Any, starts: Any, summary: str) -> None:
    with TemporaryDirectory() as place:
        folder = written(Path(place), settings, lines, {"facts": facts, "starts": starts, "summary": summary})
        with suppress(*USER_ERRORS):
            assert write_report([folder, folder], folder / "page.html").stat().st_size > 1000


@hypothesis.given(VALUES, VALUES, VALUES)
@hypothesis.settings(max_examples=40)
def test_any_evaluation_is_shown_or_refused(metrics: Any, notes: Any, start: Any) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "e.json"
        path.write_text(json.dumps({"metrics": metrics, "notes": notes, "start": start, "features": notes}))
        with suppress(*USER_ERRORS):
            assert write_report([path], Path(place) / "page.html").stat().st_size > 1000


def test_extreme_numbers_can_be_drawn_by_matplotlib_too(tmp_path: Path) -> None:
    values = (1e-320, -1e99, 1e99, 0, -0.0, 1e-99)
    lines = [{"step": step, "loss": value, "FID": 1e-320} for step, value in enumerate(values)]
    folder = written(tmp_path, {}, lines, {})
    assert write_report([folder]).is_file()
    assert len(write_pngs([folder], tmp_path / "png")) == 2
