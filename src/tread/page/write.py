"""Write the report of some runs as one file; a run writes its own when it ends."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from tread.errors import ConfigError, one_line, shortened
from tread.files import write_text
from tread.page.document import document
from tread.page.html import Html, tag
from tread.page.read import Run, read_runs
from tread.page.sections import sections
from tread.page.svg import style
from tread.training.metrics import FILE as METRICS_FILE

FILE = "report.html"


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of some runs to `out`; by default into the folder of a single run, else to ./report.html."""
    runs = read_runs(paths)
    if out is None:
        out = paths[0] / FILE if len(paths) == 1 and paths[0].is_dir() else Path(FILE)
    if out.is_dir():
        raise ConfigError(f"--out is {str(out)!r}, which is a folder; name a file, such as {out / FILE}.")
    command = shlex.join(["tread", "report", *map(str, paths), *(["--out", str(out)] if len(paths) > 1 else [])])
    content = page(runs, command)
    write_text(out, content, errors="backslashreplace")
    return out


def write_at_end(folder: Path, accelerator: Accelerator) -> None:
    """Write the report of a run that has ended, on rank 0; any error becomes a warning, since the run is complete."""
    if not accelerator.is_main_process:
        return
    try:
        if not _is_new(folder):
            accelerator.print(f"report: {write_report([folder])}")
    except Exception as error:  # a failed report must not fail the run
        reason = shortened(one_line(error), 300)
        accelerator.print(f"warning: the run is complete, but its report could not be written: {reason}")


def _is_new(folder: Path) -> bool:
    """Whether the report in a folder is newer than its metrics."""
    written, metrics = folder / FILE, folder / METRICS_FILE
    return written.exists() and (not metrics.exists() or written.stat().st_mtime_ns >= metrics.stat().st_mtime_ns)


def page(runs: Sequence[Run], command: str) -> str:
    """The HTML of a report."""
    names = ", ".join(run.name for run in runs)
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return document(
        sections(runs), kicker="tread report", title=names, heading=_heading(runs), legend=_legend(runs), notes=notes,
        command=command,
    )  # fmt: skip


def _heading(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    return f"{len(runs)} evaluations" if runs[0].kind == "evaluation" else f"{len(runs)} {runs[0].kind} runs"


def _legend(runs: Sequence[Run]) -> Html:
    """The runs with their colours; a script turns each into a toggle."""
    if len(runs) == 1:
        return Html("")
    chips = [
        tag("label", tag("i", class_=f"swatch {style(index)}"), run.name, class_="chip", data_switch=index)
        for index, run in enumerate(runs)
    ]
    return tag("div", *chips, class_="legend")
