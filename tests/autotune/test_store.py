"""Measurements on disk, and the time that they may take."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from tread.autotune.measure import Budget
from tread.autotune.store import FILE, FORMAT, KINDS, Store, claimed
from tread.errors import ConfigError


def test_a_measurement_is_on_disk_when_it_is_made(tmp_path: Path) -> None:
    store = Store(tmp_path, {"width": 16, "levels": (1, 2)}, {"command": "a"})
    store.add("seconds", "dense", [1.5])
    store.add("losses", "2..3@0.5", [(1.0, 1.5)])
    again = Store(tmp_path, {"width": 16, "levels": (1, 2)}, {"command": "b"})
    assert again.get("seconds", "dense") == [1.5]
    assert again.get("losses", "2..3@0.5") == [[1.0, 1.5]]
    assert again.get("losses", "2..3@0.25") is None
    assert [start["command"] for start in again.facts["starts"]] == ["a", "b"]
    assert (store.start, again.start) == (0, 1)


def test_losses_after_a_dense_start_of_another_length_are_discarded(tmp_path: Path) -> None:
    store = Store(tmp_path, {}, {})
    store.since_start(200)
    for kind in ("losses", "seconds"):
        store.add(kind, "dense", [1.0])
    again = Store(tmp_path, {}, {})
    again.since_start(200)
    assert again.get("losses", "dense") == [1.0]
    again.since_start(100)
    assert again.get("losses", "dense") is None
    assert again.get("seconds", "dense") == [1.0]
    again.add("losses", "dense", [2.0])
    last = Store(tmp_path, {}, {})
    last.since_start(100)
    assert last.get("losses", "dense") == [2.0]


def test_measurements_of_something_else_are_refused(tmp_path: Path) -> None:
    Store(tmp_path, {"model": {"width": 16}, "device": "NVIDIA H200"}, {}).write()
    with pytest.raises(ConfigError, match=r"has measurements of something else \(device: NVIDIA H200 -> cpu\)"):
        Store(tmp_path, {"model": {"width": 16}, "device": "cpu"}, {})
    with pytest.raises(ConfigError, match=r"model.width: 16 -> 32\): name another --out"):
        Store(tmp_path, {"model": {"width": 32}, "device": "NVIDIA H200"}, {})


WHOLE = {"format": FORMAT, "subject": {}, "starts": [], **{kind: {} for kind in KINDS}}
OTHER_TYPES = ({"format": FORMAT - 1}, {"subject": []}, {"starts": {}}, {"seconds": []}, {"verified": None})


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2, "subject": {}}']
    + [json.dumps(WHOLE | changes) for changes in OTHER_TYPES],
)
def test_a_damaged_file_is_not_written_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "measurements.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="cannot be read as measurements of this version: remove it"):
        Store(tmp_path, {}, {})
    assert path.read_text() == content
    path.write_text(json.dumps(WHOLE))
    assert Store(tmp_path, {}, {}).start == 0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = r"cannot write to '.*file/out': .*Name another folder with --out"
    with pytest.raises(ConfigError, match=sentence), claimed(tmp_path / "file" / "out"):
        pass


def test_a_folder_that_another_tuning_holds(tmp_path: Path) -> None:
    with claimed(tmp_path / "out"):
        sentence = "another `tread autotune` works in"
        with pytest.raises(ConfigError, match=sentence), claimed(tmp_path / "out"):
            pass
    with claimed(tmp_path / "out"):
        pass


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    half = tmp_path / f".{FILE}.{uuid4().hex}.tmp"
    half.write_text("{")
    with claimed(tmp_path):
        assert not half.exists()


def test_a_write_that_fails_leaves_the_last_whole_file(tmp_path: Path) -> None:
    store = Store(tmp_path, {}, {})
    store.add("seconds", "dense", [1.0])
    with pytest.raises(TypeError):
        store.add("seconds", "2..3@0.5", object())
    assert json.loads((tmp_path / "measurements.json").read_text())["seconds"] == {"dense": [1.0]}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_begins_that_would_not_fit() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    done = []
    for item in budget.fitting(range(9), "x"):
        clock.now += 3.0
        done.append(item)
    assert done == [0, 1, 2]
    assert budget.left == 1.0


def test_a_budget_that_is_over_begins_nothing() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 10.0
    assert list(budget.fitting([1], "x")) == []


def test_nothing_to_measure_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Budget(10.0, Clock()).fitting([], "x")) == []
    assert capsys.readouterr() == ("", "")
