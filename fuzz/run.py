"""Run mutations, one by one and by their seeds: what a reader raised, how long it took, how long its message is."""

import argparse
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fuzz.readers import READERS
from tread.errors import CheckpointError, ConfigError, DataError

OURS = (ConfigError, DataError, CheckpointError)
SECONDS, CHARACTERS = 2.0, 500
"""Limits of one read: its time, and its message."""
SLOW = "it took"


class TooSlow(BaseException):
    """A read that does not come back; no reader may catch it."""


@dataclass(frozen=True)
class Outcome:
    """One mutation: `wrong` is empty where the reader accepted the file or refused it properly."""

    refused: bool
    wrong: str = ""


def schedule(total: int) -> Iterator[tuple[str, int]]:
    """The reader and the seed of each mutation: every reader by its share, the same ones in every run."""
    weight = sum(reader.share for reader in READERS.values())
    for name, reader in READERS.items():
        for seed in range(-(-total * reader.share // weight)):
            yield name, seed


def file_of(name: str, seed: int) -> bytes:
    """The mutated file of a seed."""
    return READERS[name].make(random.Random(f"{name} {seed}"))


def attempt(name: str, seed: int, folder: Path) -> Outcome:
    """Write the file of a seed below `folder`, an empty one, and read it; if that was slow, again.

    The first file that reaches a library pays for its import.
    """
    path = folder / READERS[name].file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_of(name, seed))
    outcome = _outcome(name, path)
    return _outcome(name, path) if outcome.wrong.startswith(SLOW) else outcome


def _outcome(name: str, path: Path) -> Outcome:
    began = time.process_time()
    try:
        with _limited(10 * SECONDS):
            READERS[name].read(path)
    except OURS as error:
        if len(str(error)) > CHARACTERS:
            return Outcome(True, f"a message of {len(str(error))} characters: {str(error)[:1000]}")
        refused = True
    except (Exception, TooSlow) as error:
        return Outcome(True, "".join(traceback.format_exception(error, limit=-12))[-6000:])
    else:
        refused = False
    took = time.process_time() - began  # of this process: other jobs on the machine do not count
    return Outcome(refused, f"{SLOW} {took:.1f} s" if took > SECONDS else "")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow after so many seconds."""

    def stop(*_: object) -> None:
        raise TooSlow(f"no answer after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(gib: int) -> None:
    """A file that asks for more memory than this is a failure, not the end of the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (gib * 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(rank: int, processes: int, options: argparse.Namespace) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Every so-manieth mutation: counts of those made, refused and failed by reader; failing files are written."""
    torch.set_num_threads(1)
    limit_memory(16)
    warnings.simplefilter("ignore")
    made, refused, failed = Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = os.environ["TREAD_CONFIGS"] = scratch  # the defaults alone, as in a wheel
        os.chdir(scratch)
        for number, (name, seed) in enumerate(schedule(options.mutations)):
            if number % processes != rank or options.only not in name:
                continue
            folder = Path(scratch) / "file"
            outcome = attempt(name, seed, folder)
            shutil.rmtree(folder)
            made[name] += 1
            if made.total() % 5000 == 0:
                print(f"process {rank}: {made.total()} files read, {failed.total()} failed", flush=True)
            refused[name] += outcome.refused
            if outcome.wrong:
                failed[name] += 1
                stem = f"{name.replace(' ', '-').replace(',', '')}-{seed}"
                (options.out / stem).write_bytes(file_of(name, seed))
                (options.out / f"{stem}.txt").write_text(outcome.wrong, errors="backslashreplace")
    return made, refused, failed
