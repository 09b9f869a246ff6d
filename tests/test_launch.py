"""`recipes/launch/`: the scripts with stub commands on PATH, what these are given as its readers see it, a real run."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from tests.programs import ROOT, environment
from tests.tiny.runs import TINY
from tread.pretrain.config import compose
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints

LAUNCH = ROOT / "recipes" / "launch"
RUN = ["train", "recipes/dit-s-2.yaml", "data.path=/data", "resume=latest"]
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NNODES": "1",
}
STUBS = {
    # as Slurm's own: the options go, the rest runs; a rank's exit code becomes the step's
    "srun": 'while [[ $1 == --* ]]; do echo "srun $1" >> "$LOG"; shift; done; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [[ $1 == show ]] && printf "${NODE:-node1}\\nnode2\\n"; exit 0',
    "torchrun": 'printf "%s\\n" "$@" > "$LOG"',
    "tread": 'echo "tread $* $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> "$LOG"; '
    "exit ${CODE:-0}",
}


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has stub commands first; they write what they were given to $LOG."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LOG": str(tmp_path / "log")}


def script(name: str, stubs: dict[str, str], *arguments: str, **changes: str) -> tuple[int, list[str]]:
    """A script's exit code, and the lines that the stubs wrote."""
    Path(stubs["LOG"]).unlink(missing_ok=True)
    done = subprocess.run(
        [LAUNCH / name, *arguments], env=environment(**stubs, **changes), capture_output=True, text=True
    )
    assert not done.stderr
    return done.returncode, Path(stubs["LOG"]).read_text().splitlines()


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_valid_and_can_be_run(path: Path) -> None:
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
    assert f"recipes/launch/{path.name}" in path.read_text()


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("one-node.sh", {}, {"standalone": True, "nproc_per_node": "gpu", "max_restarts": 3, "nnodes": "1:1"}),
        ("one-node.sh", {"GPUS": "4", "RESTARTS": "0"}, {"nproc_per_node": "4", "max_restarts": 0}),
        (
            "several-nodes.sh",
            {"HEAD": "node1:29500", "NODES": "8", "JOB": "xl"},
            {"nnodes": "8", "rdzv_endpoint": "node1:29500", "rdzv_backend": "c10d", "rdzv_id": "xl"},
        ),
    ],
)
def test_torchrun_is_given_what_it_reads(
    name: str, changes: dict[str, str], expected: dict[str, object], stubs: dict[str, str]
) -> None:
    code, given = script(name, stubs, *RUN, **changes)
    assert code == 0
    read = vars(get_args_parser().parse_args(given))
    assert {key: read[key] for key in expected} == expected
    assert (read["module"], read["training_script"], read["training_script_args"]) == (True, "tread", RUN)
    assert compose(read["training_script_args"][1:]).resume == "latest"


def test_one_gpu_is_the_command_itself(stubs: dict[str, str]) -> None:
    code, given = script("one-gpu.sh", stubs, *RUN, CODE="3")
    assert code == 3
    assert given[0].startswith(f"tread {' '.join(RUN)} ")


def test_nodes_without_a_head_are_told_so(stubs: dict[str, str]) -> None:
    done = subprocess.run([LAUNCH / "several-nodes.sh", *RUN], env=environment(**stubs), capture_output=True, text=True)
    assert done.returncode
    assert "set HEAD to HOST:PORT of one of the nodes" in done.stderr


@pytest.mark.parametrize(
    ("code", "requeued"),
    [
        (0, False),
        (2, False),  # a mistake in the settings
        (128 + signal.SIGUSR1, True),  # the time limit
        (128 + signal.SIGTERM, True),  # preemption
        (128 + signal.SIGINT, False),  # somebody's Ctrl-C
        (128 + signal.SIGKILL, False),  # out of memory
    ],
)
def test_slurm_requeues_what_a_signal_stopped(code: int, requeued: bool, stubs: dict[str, str]) -> None:
    status, log = script("slurm.sh", stubs, *RUN, **SLURM, CODE=str(code))
    assert f"tread {' '.join(RUN)} 0 0 1 1 node1 29500" in log
    assert ("scontrol requeue 77" in log) == requeued
    assert status == (0 if requeued else code)


def test_slurm_does_not_requeue_for_ever(stubs: dict[str, str]) -> None:
    again = {"SLURM_RESTART_COUNT": "5", "RESTARTS": "5"}
    status, log = script("slurm.sh", stubs, *RUN, **SLURM, **again, CODE="138")
    assert status == 138
    assert not [line for line in log if "requeue" in line]


@pytest.mark.slow
def test_a_run_that_slurm_preempts_saves_requeues_and_goes_on(stubs: dict[str, str], tmp_path: Path) -> None:
    """The real command, under the script, with the signal sent to script and run alike."""
    tread = Path(stubs["PATH"].split(os.pathsep)[0]) / "tread"
    tread.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m tread "$@"\n')
    folder = tmp_path / "run"
    settings = [*TINY, "resume=latest", "checkpoint.every=5", "log.every=5", f"output_dir={folder}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = {"NODE": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "ACCELERATE_USE_CPU": "true"}
    env = environment(**stubs, **SLURM, **here, CUDA_VISIBLE_DEVICES="")
    command = [LAUNCH / "slurm.sh", "train", *settings]
    job = subprocess.Popen(
        [*command, "train.steps=1000000"], env=env, stdout=subprocess.PIPE, text=True, process_group=0
    )
    while not list_checkpoints(folder / CHECKPOINTS):
        assert job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGUSR1)
    said = job.communicate()[0]
    assert job.returncode == 0
    assert "stopped by signal 10 and saved: job 77 goes back into the queue" in said
    assert "scontrol requeue 77" in Path(stubs["LOG"]).read_text()
    last = int(list_checkpoints(folder / CHECKPOINTS)[-1].name.removeprefix("step-"))
    done = subprocess.run([*command, f"train.steps={last + 2}"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {folder}/checkpoints/step-{last:08d}" in done.stdout


@pytest.mark.parametrize("path", sorted((LAUNCH / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path: Path) -> None:
    config: Any = load_config_from_file(str(path))
    processes = {"one-gpu": 1, "one-node": 8, "several-nodes": 64}[path.stem]
    assert config.num_processes == processes
    assert config.distributed_type == ("NO" if processes == 1 else "MULTI_GPU")
    assert f"recipes/launch/accelerate/{path.name}" in path.read_text()
    read = launch_command_parser().parse_args(["--config_file", str(path), "-m", "tread", *RUN])
    assert (read.module, read.training_script, read.training_script_args) == (True, "tread", RUN)
