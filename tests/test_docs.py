"""The documentation: generated pages are current, links lead somewhere, files and modules that are named exist."""

import pkgutil
import re
from pathlib import Path

import pytest

from pages.docs import PAGES
from tests.programs import ROOT

DOCS = ROOT / "docs"
TEXTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
SOURCES = ("src", "tests", "benchmarks", "pages", "examples", "recipes", "configs")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    """`make docs` writes them."""
    assert (DOCS / name).read_text() == PAGES[name](DOCS / name), "out of date: run `make docs`"


def test_a_page_that_is_out_of_date_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "routes.md"
    page.write_text((DOCS / "routes.md").read_text().replace("| `paper` | 0.5 |", "| `paper` | 0.6 |"))
    assert PAGES["routes.md"](page) == (DOCS / "routes.md").read_text() != page.read_text()


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_the_tutorial_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "tutorial.md").read_text()
    (code,), (output,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text"))
    exec(compile(code, "tutorial.md", "exec"), {"__name__": "tutorial"})
    assert capsys.readouterr().out == output


def test_the_index_has_every_page() -> None:
    linked = re.findall(r"\]\(([\w-]+\.md)", (DOCS / "README.md").read_text())
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= set(linked)


def test_pages_that_code_and_messages_name_exist() -> None:
    files = [ROOT / "Makefile", *(path for folder in SOURCES for path in (ROOT / folder).rglob("*"))]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".yaml", "") and path.is_file()]
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|png)", text)}
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_pages_name_exist(page: Path) -> None:
    if page.name in ("log.md", "CHANGELOG.md"):  # records keep the names of their day
        return
    words = re.findall(r"`([^`\n]+)`", CODE.sub("", page.read_text()))
    files = {word for word in words if re.fullmatch(r"(?:[\w-]+/)+[\w-]+\.py", word) and "NAME" not in word}
    missing = [f for f in sorted(files) if not any((ROOT / base / f).is_file() for base in ("", "src/tread", "src"))]
    assert not missing
    modules = {word for word in words if re.fullmatch(r"tread(?:\.\w+)+", word)}
    for name in sorted(modules):
        pkgutil.resolve_name(name)
