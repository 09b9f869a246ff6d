"""pyproject.toml declares what the package imports, and nothing else; the versions it promises are the ones tested."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.programs import ROOT
from tread.attach.registry import DIFFUSERS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()
BY_TORCH = {"triton"}
"""Come with torch where they can run; the kernels have plain twins for everywhere else."""
BY_ACCELERATE = {"tensorboard"}
"""A tracker: tread looks whether it is there, accelerate imports it."""
BY_EXAMPLES = {"matplotlib"}
"""Draws the figures of the demo and the benchmarks."""


def imported() -> dict[str, str]:
    """Every distribution that a module of tread imports, anywhere in its code, with one such module."""
    found = {}
    for path in sorted((ROOT / "src" / "tread").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for module in modules(node):
                package = module.partition(".")[0]
                if package not in sys.stdlib_module_names | {"tread"}:
                    for name in DISTRIBUTIONS.get(package, [package]):
                        found.setdefault(normal(name), path.relative_to(ROOT).as_posix())
    return found


def modules(node: ast.AST) -> list[str]:
    """The modules that a node imports, by a statement or by `import_module("name")`."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
            return [module]
    return []


def declared(*, extras: bool) -> set[str]:
    """The distributions of `dependencies`, and of every extra but `dev`."""
    lines = list(PROJECT["dependencies"])
    if extras:
        lines += [line for name, group in PROJECT["optional-dependencies"].items() if name != "dev" for line in group]
    return {name_of(line) for line in lines}


def name_of(line: str) -> str:
    found = re.match(r"[\w.-]+", line)
    assert found
    return normal(found[0])


def normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared() -> None:
    missing = {name: path for name, path in imported().items() if name not in declared(extras=True) | BY_TORCH}
    assert not missing


def test_what_is_declared_is_imported() -> None:
    assert not declared(extras=True) - imported().keys() - BY_ACCELERATE - BY_EXAMPLES


def test_what_modules_import_at_once_needs_no_extra() -> None:
    """Where tread is installed without extras, `import tread.data.index` and the like must work."""
    found = {}
    for path in (ROOT / "src" / "tread").rglob("*.py"):
        if {"finetune", "families", "report"} & set(path.relative_to(ROOT / "src" / "tread").parts):
            continue  # these need the extra `diffusers`
        for node in ast.parse(path.read_text()).body:
            for module in modules(node):
                package = module.partition(".")[0]
                if package not in sys.stdlib_module_names | {"tread"} | BY_TORCH:
                    for name in DISTRIBUTIONS.get(package, [package]):
                        found[normal(name)] = path.relative_to(ROOT).as_posix()
    assert not {name: path for name, path in found.items() if name not in declared(extras=False)}


def promised() -> dict[str, Requirement]:
    """Every direct dependency with the versions that pyproject.toml promises."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(line) for group in groups for line in group]
    return {normal(one.name): one for one in found if normal(one.name) not in BY_TORCH}


def pins(file: str) -> dict[str, Version]:
    """The exact version of each distribution in a constraints file."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line[:1] not in ("#", "")]
    return {normal(name): Version(version) for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_every_dependency_has_a_version_it_is_tested_with(file: str) -> None:
    pinned = pins(file)
    assert pinned.keys() == promised().keys()
    assert not {name: str(one) for name, one in promised().items() if not one.specifier.contains(pinned[name])}


def test_the_oldest_versions_are_the_oldest_promised() -> None:
    """A version equals its shorter form: 2.11.0 is 2.11."""
    oldest = pins("constraints-oldest.txt")
    floors = {
        name: [Version(part.version) for part in one.specifier if part.operator in (">=", "==")]
        for name, one in promised().items()
    }
    assert {name: [version] for name, version in oldest.items()} == floors


def test_a_refusal_names_the_releases_of_diffusers_that_are_promised() -> None:
    assert Requirement(f"diffusers{DIFFUSERS}").specifier == promised()["diffusers"].specifier
