"""Checks that stock weights are complete: stock loaders fill a missing tensor with random numbers and only log it.

- The loader's own report (`output_loading_info`) is checked, so tied weights, buffers and renamed tensors count as the
  loader counts them. Diffusers trusts the index of shards, so the shards are compared with it here.
- `check_weights` loads to the meta device, which reads names and shapes but no weights. A part that is stored quantized
  is loaded in full, because its loader reads values.
- Unused tensors (another head, an old buffer) cause a warning: many published files have some. Layers beyond the last
  one of a stack are refused: the config belongs to a larger model, which would be truncated.
- transformers 5 silently makes a tokenizer without its vocabulary, which maps every word to the unknown token.
"""

import json
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from tread.errors import ConfigError, TreadWarning
from tread.files import is_safetensors

SHOWN = 3
"""Number of tensors that a message names."""


def check_loaded(model: nn.Module, info: Mapping[str, Any], what: str, folder: Path | None = None) -> None:
    """Refuse a model whose files lack tensors or do not match its config.

    `info` is the second result of `from_pretrained(..., output_loading_info=True)`, `what` names the part in messages,
    `folder` holds its files, if it is local.
    """
    config = "its config.json"
    if missing := sorted(info["missing_keys"]) or _absent_from_shards(folder):
        files = _files(folder, missing)
        raise ConfigError(
            f"{what} is not whole: {files} lacks {_named(missing)} of {type(model).__name__}, which would be random. "
            "Get that part of the model again."
        )
    if mismatched := sorted(info["mismatched_keys"]):
        names = [name for name, *_ in mismatched]
        _, stored, needed = mismatched[0]
        raise ConfigError(
            f"{what} does not fit its config: {_files(folder, names)} has {_named(names)} in another shape, the first "
            f"{tuple(stored)} instead of {tuple(needed)}. Restore {config}, or get that part of the model again."
        )
    unused = sorted(info["unexpected_keys"])
    if beyond := [name for name in unused if _is_beyond(model, name)]:
        raise ConfigError(
            f"{what} does not fit its config: {_files(folder, beyond)} has {_named(beyond)} in layers that a "
            f"{type(model).__name__} of this config has not. Restore {config}, or get that part of the model again."
        )
    if unused:
        warnings.warn(
            f"{what} holds {_named(unused)} that a {type(model).__name__} of its config leaves out; if they matter, "
            f"restore {config}.",
            TreadWarning,
            stacklevel=2,
        )


def check_weights(cls: Any, name_or_path: str, part: str, *, quantized: bool, **where: Any) -> nn.Module:
    """Load a pipeline's part, of the stock class `cls`, on the meta device and pass it to `check_loaded`.

    `name_or_path` is the pipeline's folder or hub id; `where` may hold `revision` and `variant`. A part without files
    of that variant is loaded without it.
    """
    what, folder = f"{part} of {name_or_path}", _folder(name_or_path, part, where.get("revision"))
    stock = next(base.__module__.partition(".")[0] for base in cls.__mro__ if ".pipelines." not in base.__module__)
    options = {"subfolder": part, "output_loading_info": True, **where}
    if ".pipelines." in cls.__module__ and folder is not None:  # PRX's text encoder overlooks subfolder
        name_or_path = str(folder)
        del options["subfolder"]
    if stock == "transformers":
        options["ignore_mismatched_sizes"] = True  # its error names no tensor
    if not quantized:
        options["device_map"] = "meta" if stock == "transformers" else {"": "meta"}
    try:
        try:
            loaded = cls.from_pretrained(name_or_path, **options)
        except OSError:
            if options.pop("variant", None) is None:
                raise
            loaded = cls.from_pretrained(name_or_path, **options)
    except ImportError:
        raise
    except Exception as error:  # stock loaders raise whatever the files make them raise
        files = [] if folder is None else folder.glob("*.safetensors")
        damaged = [file.name for file in files if not is_safetensors(file)]
        message = str(error).partition("If you want")[0]  # without its advice for programmers
        reason = " ".join(message.split())[:300].rstrip(".") or type(error).__name__
        advice = f"{', '.join(sorted(damaged))} is cut or damaged: get it again." if damaged else ""
        raise ConfigError(f"{what} cannot be loaded: {reason}. {advice}".strip()) from error
    model, info = loaded
    check_loaded(model, info, what, folder)
    return model


def check_tokenizer(cls: Any, name_or_path: str, part: str, *, revision: str | None = None) -> None:
    """Refuse a tokenizer of a pipeline without its vocabulary."""

    def has(name: str) -> bool:
        return _find(name_or_path, part, name, revision) is not None

    names = dict(cls.vocab_files_names)
    if not names:  # a byte-level tokenizer without a vocabulary file
        return
    single = {names.pop("tokenizer_file", "tokenizer.json"), "tokenizer.model"}
    several = sorted(names.values())
    if not any(has(name) for name in sorted(single)) and not (several and all(has(name) for name in several)):
        known = " or ".join(dict.fromkeys([*sorted(single), " with ".join(several)] if several else sorted(single)))
        raise ConfigError(
            f"{part} of {name_or_path} has no vocabulary: a {cls.__name__} needs {known}. Get that part of the model "
            "again."
        )


def _find(name_or_path: str, part: str, name: str, revision: str | None) -> Path | None:
    """The path of a part's file, in its folder or in the hub's cache; None if there is none."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(name_or_path, name, subfolder=part, revision=revision)
    except OSError:
        return None
    return None if path is None else Path(path)


def _folder(name_or_path: str, part: str, revision: str | None) -> Path | None:
    config = _find(name_or_path, part, "config.json", revision)
    return None if config is None else config.parent


def _files(folder: Path | None, names: Collection[str]) -> str:
    """The files that should hold the tensors: by the index of shards, else all weight files."""
    if folder is None:
        return "its weight file"
    listed = {shard for index in _indices(folder) for name, shard in index.items() if name in names}
    files = listed or {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")}
    return ", ".join(str(folder / name) for name in sorted(files))


def _absent_from_shards(folder: Path | None) -> list[str]:
    """Tensors that an index lists and that its shards lack."""
    absent: set[str] = set()
    if folder is None:
        return []
    for index in _indices(folder):
        for shard in set(index.values()):
            path = folder / shard
            if path.is_file():  # the loader reports a missing shard
                with safe_open(path, framework="pt") as file:
                    absent |= {name for name in index if index[name] == shard} - set(file.keys())
    return sorted(absent)


def _indices(folder: Path) -> list[dict[str, str]]:
    """The weight maps (tensor name to shard) of all index files in the folder."""
    maps = []
    for path in sorted(folder.glob("*.safetensors.index*.json")):
        try:
            maps.append(dict(json.loads(path.read_bytes())["weight_map"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is no index of shards; get that part of the model again.") from error
    return maps


def _named(names: list[str]) -> str:
    """Count and names for a message: "3 tensors (a, b, c)", "5 tensors (a, b, c and 2 more)"."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:SHOWN])}{more})"


def _is_beyond(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a numbered layer beyond the end of a stack of the model."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdecimal():
            with suppress(AttributeError):
                stack = model.get_submodule(".".join(words[:i]))
                if isinstance(stack, nn.ModuleList | nn.Sequential) and int(word) >= len(stack):
                    return True
    return False
