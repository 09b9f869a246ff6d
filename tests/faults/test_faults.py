"""A small share of `make faults`: a job that a fault ended comes to the same end; the harness sees any other end."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from faults.child import Ended, run
from faults.jobs import JOBS
from faults.outcome import difference
from faults.run import Reference, attempt, bad_end, schedule, undisturbed
from faults.strikes import FAULTS, ORDER, fault_of
from tread.training import parts

pytestmark = pytest.mark.filterwarnings("ignore")
KILLS = [(job, 0) for job in JOBS]
FURTHER = [pytest.param(job, 2, marks=pytest.mark.contract) for job in JOBS if not job.endswith(("routed", "lora"))]
OTHERS = [("train", "torn"), ("train-routed", "worker"), ("train", "stop"), ("encode", "full"), ("eval", "readonly")]
References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """`reference("train")`: the undisturbed job."""
    scratch, known = tmp_path_factory.mktemp("undisturbed"), {}

    def find(job: str) -> Reference:
        if job not in known:
            known[job] = undisturbed(job, scratch)
        return known[job]

    return find


@pytest.mark.parametrize(("job", "case"), [*KILLS, *FURTHER, *((job, ORDER.index(fault)) for job, fault in OTHERS)])
def test_a_job_that_a_fault_ended_comes_to_the_same_end(
    job: str, case: int, reference: References, tmp_path: Path
) -> None:
    assert not attempt(reference(job), case, tmp_path / "case").wrong


def test_a_moment_lost_on_resume_is_found(
    reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference("train")
    fourth = [number for number, event in enumerate(whole.events, 1) if event == "step"][3]
    monkeypatch.setattr("faults.run.STRIKES", (1,))
    monkeypatch.setattr("random.Random.choice", lambda _, among: fourth if fourth in among else among[0])
    monkeypatch.setattr(parts, "load_optimizer", lambda *_: None)
    assert "run/checkpoints/step-00000004/optimizer.safetensors" in attempt(whole, 0, tmp_path / "case").wrong


@pytest.mark.parametrize(
    ("status", "err", "wrong"),
    [
        (2, "tread train: cannot write run/config.yaml (File too large): free space.", ""),
        (2, "tread train: [Errno 27] File too large", "its last words are no sentence of ours"),
        (1, "Traceback (most recent call last): ...", "it ended with 1"),
        (-11, "", "it ended with -11"),
    ],
)
def test_an_end_without_a_sentence_is_found(status: int, err: str, wrong: str) -> None:
    found = bad_end(FAULTS["full"], Ended(status, "", err), sure=False)
    assert found.startswith(wrong) if wrong else not found


def test_a_job_that_hangs_is_no_job_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faults.child.LONGEST", 1)
    ended = run(["--help"], tmp_path, lambda _: None, prepare=lambda: time.sleep(60))
    assert ended.status == -signal.SIGKILL
    wrong = bad_end(FAULTS["kill"], ended, sure=False)
    assert wrong.startswith("it hung for 1 s")
    assert f'"{__file__}", line' in wrong  # the stack


def test_a_killed_job_is_not_waited_for_until_its_workers_end(tmp_path: Path) -> None:
    def leave_a_worker() -> None:
        if os.fork() == 0:
            time.sleep(5)
            (tmp_path / "worker ended").touch()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(["--help"], tmp_path, lambda _: None, leave_a_worker).status == -signal.SIGKILL
    assert not (tmp_path / "worker ended").exists()


def test_a_job_killed_while_it_draws_a_bar_takes_no_lock_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_drawing() -> None:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    shared = multiprocessing.RLock()
    monkeypatch.setattr(tqdm, "_lock", shared, raising=False)
    assert run(["--help"], tmp_path, lambda _: None, die_drawing).status == -signal.SIGKILL
    assert shared.acquire(timeout=5)


def test_what_a_stop_may_leave_is_no_difference_and_anything_else_is() -> None:
    last, stopped = "run/checkpoints/step-00000006/model.safetensors", "run/checkpoints/step-00000005/model.safetensors"
    expected = {"run/checkpoints/step-00000004/model.safetensors": b"4", last: b"6"}
    assert not difference(expected, {stopped: b"5", last: b"6"})
    assert difference(expected, {**expected, last: b"7"}) == f"different: {last}"
    assert difference(expected, {stopped: b"5"}) == f"missing: {last}"
    assert difference(expected, {**expected, "run/half": b""}) == "left over: run/half"


def test_the_schedule_has_as_many_kills_as_asked_for_and_every_fault() -> None:
    faults = [(job, fault_of(case, JOBS[job].workers)) for job, case in schedule(200, list(JOBS))]
    assert sum(fault == "kill" for _, fault in faults) >= 200
    for job in JOBS:
        left_out = set() if JOBS[job].workers else {"worker"}
        assert {fault for name, fault in faults if name == job} == FAULTS.keys() - left_out
