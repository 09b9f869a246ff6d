"""The documentation pages that are made from the code, and the command that writes them: `make docs`.

A page is listed in `PAGES` with the function that returns its current text. `tests/test_docs.py` compares each page
with that text and writes nothing.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tread.report import families, finetune
from tread.report.pages import markdown_table, with_tables
from tread.report.settings import settings_page
from tread.report.tree import file_tree
from tread.routing.plan import PRESETS


def preset_table() -> str:
    """The presets of `tread_config`, as Markdown."""
    rows = [
        (f"`{name}`", str(route.selection_ratio), f"{route.start_layer_idx} .. {route.end_layer_idx}")
        for name, route in PRESETS.items()
    ]
    return markdown_table(("preset", "selection_ratio", "layers"), rows)


PAGES: dict[str, Callable[[Path], str]] = {
    "architecture.md": lambda page: with_tables(page.read_text(), {"tree": file_tree(page.parents[1])}),
    "families.md": lambda page: families.updated(page.read_text()),
    "finetune.md": lambda page: finetune.updated(page.read_text()),
    "routes.md": lambda page: with_tables(page.read_text(), {"presets": preset_table()}),
    "settings.md": lambda _: settings_page(),
}
"""For each page in `docs`, its current text from the page as it is."""


def main(folder: Path) -> None:
    """Write every page in `folder` whose text is out of date, and name it."""
    for name, current in PAGES.items():
        text = current(folder / name)
        if text != (folder / name).read_text():
            (folder / name).write_text(text)
            print(f"written: {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
