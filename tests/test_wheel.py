"""The wheel: built without a network, installed elsewhere, it trains by itself with the configs it carries."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
TRAIN = """
import sys, tread
from tread.cli import main
from tread.pretrain.config import config_folder
print(tread.__file__, config_folder())
main(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_an_installed_wheel_trains(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run([*PIP, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(wheels)], check=True)
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("tread_diffusion-")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tread/configs/")}
    assert inside == {f"tread/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}

    subprocess.run([*PIP, "install", str(wheel), "--no-deps", "--no-index", "--target", str(site)], check=True)
    tiny = ["model.depth=7", "model.width=16", "model.heads=2", "train.steps=2", "log.trackers=none", "sample.steps=2"]
    process = subprocess.run(
        [sys.executable, "-c", TRAIN, *tiny, "output_dir=run"],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    # the wheel's copy, not the clone that the environment has installed
    assert process.stdout.splitlines()[0] == f"{site}/tread/__init__.py {site}/tread/configs"
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "samples" / "step-00000002.png").is_file()
    assert (site / "bin" / "tread").is_file()
