"""Layers: what merges and what replaces, names with indices, and how two configs differ."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tread.config.layers import assigned, changes, check_names, flatten, merged, settings_of
from tread.config.schema import parse
from tread.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    size: int = 3
    """how large"""
    routes: dict[str, Any] | str | None = None
    """anything"""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """All settings."""

    path: str
    """where"""
    inner: Inner = field(default_factory=Inner)


KNOWN = settings_of(Outer)


def test_settings_have_dotted_names_and_texts() -> None:
    assert {name: (setting.doc, setting.default) for name, setting in KNOWN.items() if name != "path"} == {
        "inner.size": ("how large", 3),
        "inner.routes": ("anything", None),
    }
    assert KNOWN["path"].doc == "where"


def test_mappings_merge_and_routes_replace() -> None:
    lower = {"a": {"b": 1, "c": 2}, "r": {"routes": [1], "seed": 3}, "x": 1}
    upper = {"a": {"b": 5}, "r": {"preset": "paper"}, "x": {"y": 2}}
    assert merged(lower, upper) == {"a": {"b": 5, "c": 2}, "r": {"preset": "paper"}, "x": {"y": 2}}
    assert merged(lower, {"r": {"seed": 4}})["r"] == {"routes": [1], "seed": 4}
    assert lower["a"] == {"b": 1, "c": 2}


def test_assignments_are_read_by_type() -> None:
    config: dict[str, Any] = {"inner": {"routes": {"list": [{"a": 1}, {"a": 2}]}}}
    for text in ("path=1_000", "inner.size=1_000", "inner.routes.list.1.a=yes", "inner.routes.list[0].b={c: 1e-4}"):
        config = assigned(config, text, KNOWN, "tread")
    assert parse(Outer, config) == Outer(
        path="1_000", inner=Inner(size=1000, routes={"list": [{"a": 1, "b": {"c": 1e-4}}, {"a": True}]})
    )
    config = assigned(config, "inner={size: 5}", KNOWN, "tread")
    assert parse(Outer, config).inner.size == 5
    assert parse(Outer, config).inner.routes is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pat=x", "there is no setting pat. Did you mean 'path'? `tread x --help` lists them all."),
        ("inner.siz=x", "there is no setting inner.siz. Did you mean 'inner.size'? `tread x --help` lists them all."),
        ("path.x=1", "there is no setting path.x. Did you mean 'path'? `tread x --help` lists them all."),
        ("inner=3", "inner is 3; it is a section: set inner.SETTING=VALUE."),
        ("inner.routes.list.2=3", "inner.routes.list.2 cannot be set: inner.routes.list has 1 item, counted from 0"),
        ("path", "cannot read 'path': write name=value, e.g. train.steps=500, after at most one file."),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        assigned({"inner": {"routes": {"list": [1]}}}, text, KNOWN, "tread x")
    assert str(error.value).startswith(message)


def test_names_of_a_file_are_checked_by_their_dotted_names() -> None:
    check_names({"path": 1, "inner": {"routes": {"anything": {"goes": 1}}}}, KNOWN, "tread x")
    with pytest.raises(ConfigError, match=r"^f\.yaml: there is no setting inner\.siz\. Did you mean 'inner\.size'"):
        check_names({"inner": {"siz": 1}}, KNOWN, "tread x", "f.yaml")


def test_changes() -> None:
    old = {"a": {"b": 1, "gone": 2}, "same": [1, 2], "routes": [{"r": 1, "s": 2}]}
    new = {"a": {"b": 3, "added": {"c": None}}, "same": [1, 2], "new": "x", "routes": [{"r": 1, "s": 3}]}
    assert changes(old, new) == ["a.b: 1 -> 3", "a.gone: 2 -> None", "new: None -> x", "routes.0.s: 2 -> 3"]
    flat = {"a.b": 3, "a.added.c": None, "same": [1, 2], "new": "x", "routes.0.r": 1, "routes.0.s": 3}
    assert flatten(new) == flat
