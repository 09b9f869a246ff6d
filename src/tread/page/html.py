"""HTML that is safe by construction: text is escaped unless a function here made it.

Run names, prompts, settings and paths come from files that others may have written. `tag` escapes every child and
attribute that is not `Html`, so that no section can forget it.
"""

import html
import json
import re
from collections.abc import Iterable
from typing import Any

VOID = {"img", "input", "wbr", "path", "line", "rect", "circle", "polygon"}
"""Elements without children: those of HTML without an end tag, and the shapes of SVG that are used here."""


class Html(str):
    """Text that is HTML already."""


def escaped(value: object) -> Html:
    """A value as HTML; `Html` is returned unchanged."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[object]) -> Html:
    """Concatenate parts, escaping each that is not `Html`."""
    return Html("".join(escaped(part) for part in parts))


def tag(name: str, *children: object, **attributes: Any) -> Html:
    """An element; `class_` is `class`, `data_run` is `data-run`, None and False are left out.

    >>> tag("td", "a < b", class_="x", data_run=0)
    '<td class="x" data-run="0">a &lt; b</td>'
    """
    given = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        given.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    start = f"<{name}{''.join(given)}"
    return Html(f"{start}/>") if name in VOID else Html(f"{start}>{joined(children)}</{name}>")


def breakable(name: str) -> Html:
    """The name of a setting, which narrow screens break after a dot or an underscore.

    >>> breakable("a<b.c_d")
    'a&lt;b.<wbr/>c_<wbr/>d'
    """
    first, *rest = re.split(r"(?<=[._])(?=.)", name)
    return joined([first, *(part for word in rest for part in (tag("wbr"), word))])


def data_block(value: Any) -> Html:
    """A value as JSON for the page's script; no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return tag("script", Html(text), type="application/json")
