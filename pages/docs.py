"""Which pages are made from the code, and the command that writes them and `configs/`: `python -m pages.docs`.

A page is listed in `PAGES` with the function that returns its current text. `tests/test_docs.py` compares each page
with that text and writes nothing.
"""

from collections.abc import Callable
from pathlib import Path

from pages import families, finetune, scale
from pages.settings import settings_page
from pages.tables import markdown_table, with_tables
from pages.tree import file_tree
from tread.report.settings import config_files
from tread.routing.plan import PRESETS


def preset_table() -> str:
    """The presets of `tread_config`, as Markdown."""
    rows = [
        (f"`{name}`", str(route.selection_ratio), f"{route.start_layer_idx} .. {route.end_layer_idx}")
        for name, route in PRESETS.items()
    ]
    return markdown_table(("preset", "selection_ratio", "layers"), rows)


PAGES: dict[str, Callable[[Path], str]] = {
    "families.md": lambda page: families.updated(page.read_text()),
    **dict.fromkeys(finetune.TABLES, finetune.updated),
    "routes.md": lambda page: with_tables(page.read_text(), {"presets": preset_table()}),
    "scale.md": lambda page: scale.updated(page.read_text()),
    "settings.md": lambda _: settings_page(),
    "tree.md": lambda page: with_tables(page.read_text(), {"tree": file_tree(page.parents[1])}),
}
"""For each page in `docs`, its current text from the page as it is."""


def main(root: Path) -> None:
    """Write every page and config of a clone whose text is out of date, and name it."""
    texts = {root / "configs" / name: text for name, text in config_files().items()}
    texts |= {root / "docs" / name: current(root / "docs" / name) for name, current in PAGES.items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"written: {path}")


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1])
