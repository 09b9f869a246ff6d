"""The record of a run: a start each time, with what was run; never a secret, and no reason to fail."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny.runs import go_on, train
from tread import __version__
from tread.training.record import FILE, command_line, read_record


def test_each_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/tread", "train", "train.steps=1", "data.token=abc"])
    folder = train(tmp_path / "run", "train.steps=1")
    go_on(folder, "train.steps=2")
    record = read_record(folder)
    assert [start["step"] for start in record["starts"]] == [0, 1]
    for start in record["starts"]:
        assert start["command"] == "tread train train.steps=1 'data.token=********'"
        assert torch.__version__.startswith(start["versions"]["torch"])  # a build may add its own part: 2.11.0+cu130
        assert start["versions"]["tread-diffusion"] == __version__
        assert start["processes"] == 1
    assert record["facts"]["grid"] == [1, 8, 8]
    assert record["facts"]["depth"] == 5
    assert "contents" not in record["facts"]
    go_on(folder)
    assert read_record(folder) == record, "a run with nothing left to do does not start"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"starts": 5}', b"\xff", b'{"starts": [7]}'])
def test_a_damaged_record_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    folder = train(tmp_path / "run", "train.steps=1")
    (folder / FILE).write_bytes(content)
    go_on(folder, "train.steps=2")
    assert [start["step"] for start in json.loads((folder / FILE).read_text())["starts"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/x/tread/__main__.py", "train"], "tread train"),
        (["train.py", "model=tread"], "python train.py model=tread"),
        (["-c"], "-c"),
        ([], "''"),
    ],
)
def test_commands_are_as_they_were_typed(arguments: list[str], shown: str) -> None:
    assert command_line(arguments) == shown
