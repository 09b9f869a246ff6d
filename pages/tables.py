"""Pages of the documentation with tables that are made from the code.

A table stands between two markers, `<!-- NAME: generated -->` and `<!-- end of NAME -->`; a test compares each page
with what the code says now.
"""

from collections.abc import Mapping


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables written anew."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no markers {begin} and {end}")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
