"""The rooms of the package: which imports which, how large they are, what each says of itself, and what is loaded when.

Imports between rooms are read from the source, those inside functions too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT, run

PACKAGE = ROOT / "src" / "tread"
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "words": set(),
    "around": set(),
    "eval_mode": set(),
    "terminal": {"errors"},
    "files": {"errors"},
    "together": {"errors"},
    "config": {"errors", "words", "files"},
    "routing": {"errors", "config"},
    "kernels": {"errors", "words", "around", "routing"},
    "attach": {"errors", "around", "routing", "kernels"},
    "__init__": {"errors", "routing", "attach"},
    "models": {"errors", "routing", "kernels"},
    "objectives": {"errors"},
    "sampling": {"errors", "eval_mode", "routing", "attach", "objectives"},
    "data": {"errors", "words", "files", "config", "routing"},
    "evaluate": {"errors", "words", "files", "together", "routing", "data"},
    "training": {"errors", "eval_mode", "files", "together", "config", "routing", "kernels"},
    "page": {"__init__", "errors", "words", "files", "config", "routing", "sampling", "training"},
    "pretrain": {
        *("errors", "words", "files", "together", "config", "routing", "kernels", "models"),
        *("objectives", "sampling", "data", "evaluate", "training", "page"),
    },
    "finetune": {
        *("__init__", "errors", "words", "files", "together", "config", "routing", "kernels", "attach"),
        *("objectives", "sampling", "data", "training", "page"),
    },
    "report": {
        *("__init__", "errors", "words", "files", "together", "config", "routing", "kernels", "attach"),
        *("evaluate", "training", "page", "pretrain", "finetune"),
    },
    "autotune": {
        *("errors", "words", "eval_mode", "files", "config", "routing", "kernels", "models", "attach"),
        *("training", "page", "pretrain", "finetune", "report"),
    },
    "commands": {"terminal", "config", "routing", "data", "page", "pretrain", "finetune", "report", "autotune"},
    "cli": {"__init__", "errors", "terminal", "commands"},
    "__main__": {"cli"},
}
"""What each room may import, from the lowest to the highest; `__init__` is `import tread` itself."""
LISTS = {"families"}
"""Folders that hold one small file per family."""
MOST = 14
"""Modules in any other folder."""
HEAVY = [
    *("accelerate", "diffusers", "omegaconf", "transformers", "peft", "PIL"),
    *("matplotlib", "numpy", "safetensors", "sklearn", "tqdm", "yaml"),
]
FOLDERS = [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, in full, with their lines."""
    package = ["tread", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""] if node.level else [])
            name = base.strip(".") or node.module or ""
            if name == "tread":  # a room, or something that the package itself exports
                yield from ((f"tread.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield name, node.lineno


def room(module: str) -> str:
    """`tread.data.order` is in data; what is no room is a name of `tread/__init__.py`."""
    name = module.split(".")[1] if "." in module else "__init__"
    return name if name in ALLOWED else "__init__"


def test_each_room_imports_what_it_may() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert own in ALLOWED, f"{own} has no line in ALLOWED"
        for module, line in imported(path):
            if module.split(".")[0] == "tread" and room(module) not in ALLOWED[own] | {own}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_imports_point_down() -> None:
    """A room may import those above it in the table, so there are no circles."""
    rooms = list(ALLOWED)
    for number, (name, allowed) in enumerate(ALLOWED.items()):
        assert allowed <= set(rooms[:number]), name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tread.data.order as order", ["data"]),
        ("from tread.files import atomic_write", ["files"]),
        ("from tread import cli, attach, __version__", ["cli", "attach", "__init__"]),
        ("def late():\n    from ..report import plan", ["report"]),
        ("from . import loop", ["training"]),
        ("from .loop import fit", ["training"]),
    ],
)
def test_imports_are_found(source: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_imports.PACKAGE", tmp_path)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "job.py").write_text(source)
    assert [room(module) for module, _ in imported(tmp_path / "training" / "job.py")] == expected


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(PACKAGE.parent).as_posix())
def test_a_folder_is_small_and_says_what_belongs_there(folder: Path) -> None:
    if folder.name not in LISTS:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(re.findall(r"[.!?](?=\s|$)", said)) >= 2, f"what belongs there, and what it may import: {said!r}"


def loaded(program: str, names: list[str]) -> str:
    """Which of `names` a program has imported when it ends, and what it printed before."""
    told = f"import atexit, sys; atexit.register(lambda: print([name for name in {names} if name in sys.modules]))"
    return run("-c", f"{told}\n{program}").splitlines()[-1]


def test_import_needs_torch_alone() -> None:
    every = "import tread; [getattr(tread, name) for name in tread.__all__]"
    assert loaded(every, ["torch", *HEAVY]) == loaded("import torch", ["torch", *HEAVY])
    assert loaded("import tread", ["torch"]) == "[]"


def test_attach_is_the_function_whatever_was_imported_before() -> None:
    program = "import tread.attach.family, tread; from tread.attach import registry; print(tread.attach.__module__)"
    assert run("-c", program).strip() == "tread.attach.attach"


PLAN = ["plan", "paper", "--depth", "28", "--width", "1152", "--tokens", "256"]


@pytest.mark.parametrize(
    "question", [["--version"], ["--help"], PLAN, ["plan", "--help"], ["doctor", "--help"]], ids=" ".join
)
def test_a_question_needs_no_torch(question: list[str]) -> None:
    assert loaded(f"from tread.cli import main; main({question!r})", ["torch", "numpy", "diffusers"]) == "[]"
