"""Two hosts: one is cut off, one is slow, the disk of one is full; a run ends with an error or goes on, never hangs."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.server import serving
from tests.programs import ROOT, environment
from tests.tiny.runs import TINY, go_on, metrics, train, write_shards
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints

pytestmark = pytest.mark.contract  # `make faults` runs these
SECONDS = 8
"""That a rank waits for the other."""
ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
RANK = [sys.executable, "-m", "tests.hosts.rank", f"train.timeout_minutes={SECONDS / 60}"]


def allowed(*probe: str) -> bool:
    try:
        return subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:
        return False


def started(folder: Path, *settings: str, **changes: str) -> subprocess.Popen[str]:
    """A run on two hosts."""
    probe = "ip link add name here type veth peer name there && unshare -n true"
    if not allowed("unshare", "-rn", "bash", "-c", probe):
        pytest.skip("network namespaces are not permitted here (unshare -rn, ip link add ... type veth)")
    folder.mkdir(exist_ok=True)
    command = ["unshare", "-rn", str(ROOT / "tests" / "hosts" / "hosts.sh"), str(folder), *RANK, *TINY, *settings]
    return subprocess.Popen(command, env=environment(**ON_CPU, **changes), cwd=ROOT, text=True)


def ended(folder: Path, hosts: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit code and errors of each rank."""
    hosts.wait()
    return [(int((folder / f"code-{rank}").read_text()), (folder / f"err-{rank}").read_text()) for rank in (0, 1)]


def test_a_host_that_is_cut_off_ends_the_run_and_a_resume_goes_on(tmp_path: Path) -> None:
    """Nothing comes through the cable any more, not even the end of a connection."""
    run = tmp_path / "run"
    settings = ["log.every=1", "checkpoint.every=5", f"output_dir={run}"]
    hosts = started(tmp_path / "hosts", *settings, "train.steps=1000000")
    while not list_checkpoints(run / CHECKPOINTS):
        assert hosts.poll() is None, ended(tmp_path / "hosts", hosts)
        time.sleep(0.02)
    (tmp_path / "hosts" / "cut").touch()
    for code, said in ended(tmp_path / "hosts", hosts):  # they end by themselves
        assert code not in (0, 137)
        assert "another process of this run" in said or "Timed out waiting" in said or "Connection" in said, said
    last = int(list_checkpoints(run / CHECKPOINTS)[-1].name.removeprefix("step-"))
    go_on(run, f"train.steps={last + 2}")
    straight = train(tmp_path / "straight", "log.every=1", "checkpoint.every=0", f"train.steps={last + 2}")
    before, after = ({line["step"]: line["loss"] for line in metrics(folder)} for folder in (straight, run))
    for step in (last + 1, last + 2):
        assert after[step] == pytest.approx(before[step], rel=1e-4)


def test_a_slow_host_costs_time_alone(tmp_path: Path) -> None:
    """Rank 1 takes a second for each batch; the run waits for it and is the run of one process."""
    run = tmp_path / "run"
    settings = ["log.every=1", "train.steps=3"]
    for code, said in ended(tmp_path, started(tmp_path, *settings, f"output_dir={run}", SLOW="1")):
        assert code == 0, said
    for line, other in zip(metrics(train(tmp_path / "alone", *settings)), metrics(run), strict=True):
        assert other == pytest.approx(line, rel=1e-5)


FULL = """
mkdir -p "$0" && mount -t tmpfs -o size=24k tmpfs "$0" && exec "$@"
"""


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "s", 4, 16)


def test_a_full_disk_on_one_host_ends_both_with_its_name(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's cache of shards lies on a disk that holds none of them."""
    if not allowed("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"):
        pytest.skip("mounts are not permitted here (unshare -rm, mount -t tmpfs)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1", **ON_CPU}
    with serving(shards) as server:
        settings = ["data=latents", "data.vae=sd", "data.num_classes=3", f"data.path={server.url}/s-{{0..3}}.tar"]
        settings += [*TINY, "train.steps=4", "validation.samples=4", f"output_dir={tmp_path / 'run'}"]
        caches = [tmp_path / "roomy", tmp_path / "full"]
        commands = [[*RANK, *settings, f"data.cache={cache}"] for cache in caches]
        commands[1] = ["unshare", "-rm", "bash", "-c", FULL, str(caches[1]), *commands[1]]
        homes = [{"XDG_CACHE_HOME": str(tmp_path / f"home-{rank}")} for rank in "01"]
        ranks = [
            subprocess.Popen(
                command,
                env=environment(**common, **home, RANK=rank, LOCAL_RANK="0"),
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command, home in zip("01", commands, homes, strict=True)
        ]
        said = [rank.communicate()[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert f"tread train: cannot write {caches[1]}" in said[1]
    assert "No space left on device" in said[1]
