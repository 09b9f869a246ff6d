"""The sections of the page: figures, tables and galleries with their text, for one run or several side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tread.page.curves import Clock, better, curves, is_routed, slug
from tread.page.document import Section
from tread.page.figure import Bar, Bars, Figure
from tread.page.html import Html, joined, tag
from tread.page.kept import Kept, kept_tokens, layer_shares
from tread.page.pictures import Picture, frames
from tread.page.read import Run
from tread.page.settings import settings_table
from tread.page.speed import lowest_share, memory_bars, speed_bars, speedups
from tread.page.svg import draw, layers, style
from tread.words import counted

HEAT = "How often each token of the grid was kept."
SIDEWAYS = tag("noscript", tag("p", "Scroll sideways through the steps."))
MASKS_ALONE = (
    "The first samples of the batch at some steps, computed again from seed and step: dropped tokens are amber."
)
MASKS = (
    f"{MASKS_ALONE} The pictures below the masks are the run's newest samples; a run does not store the images it "
    "trained on."
)


def figures(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Every figure of a report, by section."""
    if runs[0].kind == "evaluation":
        return _named({"Figures": list(_evaluation_bars(runs))})
    by_section: dict[str, list[Figure]] = {name: list(some) for name, some in curves(runs).items()}
    bars = (speed_bars(speedups(runs), runs), memory_bars(runs))
    by_section["Speed and memory"] += [some for some in bars if some is not None]
    return _named({name: some for name, some in by_section.items() if some})


def _named(found: dict[str, list[Figure]]) -> dict[str, list[Figure]]:
    """Figures with unique keys: different metrics may have the same slug."""
    taken: list[str] = []
    for some in found.values():
        for index, figure in enumerate(some):
            key = figure.key if figure.key not in taken else f"{figure.key}-{len(taken)}"
            some[index] = replace(figure, key=key)
            taken.append(key)
    return found


def sections(runs: Sequence[Run]) -> list[Section]:
    """Everything below the title, in order; empty sections are left out."""
    drawn = {name: _charts(some) for name, some in figures(runs).items()}
    contents: dict[str, Html | None]
    if runs[0].kind == "evaluation":
        contents = {"Overview": _figures_table(runs), **drawn}
    else:
        contents = {
            "Overview": overview(runs),
            "Loss": drawn.get("Loss"),
            "Pictures over time": _pictures(runs),
            "Evaluation": drawn.get("Evaluation"),
            "Speed and memory": _speed(runs, drawn.get("Speed and memory")),
            "Tokens kept": _tokens(runs),
            "Optimisation": drawn.get("Optimisation"),
            "Settings": settings_table(runs),
        }
    contents["Commands and versions"] = _starts(runs)
    return [(name, content) for name, content in contents.items() if content]


def _charts(some: Sequence[Figure]) -> Html:
    """Figures in columns; bar charts, which are low, are stacked beside the curves."""
    low = [figure for figure in some if isinstance(figure, Bars)]
    if len(low) == len(some):
        return tag("div", *map(draw, some), class_="charts")
    high = [draw(figure) for figure in some if not isinstance(figure, Bars)]
    return tag("div", *high, tag("div", *map(draw, low), class_="low") if low else "", class_="charts")


def overview(runs: Sequence[Run]) -> Html:
    """The key figures, a column per run."""
    rows: dict[str, Callable[[Run], str]] = {
        "what": lambda run: str(run.record.get("summary", "")),
        "steps": lambda run: f"{run.last_step:,} of {run.steps:,}" if run.steps else f"{run.last_step:,}",
        "validation loss, dense": _validation,
        "training loss": _training,
        "training time": _time,
        "samples per second": lambda run: _number([speed for _, speed in run.values("images_per_second")]),
        "tokens kept": lambda run: f"{lowest_share(run):.0%} in routed layers" if is_routed(run) else "all: dense",
        "peak memory": lambda run: f"{max((gib for _, gib in run.values('memory_gib')), default=0):.2f} GiB",
        "device": lambda run: _device(run),
    }
    return _by_run(runs, {name: [cell(run) for run in runs] for name, cell in rows.items()})


def _by_run(runs: Sequence[Run], rows: dict[str, list[str]], *, mark: bool = False) -> Html:
    """A table with a column per run, without empty rows; `mark` highlights cells that differ from the first run's."""

    def shown(cell: str, first: str) -> Html:
        return tag("td", tag("mark", cell or "none") if mark and cell != first else cell)

    head = tag("tr", tag("td"), *(tag("th", _chip(run, index), scope="col") for index, run in enumerate(runs)))
    body = [
        tag("tr", tag("th", name, scope="row"), *(shown(cell, cells[0]) for cell in cells))
        for name, cells in rows.items()
        if any(cell and cell != "0.00 GiB" for cell in cells)
    ]
    head = head if len(runs) > 1 else ""
    return tag("div", tag("table", head, *body, class_="facts"), class_="wide")


def _chip(run: Run, index: int) -> Html:
    return tag("span", tag("i", class_=f"swatch {style(index)}"), run.name, class_="chip")


def _validation(run: Run) -> str:
    losses = run.values("val_loss")
    if not losses:
        return ""
    step, best = min(losses, key=lambda point: point[1])
    last = f"{losses[-1][1]:.4f}"
    return last if best == losses[-1][1] else f"{last}; lowest {best:.4f} at step {step:,}"


def _training(run: Run) -> str:
    losses = [loss for _, loss in run.values("loss")]
    recent = losses[-max(1, min(100, len(losses) // 10)) :]
    return f"{sum(recent) / len(recent):.4f}, mean of the last {counted(len(recent), 'step')}" if recent else ""


def _time(run: Run) -> str:
    clock = Clock(run)
    seconds = clock.seconds[-1]
    if not seconds:
        return ""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _device(run: Run) -> str:
    if not run.starts:
        return ""
    several = f"{run.processes} x " if run.processes > 1 else ""
    return f"{several}{run.starts[-1].get('device', '')}"


def _number(values: list[float]) -> str:
    return f"{median(values):.4g}, median" if values else ""


def _speed(runs: Sequence[Run], drawn: Html | None) -> Html | None:
    """The charts, with notes on what each speed-up compares."""
    said = [
        tag("li", f"{runs[one.run].name}: {one.means}." if len(runs) > 1 else f"Measured: {one.means}.")
        for one in speedups(runs)
    ]
    return joined([drawn or "", tag("ul", *said, class_="notes") if said else ""]) if drawn or said else None


def _pictures(runs: Sequence[Run]) -> Html | None:
    """Samples of each step, runs side by side; a script turns the steps into one picture with a slider."""
    columns = []
    for index, run in enumerate(runs):
        by_step, every = frames(run)
        if not by_step:
            continue
        shown = [_frame(step, pictures) for step, pictures in by_step.items()]
        few = f"{len(by_step)} of {every} steps are shown. " if len(by_step) < every else ""
        head = tag("h3", _chip(run, index)) if len(runs) > 1 else ""
        columns.append(
            tag("div", head, tag("p", few) if few else "", tag("div", *shown, class_="frames"), data_run=index)
        )
    if not columns:
        return None
    subject = (
        "Dense samples of the averaged weights"
        if runs[0].kind == "pretraining"
        else "The validation prompts, drawn dense"
    )
    lead = tag("p", f"{subject}, with the same noise at every step.")
    return joined([lead, SIDEWAYS, tag("div", *columns, class_="gallery beside", data_gallery="step")])


def _frame(step: int, pictures: Sequence[Picture]) -> Html:
    shown = [
        tag("figure", _image(picture, f"step {step}"), tag("figcaption", picture.caption) if picture.caption else "")
        for picture in pictures
    ]
    when = tag("p", f"step {step:,}", class_="when")
    return tag("div", when, tag("div", *shown, class_="pictures"), class_="frame", data_step=step)


def _image(picture: Picture, words: str) -> Html:
    return tag("img", src=picture.uri, width=picture.width, height=picture.height, alt=picture.caption or words)


def _tokens(runs: Sequence[Run]) -> Html | None:
    parts: list[object] = []
    for index, run in enumerate(runs):
        routes, why = kept_tokens(run)
        head = tag("h3", _chip(run, index)) if len(runs) > 1 else ""
        if not routes and len(runs) == 1 and not is_routed(run):
            return None
        shares = layer_shares(run)
        if shares:
            words = "The share of tokens that each layer sees at the full ratio."
            parts.append(tag("figure", head, layers(shares), tag("figcaption", words), class_="stack", data_run=index))
            head = ""
        body = [_route(route, number, has_pictures=bool(frames(run)[1])) for number, route in enumerate(routes)]
        parts.append(tag("div", head, tag("p", why) if why else "", *body, data_run=index))
    return joined(parts)


def _route(route: Kept, number: int, *, has_pictures: bool) -> Html:
    masks = [
        tag(
            "div",
            tag("p", picture.caption, class_="when"),
            _image(picture, picture.caption),
            class_="frame",
            data_step=step,
        )
        for step, picture in route.masks.items()
    ]
    scale = tag("div", tag("span", "0%"), tag("i"), tag("span", "100%"), class_="ramp")
    heat = tag("figure", _image(route.heat, HEAT), scale, tag("figcaption", HEAT), class_="heat")
    gallery = tag(
        "div", tag("div", *masks, class_="frames"), class_="gallery", data_gallery="step", data_first=route.first
    )
    lead = "" if number else tag("p", MASKS if has_pictures else MASKS_ALONE)
    notes = tag("ul", *(tag("li", note) for note in route.notes), class_="notes")
    head = tag("h4", f"route {number + 1}: {route.title}")
    return tag("div", head, lead, SIDEWAYS, tag("div", gallery, heat, class_="kept"), notes, class_="route")


def _evaluation_bars(runs: Sequence[Run]) -> list[Bars]:
    names = {name: None for run in runs for name in run.figures if not name.endswith(" std")}
    return [
        Bars(
            key=slug(name),
            title=name,
            bars=[
                Bar(name=run.name, run=index, value=run.figures[name], label=f"{run.figures[name]:.4g}")
                for index, run in enumerate(runs)
                if name in run.figures
            ],
            note=better(name),
        )
        for name in names
    ]


def _figures_table(runs: Sequence[Run]) -> Html:
    names = {name: None for run in runs for name in run.figures}
    rows = {name: [f"{run.figures[name]:.5g}" if name in run.figures else "" for run in runs] for name in names}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        rows[name] = [_count(run.settings.get(name)) for run in runs]
    return _by_run(runs, rows)


def _count(value: Any) -> str:
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def moment(start: Mapping[str, Any]) -> str:
    """The date and time of a start, formatted for the page."""
    return str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC")


def _starts(runs: Sequence[Run]) -> Html | None:
    """The command of each start, and versions a column per run."""
    parts: list[object] = []
    for index, run in enumerate(runs):
        for start in run.starts:
            at = f", from step {start['step']:,}" if isinstance(start.get("step"), int) and start["step"] else ""
            head = joined([_chip(run, index) if len(runs) > 1 else "", f" {moment(start)}{at}"])
            parts.append(tag("p", head, class_="start"))
            parts.append(tag("pre", tag("code", start.get("command", ""))))
    last = [run.starts[-1].get("versions") if run.starts else None for run in runs]
    versions: list[dict[str, Any]] = [packages if isinstance(packages, dict) else {} for packages in last]
    names = {name: None for packages in versions for name in packages}
    rows = {name: [str(packages.get(name) or "") for packages in versions] for name in names}
    parts.append(_by_run(runs, rows, mark=True) if rows else "")
    return joined(parts) if any(parts) else None
