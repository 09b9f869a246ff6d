"""From a file and the command line to a `FinetuneConfig`, or to a report on every key.

- JSON or YAML, flat; keys may begin with `--`, as flat JSON written for command lines has them.
- `key=value` on the command line replaces what the file says; a value that begins with `[`, `{` or a quote is JSON.
- Files that a config names (data_backend_config, lycoris_config, user_prompt_library, tread_config) are read into it,
  so that the config a run keeps is whole. Paths are relative to the working directory, not to the config.
- A config with unsupported keys does not run; what is ignored is said once.
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tread.config.schema import parse
from tread.errors import ConfigError
from tread.finetune.compat.rules import Verdict
from tread.finetune.compat.translate import KeyVerdict, Translated, translate
from tread.finetune.settings import FinetuneConfig
from tread.routing.plan import PRESETS

TITLES: dict[Verdict, str] = {
    "unsupported": "not supported: change these",
    "translated": "translated",
    "ignored": "ignored",
    "runs": "runs as it stands",
}


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """The config of `tread finetune FILE [key=value ...]`."""
    translated = translate(read_mapping(path, overrides))
    refused = translated.unsupported
    if len(refused) == 1:
        raise ConfigError(_sentence(refused[0]))
    if refused:
        listed = "".join(f"\n  {_sentence(verdict)}" for verdict in refused)
        raise ConfigError(f"{path} has {len(refused)} settings that do not run:{listed}")
    if left := [verdict.key for verdict in translated.verdicts if verdict.verdict == "ignored"]:
        message = f"{path}: ignored, as nothing depends on it: {', '.join(left)} (`tread finetune --check` says why)."
        warnings.warn(message, stacklevel=1)
    return parse(FinetuneConfig, translated.settings)


def check(path: str | Path, as_json: bool = False, overrides: Sequence[str] = ()) -> int:
    """Print the verdict on every key; 0: it runs, 1: something is unsupported, 2: it cannot be read.

    Judged are the settings alone: the model and the data that they name are not opened.
    """
    try:
        translated = translate(read_mapping(path, overrides))
    except ConfigError as error:
        print(
            json.dumps({"runs": False, "error": str(error)}) if as_json else error, file=None if as_json else sys.stderr
        )
        return 2
    print(_as_json(translated) if as_json else describe(translated))
    return 1 if translated.unsupported else 0


def describe(translated: Translated) -> str:
    """The verdicts as a table, what must change first."""
    lines: list[str] = []
    width = max((len(verdict.key) for verdict in translated.verdicts), default=0)
    for kind, title in TITLES.items():
        found = [verdict for verdict in translated.verdicts if verdict.verdict == kind]
        if found:
            lines += [f"{title} ({len(found)})"]
            lines += [f"  {v.key.ljust(width)}  {_short(v.value)}{': ' * bool(v.text)}{v.text}" for v in found]
    count = len(translated.unsupported)
    lines.append(f"it does not run: {count} to change" if count else "it runs")
    return "\n".join(lines)


def read_mapping(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of a config file, dashes taken off, with overrides and the files that it names read in."""
    config = _named(_read(Path(path)), path)
    for text in overrides:
        name, value = _override(text)
        config[name] = value
    _read_in(config)
    return config


def _as_json(translated: Translated) -> str:
    report = {"runs": not translated.unsupported, "keys": [asdict(verdict) for verdict in translated.verdicts]}
    return json.dumps(report, indent=2, ensure_ascii=False, default=str)


def _sentence(verdict: KeyVerdict) -> str:
    if verdict.text.startswith(verdict.key):
        return verdict.text
    value = "" if verdict.value is None else f" is {_short(verdict.value)}"
    return f"{verdict.key}{value}: {verdict.text}{'' if verdict.text.endswith(('.', '?')) else '.'}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(found: object, path: str | Path) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        kind = "a list" if isinstance(found, list) else "empty" if found is None else repr(found)
        hint = (
            " It looks like a data list: name it in a config as data_backend_config." if isinstance(found, list) else ""
        )
        raise ConfigError(f"{path} is {kind}; a config is a mapping of settings.{hint}")
    config: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).lstrip("-")
        if name in config:
            raise ConfigError(f"{path} has {name} twice, with and without dashes; keep one.")
        config[name] = value
    return config


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-")
    if not equals or not name:
        raise ConfigError(f"cannot read {text!r}: write key=value, e.g. max_train_steps=500, after the config file.")
    if value == "null":
        return name, None
    if not value.startswith(("[", "{", '"', "'")):
        return name, value
    import yaml

    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"cannot read {text!r}: the value is not valid JSON.") from None


def _read_in(config: dict[str, Any]) -> None:
    """Replace the paths of other files by what these hold."""
    backends = config.get("data_backend_config")
    if backends is not None:
        entries = _read(Path(backends), "data_backend_config") if isinstance(backends, str) else backends
        if not isinstance(entries, list):
            raise ConfigError(f"data_backend_config {backends!r} is not a list; it must be a list of data entries.")
        own = config.get("data")
        config["data"] = [*([] if own is None else own if isinstance(own, list) else [own]), *entries]
    for key in ("lycoris_config", "user_prompt_library"):
        if isinstance(config.get(key), str) and config[key]:
            config[key] = _read(Path(config[key]), key)
    routes = config.get("tread_config")
    if isinstance(routes, str) and routes not in PRESETS and not routes.lstrip().startswith("{"):
        config["tread_config"] = _read(Path(routes), "tread_config")


def _read(path: Path, setting: str = "") -> object:
    """The content of a JSON or YAML file; `setting` is what named it."""
    which = f"{setting} names {str(path)!r}, which" if setting else f"the config file {str(path)!r}"
    if not path.is_file():
        place = "" if path.is_absolute() else f" (paths are relative to the working directory, {Path.cwd()})"
        presets = f"; nor is there such a preset: {', '.join(PRESETS)}" if setting == "tread_config" else ""
        raise ConfigError(f"{which} does not exist{place}{presets}.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{which} is not text; a config is JSON or YAML.") from None
    if path.suffix.lower() in {".yaml", ".yml"}:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise ConfigError(f"{which} is not valid YAML{place}: {getattr(error, 'problem', error)}.") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{which} is not valid JSON at {place}: {error.msg}.") from None
