"""A small share of `make fuzz`: a mutated file is read or refused in a sentence, and the fuzzer sees anything else."""

import shutil
from pathlib import Path

import pytest

from fuzz.reader import Reader
from fuzz.readers import READERS
from fuzz.run import attempt, file_of, schedule

SHARE = 2000
"""Mutations of all readers together; those that import diffusers take most of the time."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TREAD_CONFIGS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for reader, seed in schedule(SHARE):
        if reader == name:
            assert not attempt(name, seed, tmp_path / "file").wrong, f"seed {seed}"
            shutil.rmtree(tmp_path / "file")


def test_every_run_has_the_same_files() -> None:
    assert len(list(schedule(200_000))) >= 200_000
    assert file_of("plan", 5) == file_of("plan", 5)
    assert len({file_of("plan", seed) for seed in range(50)}) > 40


def _raise(path: Path) -> None:
    raise KeyError(path.name)


def _talk(path: Path) -> None:
    from tread.errors import DataError

    error = DataError("")
    error.args = ("x" * 501,)
    raise error


@pytest.mark.parametrize(("read", "told"), [(_raise, "KeyError: 'file'"), (_talk, "a message of 501 characters")])
def test_what_a_reader_must_not_do_is_found(
    read: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "bad", Reader("file", lambda rng: b"", read))  # pyright: ignore[reportArgumentType]
    assert told in attempt("bad", 0, tmp_path).wrong
