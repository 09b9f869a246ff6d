"""The file tree of docs/tree.md, one line per module, made from the modules' docstrings.

- A line is the first sentence of a module's docstring; the line of a folder is that of its `__init__.py`.
- Folders that hold one file for each member of a list (`families`, and the experiments in `benchmarks`) are one line.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

COLUMN = 27
"""Column at which the sentences begin."""
LISTS = ("families",)
"""Folders of the package that hold a list: one line."""
FOLDERS = {
    "configs": "Every setting of `tread train` with its default: config.yaml, and the groups model, data and objective",
    "docs": "These pages; README.md there sorts them",
    "recipes": "Configs of the paper's set-ups, DiT and SiT from S to XL; finetune/ has one for every family",
    "tests": "Mirrors src/tread; attach/ has the contract that every family keeps, gpu/ what needs a GPU",
}
"""Folders without modules of their own to describe."""


def file_tree(root: Path) -> str:
    """The tree of a clone, as a block of Markdown."""
    lines = [_line(name, first_sentence(root / name), 0) for name in ("train.py", "fid.py")]
    lines += [_line("src/tread/", "", 0), *_folder(root / "src" / "tread", 1, LISTS)]
    for name in ("examples", "benchmarks", "pages"):
        inner = [path.name for path in (root / name).iterdir() if path.is_dir()]
        lines += [_line(f"{name}/", "", 0), *_folder(root / name, 1, inner)]
    lines += [_line(f"{name}/", words, 0) for name, words in FOLDERS.items()]
    return "\n".join(["```", *lines, "```"])


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop.

    >>> import tread
    >>> first_sentence(Path(tread.__file__))
    'Token routing that makes diffusion-transformer training faster (TREAD, arXiv 2501.04765)'
    """
    words = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    found = re.match(r".+?\.(?=\s+[A-Z`]|$)", words)
    return (found[0] if found else words).removesuffix(".")


def _folder(folder: Path, depth: int, lists: tuple[str, ...] | list[str]) -> Iterator[str]:
    """Modules and folders by name, folders first."""
    inside = [path for path in folder.iterdir() if not path.name.startswith(("__", "."))]
    for path in sorted(inside, key=lambda path: (path.is_file(), path.name)):
        if (path / "__init__.py").is_file():
            yield _line(f"{path.name}/", first_sentence(path / "__init__.py"), depth)
            if path.name not in lists:
                yield from _folder(path, depth + 1, lists)
        elif path.suffix == ".py":
            yield _line(path.name, first_sentence(path), depth)


def _line(name: str, words: str, depth: int) -> str:
    return f"{'  ' * depth + name:<{COLUMN}} {words}".rstrip()
