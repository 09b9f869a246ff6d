"""Read a config file and command-line overrides into a `FinetuneConfig`, or into a report on every key.

- JSON, YAML or TOML, flat; keys may begin with `--`, as in flat JSON written for command lines. An environment
  file (`.env`) is read as a config of the existing trainer (`compat.environment`).
- `key=value` on the command line replaces what the file says; the type of the key decides how the value is read.
- Files that a config names (data_backend_config, lycoris_config, validation_prompt, tread_config, ...) are read into
  it, so that the config saved with a run is complete. Paths are relative to the working directory, not to the config.
- A config with unsupported keys does not run; ignored keys are listed in one warning.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tread.config.documents import ENV_SUFFIX, Plain, find_recipe, read_document, settled
from tread.config.fields import Field
from tread.config.jobs import TRAIN_SECTIONS, job_of
from tread.config.layers import assigned, settings_of, split_assignment
from tread.config.schema import from_text, parse, takes_text
from tread.errors import LONGEST, ConfigError, TreadWarning, shortened, shown
from tread.files import is_file
from tread.finetune.compat.environment import from_environment
from tread.finetune.compat.formats import refuse_other_formats
from tread.finetune.compat.rules import Verdict
from tread.finetune.compat.translate import KeyVerdict, Translated, translate
from tread.finetune.settings import SCRATCH, FinetuneConfig
from tread.routing.plan import PRESETS
from tread.routing.plan import read_mapping as read_routes
from tread.training.checkpoint import moved_run

FILES = (
    *("data_backend_config", "lycoris_config", "user_prompt_library", "peft_lora_target_modules", "tread_config"),
    "validation_prompt",
)
"""Keys that may name a file."""
PROMPT_FILES = (".txt", ".json", ".yaml", ".yml")
"""Endings of a `validation_prompt` that names a file."""
TITLES: dict[Verdict, str] = {
    "unsupported": "not supported: change these",
    "differs": "runs, but trains something else than where it comes from",
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
        raise ConfigError(
            f"{shortened(str(path), 100)} has {len(refused)} settings that do not run:{_several(refused)}"
        )
    if left := [verdict.key for verdict in translated.verdicts if verdict.verdict == "ignored"]:
        message = f"{path}: ignored, as nothing depends on it: {', '.join(left)} (`tread finetune --check` says why)."
        warnings.warn(message, TreadWarning, stacklevel=1)
    if other := [verdict.key for verdict in translated.verdicts if verdict.verdict == "differs"]:
        message = f"{path}: trains something else than where it comes from by {', '.join(other)}"
        warnings.warn(f"{message} (`tread finetune --check` says how).", TreadWarning, stacklevel=1)
    return parse(FinetuneConfig, translated.settings)


def check(
    path: str | Path, as_json: bool = False, overrides: Sequence[str] = (), opening: Callable[[], None] | None = None
) -> int:
    """Print the verdict on every key, and the errors that a run would raise about the model and the data.

    `opening` is called before the model is opened, which not every config comes to. Returns the exit code: 0 if
    the config runs, 1 if something must change, 2 if it cannot be read.
    """
    try:
        translated = _judged(path, overrides)
    except ConfigError as error:
        told = json.dumps({"runs": False, "error": str(error)}) if as_json else error
        print(told, file=None if as_json else sys.stderr)
        return 2
    if translated.unsupported:
        problems, unseen = [], ["the model and the data: the settings come first"]
    else:
        from tread.finetune.preflight import look  # imports torch

        if opening is not None:
            opening()
        problems, unseen = look(parse(FinetuneConfig, translated.settings))
    print((_as_json if as_json else describe)(translated, problems, unseen))
    return 1 if translated.unsupported or problems else 0


def describe(translated: Translated, problems: Sequence[str] = (), unseen: Sequence[str] = ()) -> str:
    """The verdicts as a table, with the problems that must be fixed first."""
    lines = _listed("refused when the model and the data are opened: change these", problems)
    width = max((len(verdict.key) for verdict in translated.verdicts), default=0)
    for verdict, title in TITLES.items():
        keys = [key for key in translated.verdicts if key.verdict == verdict]
        if keys:
            lines += [f"{title} ({len(keys)})"]
            lines += [f"  {k.key.ljust(width)}  {_short(k.value)}{': ' * bool(k.text)}{k.text}" for k in keys]
    lines += _listed("not looked at", unseen)
    count = len(translated.unsupported) + len(problems)
    lines.append(f"it does not run: {count} to change" if count else "it runs")
    return "\n".join(lines)


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title} ({len(lines)})", *(f"  {one}" for one in lines)] if lines else []


def _judged(path: str | Path, overrides: Sequence[str]) -> Translated:
    """The verdict on every key; a key whose file cannot be read is unsupported, and the others are still judged."""
    unread: dict[str, str] = {}
    return translate(read_mapping(path, overrides, unread), unread)


def read_mapping(
    path: str | Path, overrides: Sequence[str] = (), unread: dict[str, str] | None = None
) -> dict[str, Any]:
    """The keys of a config file without leading dashes, with overrides applied and the files that it names read in.

    With `unread`, the error about an unreadable file is stored there under its key instead of raised.
    """
    known = settings_of(FinetuneConfig)
    document = read_document(find_recipe(Path(path)))
    if Path(path).name.lower().endswith(ENV_SUFFIX) and isinstance(document, Mapping):
        document = from_environment(document)
    config = _named(document, path)
    config = {name: _by_type(known.get(name), value) for name, value in config.items()}
    named: set[str] = set()
    for text in overrides:
        name, value = split_assignment(text, "max_train_steps")
        name = name.lstrip("-")
        named.add(name)
        if name.partition(".")[0] in known:
            config = assigned(config, f"{name}={value}", known, "tread finetune")
        else:  # a key of another trainer
            config[name] = settled(from_text(str | dict[str, Any] | tuple[Any, ...] | None, value, name))
    if config.get("resume_from_checkpoint") == "latest" and "output_dir" in config.keys() - named:
        moved = moved_run(Path(path), config["output_dir"])
        config |= {} if moved is None else {"output_dir": str(moved)}
    for key in [key for key in FILES if key in config]:
        try:
            config[key] = _read_in(key, config)
        except ConfigError as error:
            if unread is None:
                raise
            unread[key] = str(error)
    return {**SCRATCH, **config} if config.get("init") == "scratch" else config


def _by_type(field: Field | None, value: object) -> object:
    """A value of a config file; an unquoted YAML scalar stays text if its field takes text."""
    if field is not None and isinstance(value, Plain) and takes_text(field.hint, value):
        return str(value)
    return settled(value)


def _as_json(translated: Translated, problems: Sequence[str], unseen: Sequence[str]) -> str:
    keys = [asdict(verdict) for verdict in translated.verdicts]
    runs = not translated.unsupported and not problems
    report = {"runs": runs, "problems": problems, "not_looked_at": unseen, "keys": keys}
    return json.dumps(report, indent=2, ensure_ascii=False, default=str)


def _sentence(verdict: KeyVerdict) -> str:
    if verdict.text.startswith(verdict.key):
        return verdict.text
    value = "" if verdict.value is None else f" is {_short(verdict.value)}"
    return f"{verdict.key}{value}: {verdict.text}{'' if verdict.text.endswith(('.', '?')) else '.'}"


def _several(refused: Sequence[KeyVerdict]) -> str:
    """As many verdicts as fit into an error message, one per line."""
    lines = [f"\n  {_sentence(verdict)}" for verdict in refused]
    room, fits = LONGEST - 200, 0
    while fits < len(lines) and sum(map(len, lines[: fits + 1])) <= room:
        fits += 1
    rest = f"\n  and {len(lines) - fits} more: `tread finetune --check` lists them" if fits < len(lines) else ""
    return "".join(lines[:fits]) + rest


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(document: object, path: str | Path) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        kind = "a list" if isinstance(document, list) else "empty" if document is None else shown(document)
        hint = (
            " It looks like a data list: name it in a config as data_backend_config."
            if isinstance(document, list)
            else ""
        )
        raise ConfigError(f"{path} is {kind}; a config is a mapping of settings.{hint}")
    refuse_other_formats(document, path)
    sections = [name for name in TRAIN_SECTIONS if name in document]
    if sections and job_of(document, path) == "train":
        raise ConfigError(f"{path} is a config of `tread train`, as it has {sections[0]}: run `tread train {path}`.")
    config: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).lstrip("-")
        if name in config:
            raise ConfigError(f"{path} has {shortened(name, 100)} twice, with and without dashes; keep one.")
        config[name] = value
    return config


def _read_in(key: str, config: Mapping[str, Any]) -> Any:
    """The value of a key; a path is replaced by the content of its file."""
    value = config[key]
    if key == "data_backend_config" and value is not None:
        entries = _content(value, key) if isinstance(value, str) else value
        if not isinstance(entries, list):
            raise ConfigError(f"{key} is {shown(value)}, which is not a list; it must be a list of data entries.")
        return entries
    if not isinstance(value, str) or not value:
        return value
    if key == "validation_prompt":
        return _prompts(value) if value.lower().endswith(PROMPT_FILES) and "\n" not in value else value
    if key == "tread_config":
        return value if value in PRESETS or value.lstrip().startswith("{") else read_routes(value)
    unused = key == "lycoris_config" and config.get("lora_type") != "lycoris"
    return value if unused else _content(value, key)


def _prompts(path: str) -> list[str]:
    """The prompts in a file: the lines of a .txt, or the values of a list or mapping."""
    if path.lower().endswith(".txt"):
        if not is_file(path):
            raise ConfigError(f"validation_prompt names {shown(path)}, which does not exist; write a prompt or a file.")
        try:
            content: Any = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"validation_prompt names {shown(path)}, which cannot be read ({error}).") from error
    else:
        content = _content(path, "validation_prompt")
    content = list(content.values()) if isinstance(content, Mapping) else content
    if not isinstance(content, list) or not all(isinstance(prompt, str) for prompt in content):
        raise ConfigError(f"validation_prompt names {shown(path)}, which holds no list or mapping of prompts.")
    prompts = [prompt.strip() for prompt in content if prompt.strip()]
    if not prompts:
        raise ConfigError(f"validation_prompt names {shown(path)}, which has no prompts; write one in each line.")
    return prompts


def _content(path: str, setting: str) -> Any:
    return settled(read_document(Path(path), setting))
