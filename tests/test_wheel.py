"""The distributions, built without a network: the sdist is complete and can be tested, the wheel trains by itself."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PARTS = ("src", "tests", "docs", "benchmarks", "pages", "examples", "recipes", "configs")
FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "Makefile", "constraints.txt"),
    *("constraints-oldest.txt", "pyproject.toml", "train.py", "fid.py"),
)
TRAIN = """
import sys, tread
from tread.cli import main
print(tread.__file__)
main(["train", *sys.argv[1:]])
"""


def files_in(folder: Path) -> set[str]:
    """The files of the repository in one of its folders."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as an index's users build it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "-w", str(folder)], check=True)
    (path,) = folder.iterdir()
    return path


@pytest.mark.slow
def test_the_sdist_is_complete(sdist: Path) -> None:
    inside = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    missing = set(FILES).union(*(files_in(ROOT / part) for part in PARTS)) - inside
    assert not missing


@pytest.mark.contract
def test_the_sdist_runs_its_tests(sdist: Path) -> None:
    """Some of them; the rest needs no other files, as the test above says."""
    tests = ["tests/routing/test_noise.py", "tests/test_dependencies.py", "tests/test_docs.py"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "not families"],
        env={**os.environ, "PYTHONPATH": str(sdist / "src")},
        cwd=sdist,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.slow
def test_the_wheel_has_the_package_and_its_recipes(wheel: Path) -> None:
    assert wheel.name.startswith("tread_diffusion-")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tread/")}
    package = {name.removeprefix("src/") for name in files_in(ROOT / "src" / "tread")}
    beside = {f"tread/{name}" for part in ("recipes",) for name in files_in(ROOT / part)}
    assert inside == package | beside | {f"tread/{path.name}" for path in ROOT.glob("constraints*.txt")}
    assert {"tread/py.typed", "tread/recipes/dit-xl-2.yaml", "tread/recipes/finetune/flux-lora.yaml"} <= inside


@pytest.mark.slow
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
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
    assert process.stdout.splitlines()[0] == f"{site}/tread/__init__.py"
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "samples" / "step-00000002.png").is_file()
    assert (tmp_path / "run" / "report.html").is_file()  # its template is in the wheel
    assert (site / "bin" / "tread").is_file()
