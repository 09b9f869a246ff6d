"""Findings about a machine: with things missing and broken, and the versions beside those tested."""

import tomllib
from pathlib import Path

import pytest

from tests.programs import ROOT, finished
from tread.report import machine, versions
from tread.report.machine import CHECKS, PACKAGES, examine, package


def test_every_check_has_its_line() -> None:
    found = list(examine())
    assert [finding.name for finding in found] == [*CHECKS, *PACKAGES]
    lines = {finding.name: str(finding) for finding in found}
    assert not [line for line in lines.values() if "cannot be used" in line or "\n" in line]
    assert lines["CUDA graphs"] == "no; needs one CUDA GPU"
    assert lines["float8"].startswith("no; needs compute capability 8.9")
    assert lines["bitsandbytes"].endswith("; an nf4 product ran")
    assert "GiB free in " in lines["disk"]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("tread.kernels.triton_support.which", lambda name: None)
    finding = CHECKS["C compiler"]()
    assert str(finding).startswith("none; layers cannot be compiled, training falls back to eager")
    assert not finding.works


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "no-such-package", ("no_such_package", "nothing needs it"))
    assert str(package("no-such-package")) == "not installed; nothing needs it"


def test_a_broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, but its import raises, as that of a library built for another CUDA does."""
    (tmp_path / "torn.py").write_text("raise OSError('libcuda.so.9: no such file\\nand more')")
    (tmp_path / "torn-1.2.dist-info").mkdir()
    (tmp_path / "torn-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "torn", ("torn", "nothing needs it"))
    finding = package("torn")
    assert str(finding) == "1.2, broken; importing it fails (OSError: libcuda.so.9: no such file)"
    assert not finding.works


def test_a_check_that_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> machine.Finding:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(machine, "CHECKS", {"device": breaks})
    monkeypatch.setattr(machine, "PACKAGES", {})
    assert [str(finding) for finding in examine()] == ["cannot be used (RuntimeError: driver too old)"]


def test_without_torch() -> None:
    """The one package that everything needs."""
    program = "import sys; sys.modules['torch'] = None; from tread.cli import main; main(['doctor'])"
    done = finished("-c", program)
    assert done.returncode == 0, done.stderr
    lines = {line[:20].strip(): line[20:].strip() for line in done.stdout.splitlines()}
    assert lines["torch"].startswith("cannot be used (ModuleNotFoundError")
    assert lines["attention"].startswith("cannot be used")
    assert "broken" in lines["accelerate"]
    assert "GiB free" in lines["memory"]


def test_versions_beside_those_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PACKAGE", tmp_path)
    assert versions.beside_tested("torch", "2.13.0") == ""
    (tmp_path / "constraints.txt").write_text("# a comment\ntorch==2.13.0\nlycoris_lora==4.1.3\n")
    assert versions.beside_tested("torch", "2.13.0+cu130") == "tested with 2.13.0"
    assert versions.beside_tested("torch", "2.14.0.dev1") == "newer than 2.13.0, the newest tested"
    assert versions.beside_tested("Lycoris-LoRA", "4.1.3") == "tested with 4.1.3"
    assert versions.beside_tested("peft", "0.21.2") == ""
    (tmp_path / "constraints-oldest.txt").write_text("torch==2.11.0\n")
    assert versions.beside_tested("torch", "2.9.1") == "older than 2.11.0, the oldest tested"
    assert versions.beside_tested("torch", "2.12.0") == "tested with 2.11.0 to 2.13.0"


def test_the_wheel_carries_the_versions_tested() -> None:
    """Each constraints file is in the wheel, beside the code that reads it."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    for path in ROOT.glob("constraints*.txt"):
        assert included.get(path.name) == f"tread/{path.name}", f"add it to force-include in pyproject.toml: {path}"
    assert versions.tested(versions.NEWEST)["torch"]
