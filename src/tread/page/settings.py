"""The settings of runs as tables: those that differ between runs first, the rest folded."""

from collections.abc import Sequence
from typing import Any

from tread.page.html import Html, breakable, joined, tag
from tread.page.read import Run
from tread.words import counted

UNTOLD = ("output_dir", "resume", "resume_from_checkpoint")
"""Settings that differ between any two runs and are not compared."""


def settings_table(runs: Sequence[Run]) -> Html | None:
    """The settings of one run; for several, the differing ones, highlighted, then the shared ones."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if not names:
        return None
    if len(runs) == 1:
        routes = [name for name in names if "tread_config" in name]
        rest = [name for name in names if name not in routes]
        first, word = (_table(runs, routes), "All other") if routes else ("", "All")
        return joined([first, _folded(f"{word} {counted(len(rest), 'setting')}", _table(runs, rest))])
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    differing = [name for name in names if name not in UNTOLD and len({_key(run, name) for run in runs}) > 1]
    shared = [name for name in names if name not in differing and name not in UNTOLD]
    shown = (
        joined(
            [
                tag("p", f"{counted(len(differing), 'setting')} {'differs' if len(differing) == 1 else 'differ'}."),
                _table(runs, differing, differing=True),
            ]
        )
        if differing
        else tag("p", "The runs have the same settings.")
    )
    return joined([shown, _folded(f"{counted(len(shared), 'setting')} that all runs share", _table(runs[:1], shared))])


def _key(run: Run, name: str) -> str:
    return repr(run.settings.get(name))


def _table(runs: Sequence[Run], names: Sequence[str], *, differing: bool = False) -> Html:
    head = tag("tr", tag("td"), *(tag("th", run.name, scope="col") for run in runs)) if len(runs) > 1 else ""
    rows = [
        tag("tr", tag("th", breakable(name), scope="row"), *_cells(runs, name, differing=differing)) for name in names
    ]
    return tag("div", tag("table", head, *rows, class_="settings"), class_="wide")


def _cells(runs: Sequence[Run], name: str, *, differing: bool) -> list[Html]:
    """The value of each run; with `differing`, values other than the first run's are highlighted."""
    first = _key(runs[0], name)
    cells = []
    for run in runs:
        text = _shown(run.settings.get(name))
        marked = differing and _key(run, name) != first
        cells.append(tag("td", tag("mark", text) if marked else text))
    return cells


def _folded(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
