"""Mappings to dataclasses: every type that is understood, and the sentence for every mistake."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tread.config.schema import arguments, at_least, parse
from tread.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int


@dataclass(frozen=True, kw_only=True)
class Everything:
    on: bool
    count: int
    rate: float
    name: str
    place: Path
    choice: Literal["a", "b", 3]
    maybe: int | None
    either: dict[str, Any] | str | None
    pair: tuple[float, ...]
    optional_pair: tuple[float, ...] | None
    inner: Inner
    free: dict[str, Any]
    left_out: int = 7


GOOD: dict[str, Any] = {
    "on": True,
    "count": 3,
    "rate": 2,
    "name": "x",
    "place": Path("p"),
    "choice": "b",
    "maybe": None,
    "either": "text",
    "pair": [1, 0.5],
    "optional_pair": None,
    "inner": {"width": 4},
    "free": {"anything": [1]},
}


def test_every_type_is_read() -> None:
    found = parse(Everything, GOOD)
    assert found == Everything(**GOOD | {"rate": 2.0, "pair": (1.0, 0.5), "inner": Inner(width=4)})
    assert type(found.rate) is float
    assert [type(item) for item in found.pair] == [float, float]
    assert found.left_out == 7
    assert parse(Everything, GOOD | {"maybe": 5, "either": {"k": 1}, "optional_pair": (0.1,)}).either == {"k": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on": 1}, "on is 1; it must be true or false."),
        ({"on": "true"}, "on is 'true'; it must be true or false."),
        ({"count": 2.0}, "count is 2.0; it must be a whole number."),
        ({"count": True}, "count is True; it must be a whole number."),
        ({"rate": "fast"}, "rate is 'fast'; it must be a number."),
        ({"rate": True}, "rate is True; it must be a number."),
        ({"rate": float("nan")}, "rate is nan; it must be a number."),
        ({"rate": None}, "rate is None; it must be a number."),
        ({"name": 3}, "name is 3; it must be text."),
        ({"place": 3}, "place is 3; it must be a path."),
        ({"choice": "c"}, "choice is 'c'; it must be one of 'a', 'b', 3."),
        ({"choice": True}, "choice is True; it must be one of 'a', 'b', 3."),
        ({"maybe": "x"}, "maybe is 'x'; it must be a whole number or null."),
        ({"either": 3}, "either is 3; it must be a mapping of settings or text or null."),
        ({"pair": 3}, "pair is 3; it must be a list (a number each)."),
        ({"pair": [1, "x"]}, "pair[1] is 'x'; it must be a number."),
        ({"optional_pair": "x"}, "optional_pair is 'x'; it must be a list (a number each) or null."),
        ({"inner": {"width": "x"}}, "inner.width is 'x'; it must be a whole number."),
        ({"inner": 3}, "inner is 3; it must be a mapping of settings."),
        ({"free": [1]}, "free is [1]; it must be a mapping of settings."),
        ({"inner": {}}, "inner.width is missing; it must be a whole number."),
        ({"inner": {"width": 1, "widht": 2}}, "inner: unknown key 'widht'. Did you mean 'width'? Known keys: width."),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(Everything, GOOD | change)
    assert str(error.value) == message


def test_missing_and_unknown_at_the_top() -> None:
    with pytest.raises(ConfigError, match=r"^width is missing; it must be a whole number\.$"):
        parse(Inner, {})
    with pytest.raises(ConfigError, match=r"^config: unknown key 'zzz'\. Known keys: width\.$"):
        parse(Inner, {"width": 1, "zzz": 2})
    with pytest.raises(ConfigError, match=r"^the config is \[\]; it must be a mapping of settings\.$"):
        parse(Inner, [])


def test_a_signature_serves_as_well() -> None:
    class Reader:
        def __init__(self, path: str | Path, *, size: int, flip: bool = False) -> None: ...

    assert arguments(Reader, {"path": "p", "size": 3}, "data") == {"path": "p", "size": 3}
    with pytest.raises(ConfigError, match=r"^data\.flip is 'no'; it must be true or false\.$"):
        arguments(Reader, {"path": "p", "size": 3, "flip": "no"}, "data")
    with pytest.raises(ConfigError, match=r"^data\.path is 3; it must be text or a path\.$"):
        arguments(Reader, {"path": 3, "size": 3}, "data")
    with pytest.raises(ConfigError, match=r"^data\.size is missing; it must be a whole number\.$"):
        arguments(Reader, {"path": "p"}, "data")
    with pytest.raises(ConfigError, match=r"^data: unknown key 'siz'\. Did you mean 'size'\?"):
        arguments(Reader, {"path": "p", "siz": 3}, "data")


def test_lower_bounds() -> None:
    at_least(Inner(width=1), "model", width=1)
    with pytest.raises(ConfigError, match=r"^model\.width is 0; it must be at least 1\.$"):
        at_least(Inner(width=0), "model", width=1)
