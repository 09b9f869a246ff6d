"""Translate a config of this or another trainer into settings of `FinetuneConfig`, with a verdict on every key.

- The verdicts: a key runs, is translated, differs (it runs, but trains differently from the other trainer), is ignored
  for a reason, or is unsupported. `keys` assigns the rules, `rules` defines them.
- Options that a config of the existing trainer leaves out have verdicts too: `left_out` adds its defaults.
- Values are judged too: one of the wrong type, or one that contradicts another setting, is unsupported.
- Text is read as a number or a bool if the setting is one: command lines and flat JSON write "1e-4" and "true".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from tread.config.documents import Plain, settled
from tread.config.schema import convert, parse
from tread.data.captioned.entries import DataConfig, data_configs
from tread.errors import ConfigError, masked, nearest, shown
from tread.finetune.compat.defaults import DEFAULTS
from tread.finetune.compat.keys import DATA_RULES, PREFIXES, RULES, THEIR_DATA_RULES
from tread.finetune.compat.left_out import has_other_layers, left_out, left_out_of_entry
from tread.finetune.compat.models import MODELS
from tread.finetune.compat.rules import Outcome, Rule, Verdict, is_theirs
from tread.finetune.settings import ENTRY_DEFAULTS, FinetuneConfig
from tread.routing.plan import RoutePlan

STRUCTURED = ("data", "lycoris_config")
"""Fields whose lists and mappings are translated here, not by a rule."""
FULL_MATRIX = 10000
"""A LoKr rank above that of any layer: its matrices are then full."""


@dataclass(frozen=True, kw_only=True)
class KeyVerdict:
    """The verdict on one key of a config, with the value given and an explanation."""

    key: str
    value: Any
    verdict: Verdict
    text: str


@dataclass(kw_only=True)
class Translated:
    """A translated config: settings of `FinetuneConfig`, and the verdict on each key."""

    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: list[KeyVerdict] = field(default_factory=list)

    def add(self, key: str, value: Any, outcome: Outcome) -> None:
        """Take over the settings of an outcome and note its verdict."""
        self.settings |= outcome.settings
        value = masked(value, key)  # verdicts are printed, so secrets are masked
        self.verdicts.append(KeyVerdict(key=key, value=value, verdict=outcome.verdict, text=outcome.text))

    @property
    def unsupported(self) -> list[KeyVerdict]:
        """The verdicts that keep the config from running."""
        return [verdict for verdict in self.verdicts if verdict.verdict == "unsupported"]


def translate(config: Mapping[str, Any], unread: Mapping[str, str] | None = None) -> Translated:
    """The settings and verdicts of a config; if nothing is unsupported, `FinetuneConfig` accepts the settings.

    Required settings that are missing have an unsupported verdict. `unread` has the error of each key
    whose file cannot be read.

    >>> translate({"model_family": "flux", "optimizer": "optimi-lion"}).verdicts[1].text
    'optimizer: lion'
    """
    hints = get_type_hints(FinetuneConfig)
    given = config
    config = {key: _read(value, hints.get(key), key) for key, value in config.items()}
    wrong = {key: why for key, value in config.items() if (why := _not_one(value, hints.get(key), key))}
    wrong |= unread or {}
    # an unreadable data_backend_config stays: rules tell by it that the config is the existing trainer's
    config = {key: value for key, value in config.items() if key not in wrong or key == "data_backend_config"}
    absent = {key: value for key, value in left_out(config).items() if key not in wrong}
    config |= absent
    done = Translated()
    for key, value in config.items():
        if key in wrong:
            continue
        if key == "data" or (key == "data_backend_config" and isinstance(value, list | tuple)):
            _data(key, value, config, done)
        elif key == "lycoris_config":
            _lycoris(value, config, done)
        elif key == "lora_type" and _is_lokr(config):
            done.add(key, value, Outcome.translated({"lora_type": "lokr"}))
        else:
            outcome = _typed(_outcome(key, value, config, RULES, hints), hints)
            done.add(key, value, _not_given(key, value, outcome) if key in absent else outcome)
    for key, why in wrong.items():
        done.add(key, given[key], Outcome.unsupported(why))
    if has_other_layers(config):
        text = "left out; the family's own layers here are not those that it has there: name them to be sure"
        done.add("lora_targets", None, Outcome.differs({}, text))
    _missing(config, done)
    if (plan := done.settings.get("tread_config")) is not None:
        _attempt(lambda: RoutePlan.from_config(plan), "tread_config", done)
    if all(verdict.key == "model_family" for verdict in done.unsupported):
        _together(done)
    return done


def _not_given(key: str, value: Any, outcome: Outcome) -> Outcome:
    """The outcome of a key that was added by `left_out`, with a note that it is the other trainer's default."""
    text = outcome.text or f"{key}: {value}"
    verdict = "translated" if outcome.verdict == "runs" else outcome.verdict
    return replace(outcome, verdict=verdict, text=f"{text}; left out, and this is the default there")


def _read(value: Any, hint: Any, key: str) -> Any:
    """A value converted to the type of its field, if it fits; for other keys, text is parsed as a number or bool.

    >>> [_read(text, None, "num_cycles") for text in ("1e-4", "8", "True", "flux")]
    [0.0001, 8, True, 'flux']
    """
    plain = Plain(value) if isinstance(value, str) else value
    if hint is None:
        return settled(plain)
    try:
        return convert(hint, plain, key)
    except ConfigError:  # a rule may know the value; if none does, `_typed` refuses it
        return value


def _not_one(value: Any, hint: Any, key: str) -> str:
    """The error for a list or mapping given to a key that takes a single name or number; empty if it is valid."""
    if hint is None or not isinstance(value, list | tuple | Mapping) or key in STRUCTURED:
        return ""
    try:
        convert(hint, value, key)
    except ConfigError as error:
        return str(error)
    return ""


def _outcome(
    key: str, value: Any, config: Mapping[str, Any], rules: Mapping[str, Rule], fields: Mapping[str, Any]
) -> Outcome:
    rule = rules.get(key)
    if rule is None and rules is RULES and key not in fields:
        rule = next((rule for start, rule in PREFIXES.items() if key.startswith(start)), None)
    if rule is None and key in fields:
        return Outcome.runs(**{key: value})
    known = rules is RULES and key in DEFAULTS
    if rule is not None:
        outcome = rule(value, config)
    elif known:
        default = json.dumps(DEFAULTS[key])
        outcome = Outcome.unsupported(f"has no counterpart here; leave it out, or write {default}")
    else:
        outcome = Outcome.unsupported(f"unknown key{nearest(key, [*fields, *rules])}")
    if known and not outcome.settings and _same(value, DEFAULTS[key]):
        return Outcome.runs()
    return outcome


def _same(value: Any, default: Any) -> bool:
    """Whether a value equals the default; 0 equals 0.0, but not false."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _typed(outcome: Outcome, hints: Mapping[str, Any]) -> Outcome:
    """The outcome with its settings converted to the types of their fields, or unsupported if one does not fit."""
    settings = {}
    for name, value in outcome.settings.items():
        try:
            settings[name] = convert(hints[name], value, name)
        except ConfigError as error:
            if value is None:  # null for a field that is not optional means not set
                continue
            return Outcome.unsupported(str(error))
    return replace(outcome, settings=settings)


def _data(name: str, value: Any, config: Mapping[str, Any], done: Translated) -> None:
    """Translate `data`, or the existing trainer's data_backend_config, with a verdict on each key of each entry."""
    if value is None and is_theirs(config):
        done.add(name, value, Outcome.ignored("off"))
        return
    theirs = name == "data_backend_config"
    rules = THEIR_DATA_RULES if theirs else DATA_RULES
    before = done.settings.get("data", ())
    try:
        entries = data_configs(value)
    except ConfigError as error:
        done.add(name, value, Outcome.unsupported(str(error)))
        return
    if not any(isinstance(entry, Mapping) for entry in (value if isinstance(value, list | tuple) else [value])):
        done.add(name, value, Outcome.runs(data=_joined(value, before)))
        return
    kept: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        where = f"{name}[{index}]"
        why = _left_out(entry)
        if why:
            done.add(where, entry.get("id"), Outcome.ignored(why))
            continue
        inner = Translated()
        absent = left_out_of_entry(entry, config) if theirs else {}
        for key, item in (entry | absent).items():
            outcome = _outcome(key, item, entry, rules, get_type_hints(DataConfig))
            if item is None and outcome.verdict in ("runs", "translated"):  # not set
                outcome = Outcome.runs()
            inner.add(f"{where}.{key}", item, _not_given(key, item, outcome) if key in absent else outcome)
        _attempt(lambda inner=inner, where=where: parse(DataConfig, inner.settings, where), where, inner)
        done.verdicts += inner.verdicts
        kept.append(inner.settings)
    done.settings["data"] = _joined(before, kept) if theirs else _joined(kept, before)


def _joined(first: Any, second: Any) -> Any:
    """The entries of `data` and those of data_backend_config."""
    if isinstance(first, str | Mapping) and not second:
        return first
    parts = [part if isinstance(part, list | tuple) else (part,) for part in (first, second)]
    return (*parts[0], *parts[1])


def _left_out(entry: Mapping[str, Any]) -> str:
    """Why an entry is not trained on; empty if it is."""
    if entry.get("dataset_type") in ("text_embeds", "image_embeds"):
        return f"an entry of {entry['dataset_type']}; embeddings are kept in cache_dir"
    return "the entry is disabled" if entry.get("disabled") or entry.get("disable") else ""


def _is_lokr(config: Mapping[str, Any]) -> bool:
    lycoris = config.get("lycoris_config")
    return config.get("lora_type") == "lycoris" and isinstance(lycoris, Mapping) and lycoris.get("algo") == "lokr"


def _lycoris(value: Any, config: Mapping[str, Any], done: Translated) -> None:
    """Translate lycoris_config: LoKr runs in peft, whose files diffusers reads, other algorithms in lycoris."""
    if value is None or config.get("lora_type") != "lycoris":
        text = f"lora_type is {config.get('lora_type', 'standard')}"
        silent = value in (None, DEFAULTS["lycoris_config"])
        done.add("lycoris_config", value, Outcome.runs() if silent else Outcome.ignored(text))
        return
    if not _is_lokr(config):
        runs = Outcome.runs(lycoris_config=value)
        done.add("lycoris_config", value, _typed(runs, get_type_hints(FinetuneConfig)))
        return
    rank = FULL_MATRIX if value.get("full_matrix") else value.get("linear_dim", 4)
    if isinstance(rank, bool) or not isinstance(rank, int):
        why = f"lycoris_config.linear_dim is {shown(rank)}; it must be a whole number"
        done.add("lycoris_config.linear_dim", rank, Outcome.unsupported(why))
        return
    full = rank >= FULL_MATRIX
    alpha = rank if full else value.get("linear_alpha") or rank
    factor, per_module = _factors(value)
    translated = {
        "algo": "lora_type: lokr",
        "factor": f"lokr_factor: {factor}",
        "linear_dim": f"lora_rank: {rank}",
        "full_matrix": f"lora_rank: {rank}",
        "linear_alpha": f"lora_alpha: {alpha}" + (" (full matrices)" if full else ""),
    }
    rules = {key: Outcome(verdict="translated", text=text) for key, text in translated.items()}
    rules |= {
        "apply_preset": Outcome.differs(
            {}, f"lora_targets: the family's own layers, all with lokr_factor {factor}{per_module}"
        ),
        "bypass_mode": Outcome.ignored("it changes how the product is computed, not its result"),
        "multiplier": Outcome.ignored("an adapter is trained at full strength")
        if value.get("multiplier") == 1
        else Outcome.unsupported("write 1, and scale the adapter when you load it"),
    }
    for key, item in value.items():
        unknown = Outcome.unsupported("leave it out; LoKr is peft's here")
        done.add(f"lycoris_config.{key}", item, rules.get(key, unknown))
    settings = {"lora_rank": rank, "lora_alpha": alpha, "lokr_factor": factor}
    typed = _typed(Outcome.translated(settings), get_type_hints(FinetuneConfig))
    done.settings |= typed.settings
    if typed.verdict == "unsupported":
        done.add("lycoris_config", value, typed)


def _factors(lycoris: Mapping[str, Any]) -> tuple[Any, str]:
    """The LoKr factor for all layers, and a note about the factors that apply_preset sets for some modules."""
    preset = lycoris.get("apply_preset")
    modules = preset.get("module_algo_map") if isinstance(preset, Mapping) else None
    inner = modules if isinstance(modules, Mapping) else {}
    factors = {str(name): own["factor"] for name, own in inner.items() if isinstance(own, Mapping) and "factor" in own}
    if not factors:
        return lycoris.get("factor", -1), "; there the layers of its modules"
    first, *others = factors.values()
    factor = lycoris.get("factor", -1) if any(other != first for other in others) else first
    return factor, f"; there {', '.join(f'{name} has {own}' for name, own in factors.items())}"


def _missing(config: Mapping[str, Any], done: Translated) -> None:
    examples = {
        "model_family": f"one of {', '.join(MODELS)}",
        "pretrained_model_name_or_path": "a folder in diffusers format, or an id on the hub",
        "data": "a folder of images or videos with captions, or a list of entries (docs/data.md)",
    }
    if config.get("model_family") in MODELS:
        usual = next(iter(MODELS[config["model_family"]].values()))
        examples["pretrained_model_name_or_path"] += f", e.g. {usual}"
    if done.settings.get("data") == ():
        name = "data" if config.get("data") is not None else "data_backend_config"
        done.add(name, config[name], Outcome.unsupported("no entry has images or videos; add one"))
    told = {verdict.key.partition("[")[0] for verdict in done.unsupported}
    if "model_family" in told and config.get("model_family") is not None:
        told.add("pretrained_model_name_or_path")
    for name, example in examples.items():
        answered = name in done.settings or name in told or (name == "data" and "data_backend_config" in told)
        if not answered and not (name == "pretrained_model_name_or_path" and "model_flavour" in told):
            done.add(name, None, Outcome.unsupported(f"missing; it must be {example}"))


def _together(done: Translated) -> None:
    """Check the settings against each other, and which settings every data entry overrides.

    The other settings are checked even if the family is not tuned here.
    """
    settings = {"model_family": next(iter(MODELS)), "pretrained_model_name_or_path": "", **done.settings}
    _attempt(lambda: FinetuneConfig(**settings), "", done)
    entries = data_configs(done.settings["data"])
    for index, verdict in enumerate(done.verdicts):
        given = verdict.key in ENTRY_DEFAULTS and verdict.verdict == "runs" and verdict.value is not None
        given &= verdict.key != "trigger_word"  # validation prompts use it too
        if given and all(verdict.key in entry for entry in entries):
            done.verdicts[index] = replace(verdict, verdict="ignored", text="every data entry sets its own")


def _attempt(build: Callable[[], object], where: str, done: Translated) -> None:
    """Call `build`; a ConfigError becomes an unsupported verdict on the key that its message begins with."""
    try:
        build()
    except ConfigError as error:
        word = str(error).split()[0].rstrip(":,")
        known = word.startswith(f"{where}.") if where else word in FinetuneConfig.__dataclass_fields__
        key = word if known else where or "config"
        given = [verdict for verdict in done.verdicts if verdict.key == key]
        done.verdicts = [verdict for verdict in done.verdicts if verdict.key != key]
        value = given[0].value if given else None
        done.add(key, value, Outcome.unsupported(str(error)))
