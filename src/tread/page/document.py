"""One self-contained HTML file in the style of the reports: template, style and script of `assets/` filled in.

Everything is inlined, so it works from disk and without a network; a Content-Security-Policy forbids loading more.
"""

from collections.abc import Sequence
from importlib.resources import files
from string import Template

from tread import __version__
from tread.errors import shortened
from tread.page.html import Html, escaped, joined, tag

Section = tuple[str, Html]
"""The title and content of a section."""
NOTHING = Html("")


def document(
    sections: Sequence[Section],
    *,
    kicker: str,
    title: str,
    heading: str,
    notes: Sequence[str],
    command: str,
    legend: Html = NOTHING,
    style: str = "",
) -> str:
    """The text of a page; `kicker` is the command that made it, `style` is added to the common style."""
    listed = tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else NOTHING
    return Template(asset("page.html")).substitute(
        kicker=escaped(kicker),
        title=escaped(shortened(title, 120)),
        style=asset("page.css") + style,
        script=asset("page.js"),
        heading=escaped(heading),
        legend=legend,
        notes=listed,
        contents=joined(tag("a", name, href=f"#{_anchor(name)}") for name, _ in sections),
        sections=joined(map(_section, sections)),
        command=escaped(command),
        version=escaped(__version__),
    )


def asset(name: str) -> str:
    """A file of `assets/`."""
    return files("tread.page").joinpath("assets", name).read_text(encoding="utf-8")


def _section(section: Section) -> Html:
    title, content = section
    return tag("section", tag("h2", title), content, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
