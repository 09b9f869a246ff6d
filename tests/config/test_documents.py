"""Documents: scalars whose meaning waits for a field, keys given twice, and what is no JSON or YAML."""

from pathlib import Path

import pytest

from tread.config.documents import Plain, parse_env, parse_json, parse_toml, parse_yaml, read_document, settled
from tread.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("5", 5), ("-3", -3), ("+5", 5), ("1_000", 1000), ("0x10", 16), ("010", 10)],
        *[("1.5", 1.5), ("1e-4", 1e-4), ("1E3", 1e3), (".5", 0.5), ("1.", 1.0), (".inf", float("inf"))],
        *[("yes", True), ("False", False), ("off", False)],
    ],
)
def test_numbers_and_truth_values_keep_their_text(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}")
    assert isinstance(found, dict)
    assert isinstance(found["key"], Plain)
    assert found["key"] == text
    assert settled(found) == {"key": value}
    assert type(settled(found)["key"]) is type(value)


@pytest.mark.parametrize("text", ["2024-01-02", "1:30", "12b", "e5", "1.2.3", "'5'", '"yes"', "nullable", "a b"])
def test_everything_else_is_text(text: str) -> None:
    assert settled(parse_yaml(f"key: {text}")) == {"key": text.strip("\"'")}


def test_null_is_none() -> None:
    assert parse_yaml("{a: null, b: ~, c: , d: 'null'}") == {"a": None, "b": None, "c": None, "d": "null"}


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: [{a: 1, a: 1}]", "{a: {b: 1, b: 2}}"])
def test_a_key_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^the text is not valid YAML at line \d, column \d+: '[ab]' is given twice"):
        parse_yaml(text)
    with pytest.raises(ConfigError, match="gives 'b' twice in one mapping; keep one"):
        parse_json('{"a": [{"b": 1, "b": 2}]}')


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", '{"a": 1}'), ("a.yaml", "a: 1"), ("a.toml", "a = 1"), (".env", "a=1")]
)
def test_a_byte_order_mark_is_no_content(name: str, text: str, tmp_path: Path) -> None:
    """Editors on Windows write one."""
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert settled(read_document(tmp_path / name)) == {"a": 1}


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1e-4, "b": "1"}')
    (tmp_path / "a.yml").write_text("a: 1e-4\nb: '1'\n")
    assert settled(read_document(tmp_path / "a.json")) == settled(read_document(tmp_path / "a.yml"))
    (tmp_path / "b.json").write_text("{,}")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    for name, message in {
        "none.json": "does not exist.",
        "b.json": "is not valid JSON at line 1, column 2",
        "c.yaml": "is not text; a config is JSON, YAML or TOML in UTF-8.",
    }.items():
        with pytest.raises(ConfigError) as error:
            read_document(tmp_path / name, "routes")
        assert str(error.value).startswith(f"routes names {str(tmp_path / name)!r}, which {message}")


def test_toml_is_read_by_its_suffix(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('rate = 1e-4\nname = "a"\nday = 2024-01-02\n[video]\nframes = [1, 2]\n')
    assert read_document(file) == {"rate": 1e-4, "name": "a", "day": "2024-01-02", "video": {"frames": [1, 2]}}
    with pytest.raises(ConfigError, match=r"^the text is not valid TOML: Invalid value"):
        parse_toml("rate = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        parse_toml("a = 1\na = 2")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        parse_toml(f"a = 1{0:05000}")


def test_an_environment_file_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIDE", "secret")
    file = tmp_path / "config.env"
    file.write_text(
        """# a comment
export RATE=1e-4
STEPS='50'  # quoted
EMPTY=
ARGS="--a=1 \\
 --b"
export ARGS="${ARGS} --c=$RATE $OUTSIDE $(touch ran)"
"""
    )
    found = read_document(file)
    assert found == {
        "RATE": "1e-4",
        "STEPS": "50",
        "EMPTY": None,
        "ARGS": "--a=1   --b --c=1e-4 $OUTSIDE $(touch ran)",
    }
    assert settled(found)["STEPS"] == 50
    assert [path.name for path in tmp_path.iterdir()] == ["config.env"]
    for text in ("echo hello", "A='open", "1A=2", "--rate=1"):
        with pytest.raises(ConfigError, match="write one NAME=value per line"):
            parse_env(text)


@pytest.mark.parametrize(
    "text",
    [
        "A=aaaaaaaa\n" + "A=$A$A\n" * 40,
        f"A={'a' * 400_000}\nB={'$A' * 200_000}\n",
        f"A={'a' * 400_000}\n" + "B=$A\n" * 100_000,
    ],
    ids=["doubled", "in one line", "many variables"],
)
def test_variables_that_hold_each_other_do_not_grow_without_end(text: str) -> None:
    with pytest.raises(ConfigError, match="grows to more than 1048576 characters by its variables; write them out"):
        parse_env(text)
    assert parse_env("A=$A$A$A") == {"A": "$A$A$A"}  # nothing was set before
