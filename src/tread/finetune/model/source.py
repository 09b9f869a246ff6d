"""`Source`: the pretrained model, a stock diffusers pipeline in a local folder or on the hub, loaded part by part.

- `model_index.json` names the class of the pipeline; nothing is guessed from the name of the model.
- A part is loaded when it is needed: text encoders first, then the autoencoder, then the transformer. Parts that are
  not requested are None in the pipeline, as diffusers allows.
- A transformer is read tensor by tensor (`weights.py`), and never whole in memory if it is quantized or sharded. Files
  that are not safetensors with the model's own tensor names, and quantized ones, are left to the stock loader.
- `check` refuses parts with missing tensors, which stock loaders would fill with random numbers (`data/stock.py`).
"""

import copy
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tread.data.stock import check_tokenizer, check_weights
from tread.errors import ConfigError, check_int, needs, one_line, shown
from tread.finetune.model.weights import Weights, make_empty
from tread.training.memory import is_out_of_memory

DEPTHS = (
    "num_layers",
    "num_hidden_layers",
    "num_single_layers",
    "num_mmdit_layers",
    "num_single_dit_layers",
    "n_layers",
    "depth",
    "num_visual_blocks",
)
"""Keys of a transformer's config that count layers; each family has one or two of them."""

CONFIG_FILES = {
    None: "model_index.json",
    "scheduler": "scheduler_config.json",
    "tokenizer": "tokenizer_config.json",
}
"""Config file of a part if it is not config.json; None is the pipeline itself."""

WEIGHTS = "diffusion_pytorch_model.safetensors"
STOCK = ("diffusers", "transformers")
"""Libraries whose classes may be loaded as parts."""


def _is_part(value: object) -> bool:
    """Whether an entry of model_index.json names the library and the class of a part."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)


def _is_entry(value: object) -> bool:
    """Whether a list of model_index.json describes a part, present or absent; other lists are settings."""
    return isinstance(value, list) and all(word is None or isinstance(word, str) for word in value)


class Source:
    """`Source("folder-or-hub-id")`; raises ConfigError if there is no pipeline."""

    def __init__(
        self,
        name_or_path: str,
        *,
        revision: str | None = None,
        variant: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.name_or_path, self.revision, self.variant = name_or_path, revision, variant
        self.changes = dict(changes or {})
        """Keys of the transformers' configs that differ from the released ones, for init scratch."""
        self.index: dict[str, Any] = self._load_config(None)
        self._configs: dict[str, dict[str, Any]] = {}

    @property
    def pipeline_name(self) -> str:
        """The class of the pipeline, e.g. "FluxPipeline"."""
        name = self.index.get("_class_name")
        if not isinstance(name, str):
            raise ConfigError(
                f"model_index.json of {self.name_or_path} names no pipeline: _class_name is {shown(name)}."
            )
        return name

    def drawn_by(self, pipeline_name: str) -> "Source":
        """The same model with another stock pipeline class that has the same parts."""
        twin = copy.copy(self)
        twin.index = self.index | {"_class_name": pipeline_name}
        return twin

    @property
    def parts(self) -> list[str]:
        """Names of the parts that the pipeline has, e.g. "vae", "transformer_2"."""
        return [name for name, value in self.index.items() if _is_part(value)]

    def config(self, part: str) -> dict[str, Any]:
        """The config of a part, e.g. "vae" or "scheduler"; a transformer's has `changes` applied."""
        released = self.released(part)
        return {**released, **self.changes} if part.startswith("transformer") and self.changes else released

    def released(self, part: str) -> dict[str, Any]:
        """The config of a part as its file has it."""
        if part not in self._configs:
            self._configs[part] = self._load_config(part)
        return self._configs[part]

    @property
    def depth(self) -> int:
        """Number of layers of the transformer, from its config; 0 if unknown."""
        config = self.config("transformer")
        return sum(check_int(config.get(name) or 0, f"{name} of the transformer's config.json", 0) for name in DEPTHS)

    def pipeline(self, *parts: str, dtype: torch.dtype = torch.float32, given: Mapping[str, Any] | None = None) -> Any:
        """The stock pipeline with `parts` loaded and the objects of `given` inserted; all other parts are None."""
        import diffusers

        cls = getattr(diffusers, self.pipeline_name, None)
        if cls is None:
            raise ConfigError(
                f"diffusers has no {shown(self.pipeline_name)}, which model_index.json of {self.name_or_path} names."
            )
        given = dict(given or {})
        for part in parts:
            if part in self.index and self.index[part] not in (None, [None, None]):
                self.class_of(part)  # raises for a malformed entry
        listed = (part for part, value in self.index.items() if _is_entry(value))
        wanted = {part for part in self.parts if part in parts} | {"scheduler", *given}
        absent = dict.fromkeys(part for part in listed if part not in wanted)
        return self._load(cls, ", ".join(parts), dtype=dtype, **absent, **given)

    def check(self, *parts: str) -> dict[str, nn.Module]:
        """Raise ConfigError if files or tensors of a part are missing; no weights are read.

        Returns the models among the parts, on the meta device.
        """
        models: dict[str, nn.Module] = {}
        for part in parts:
            cls = self.class_of(part) if part in self.parts else None
            if hasattr(cls, "vocab_files_names"):
                check_tokenizer(cls, self.name_or_path, part, revision=self.revision)
            elif hasattr(cls, "get_attributes"):
                self._check_processor(cls, part)
            elif isinstance(cls, type) and issubclass(cls, nn.Module):
                quantized = "quantization_config" in self.config(part)
                models[part] = check_weights(cls, self.name_or_path, part, quantized=quantized, **self._where)
        return models

    def transformer(self, part: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
        """One transformer without the rest of the pipeline; on the CPU if it is left to the stock loader."""
        empty = self.empty(part, dtype=dtype)
        if empty is None:
            return self._load(self.class_of(part), part, dtype=dtype, subfolder=part)
        with self._loading(part):
            self.weights(part).fill(empty, device=device)
        return empty

    def part(self, part: str) -> Any:
        """A small part, such as a tokenizer, without the rest of the pipeline."""
        return self._load(self.class_of(part), part, subfolder=part)

    def empty(self, part: str, *, dtype: torch.dtype) -> nn.Module | None:
        """One transformer with parameters on the meta device, for `weights` to fill; None if these do not fit."""
        cls, weights = self.class_of(part), self.weights(part)
        if not hasattr(cls, "register_to_config") or "quantization_config" in self.config(part):
            return None
        with self._loading(part):
            model: Any = make_empty(cls, self.config(part), dtype, weights.files)
            if not weights.can_fill(model):
                return None
        model.register_to_config(_name_or_path=self.name_or_path)  # as the stock loader does
        return model

    def weights(self, part: str) -> Weights:
        """The tensors in a part's safetensors; empty if there are none on this machine."""
        with self._loading(part):
            return Weights(self._files(part))

    def _files(self, part: str) -> dict[str, Path]:
        """The safetensors file of each tensor of a part; as in stock pipelines, one need not have the variant."""
        folder = Path(self.name_or_path)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import LocalEntryNotFoundError

            try:
                found = snapshot_download(
                    self.name_or_path, revision=self.revision, allow_patterns=f"{part}/*", local_files_only=True
                )
            except LocalEntryNotFoundError:  # the stock loader fetches them
                return {}
            folder = Path(found)
        for named in (self._variant_of, str):
            single, index = (folder / part / named(name) for name in (WEIGHTS, f"{WEIGHTS}.index.json"))
            if index.is_file():
                files = json.loads(index.read_bytes())["weight_map"]
                return {name: folder / part / file for name, file in files.items()}
            if single.is_file():
                with safe_open(single, framework="pt") as file:
                    return dict.fromkeys(file.keys(), single)
        return {}

    def _variant_of(self, name: str) -> str:
        """The name of a weight file with this source's variant inserted before its suffix."""
        stem, _, ending = name.rpartition(".")
        return name if self.variant is None else f"{stem}.{self.variant}.{ending}"

    def _check_processor(self, cls: Any, part: str) -> None:
        """Load a processor, which is small: without torchvision its parts for videos are missing."""
        try:
            self._load(cls, part, subfolder=part)
        except (ConfigError, ImportError) as error:
            advice = "" if importlib.util.find_spec("torchvision") else " A processor needs torchvision: install it."
            raise ConfigError(f"{error}{advice}") from error

    def _load(self, cls: Any, what: str, **arguments: Any) -> Any:
        with self._loading(what):
            return cls.from_pretrained(self.name_or_path, **self._where, **arguments)

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        """Turn any error of a loader into a ConfigError of one sentence."""
        try:
            yield
        except (ImportError, ConfigError):
            raise
        except Exception as error:  # loaders raise all kinds of errors for damaged files
            if is_out_of_memory(error):
                raise
            raise ConfigError(f"cannot load {what} of {self.name_or_path}: {one_line(error)[:300]}") from error

    def class_of(self, part: str) -> Any:
        """The class of a part; None if it is not from diffusers or transformers.

        A part that belongs to one stock pipeline is listed under the name of that pipeline's module.
        """
        if part not in self.parts:
            raise ConfigError(
                f"model_index.json of {self.name_or_path} has no {part} as [library, class]; get it again."
            )
        library, name = self.index[part]
        if library in STOCK:
            return getattr(importlib.import_module(library), name, None)
        return getattr(getattr(importlib.import_module("diffusers.pipelines"), library, None), name, None)

    @cached_property
    def _where(self) -> dict[str, Any]:
        given = {"revision": self.revision, "variant": self.variant}
        return {name: value for name, value in given.items() if value is not None}

    def _load_config(self, part: str | None) -> dict[str, Any]:
        with needs("tread finetune needs diffusers", "diffusers"):
            from diffusers.configuration_utils import ConfigMixin
        file = CONFIG_FILES.get(part, "config.json")
        loader: Any = type("Loader", (ConfigMixin,), {"config_name": file})
        where = {"revision": self.revision} if self.revision else {}
        try:
            found = loader.load_config(self.name_or_path, subfolder=part, **where)
            if not isinstance(found, Mapping):
                raise ValueError(f"{file} is no mapping")
            return dict(found)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # a file that is no config
            if part is None:
                raise ConfigError(
                    f"no model at pretrained_model_name_or_path {self.name_or_path!r}: give a folder in diffusers "
                    "format (it has model_index.json), or the id of a model on the hub that this machine can reach."
                ) from error
            raise ConfigError(
                f"{self.name_or_path!r} has no {part}, which its pipeline needs; download the model again."
            ) from error
