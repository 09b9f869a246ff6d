"""Rules that turn keys and values of other trainers into settings of `FinetuneConfig`; `keys` assigns them to keys.

- A rule takes the value of a key and the whole config, and returns an `Outcome`: the verdict, a text that explains it,
  and our settings.
- Four functions make most rules: `ignored`, `renamed`, `reworded` and `unless_off`. The rest are written out.
- Some keys mean one thing in a config of ours and another in one of the existing trainer. `is_theirs` decides:
  every config of that trainer has data_backend_config, and none of ours does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from tread.errors import ConfigError
from tread.finetune.compat.defaults import DEFAULTS
from tread.finetune.model.original_names import LAYOUTS
from tread.routing.plan import tread_mapping
from tread.training.settings import OptimizerName

Verdict = Literal["runs", "translated", "differs", "ignored", "unsupported"]
OFF = (None, False, 0, "", "none", "no", [], {})
"""Values that switch a key off."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict on one key, its explanation, and the settings of `FinetuneConfig` that the value becomes."""

    verdict: Verdict
    text: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def runs(cls, **settings: Any) -> Self:
        """The key is one of ours and so is its value."""
        return cls(verdict="runs", settings=settings)

    @classmethod
    def translated(cls, settings: Mapping[str, Any], why: str = "") -> Self:
        """The setting has another name or value here; the text names it, with `why` in brackets."""
        text = ", ".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in settings.items()
        )
        return cls(verdict="translated", text=f"{text} ({why})" if why else text, settings=dict(settings))

    @classmethod
    def differs(cls, settings: Mapping[str, Any], why: str) -> Self:
        """The config runs but trains differently from the other trainer; `why` names the difference."""
        text = cls.translated(settings, why).text if settings else why
        return cls(verdict="differs", text=text, settings=dict(settings))

    @classmethod
    def ignored(cls, why: str) -> Self:
        """The key has no effect on what is learned."""
        return cls(verdict="ignored", text=why)

    @classmethod
    def unsupported(cls, instead: str) -> Self:
        """The config cannot run with this value; the text says what to write instead."""
        return cls(verdict="unsupported", text=instead)


Rule = Callable[[Any, Mapping[str, Any]], Outcome]
"""The value of a key and the whole config -> the outcome."""


def is_theirs(config: Mapping[str, Any]) -> bool:
    """Whether a config belongs to the existing trainer: all of its configs have data_backend_config, none of ours."""
    return config.get("data_backend_config") is not None


def there(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key in the existing trainer: the given one, or its default."""
    return DEFAULTS[key] if config.get(key) is None else config[key]


def ignored(why: str) -> Rule:
    """The rule of a key that has no effect on what is learned."""
    return lambda value, config: Outcome.ignored(why)


def unless_off(instead: str, off: tuple[Any, ...] = OFF) -> Rule:
    """The rule of a key that is ignored while its value is one of `off`, and unsupported otherwise."""
    return lambda value, config: Outcome.ignored("off") if value in off else Outcome.unsupported(instead)


def renamed(name: str) -> Rule:
    """The rule of a key that is called `name` here; a config that has both keeps ours."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if name in config:
            return Outcome.ignored(f"{name} is there too, and is read instead")
        return Outcome.translated({name: value})

    return rule


def reworded(name: str, values: Mapping[Any, Any], refused: Mapping[Any, str] | None = None) -> Rule:
    """The rule of a field: `values` are renamed, `refused` ones are unsupported with advice, others run."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        key = value if isinstance(value, str | int | None) else repr(value)
        if refused and key in refused:
            return Outcome.unsupported(refused[key])
        return Outcome.translated({name: values[key]}) if key in values else Outcome.runs(**{name: value})

    return rule


def steps(value: Any, config: Mapping[str, Any]) -> Outcome:
    """max_train_steps is ignored if num_train_epochs is set."""
    if value and config.get("num_train_epochs"):
        return Outcome.ignored("num_train_epochs takes its place; set that to 0 to train by steps")
    return Outcome.runs(max_train_steps=value)


def _by_word(ours: Mapping[str, str]) -> dict[str, str]:
    """Invert a mapping of our name -> the space-separated names of others."""
    return {word: own for own, words in ours.items() for word in words.split()}


OPTIMIZERS = _by_word(
    {
        "adamw-bf16": "adamw_bf16",
        "adamw": "torch-adamw optimi-adamw bnb-adamw bnb-adamw-paged",
        "adamw-8bit": "bnb-adamw8bit bnb-adamw8bit-paged ao-adamw8bit",
        "adafactor": "torch-adafactor",
        "lion": "optimi-lion bnb-lion bnb-lion-paged",
        "lion-8bit": "bnb-lion8bit bnb-lion8bit-paged",
        "adamw-schedule-free": "adamw_schedulefree",
    }
)
"""Names of optimizers in other trainers -> `optimizer`."""
KNOWN = get_args(OptimizerName)


def optimizer(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Optimizers are named by their update rule, not by the library that computes it."""
    if value in ("adamw_bf16", "adamw-bf16") and config.get("model_type", "lora") == "lora":
        return Outcome.translated({"optimizer": "adamw"}, "an adapter's weights are float32")
    if value in OPTIMIZERS:
        settings = {"optimizer": OPTIMIZERS[value]}
        if value == "adamw_bf16" and "base_model_precision" not in config:
            settings["base_model_precision"] = "bf16"
        return Outcome.translated(settings)
    if value in KNOWN:
        return Outcome.runs(optimizer=value)
    if any(word in str(value) for word in ("prodigy", "schedulefree", "muon")):
        return Outcome.unsupported(
            "write optimizer: prodigy, adamw-schedule-free or muon, whichever it is a variant of"
        )
    if any(word in str(value) for word in ("dadapt", "soap", "stable", "came")):
        return Outcome.unsupported("write optimizer: adamw, with learning_rate 1e-4 for a LoRA")
    return Outcome.runs(optimizer=value)


PRECISIONS = _by_word(
    {
        "int8": "int8-torchao int8-quanto int8-sdnq",
        "int4": "int4-torchao int4-quanto int4-sdnq uint4-sdnq",
        "fp8": "fp8wo-torchao fp8-quanto fp8uz-quanto fp8-sdnq",
        "fp8-forward": "fp8-torchao",
        "fp8-matmul": "fp8-both-ways",
        "nf4": "nf4-bnb fp4-bnb",
        "no_change": "no none",
    }
)
"""Names of precisions in other trainers, and `fp8-both-ways`, our own earlier name -> `base_model_precision`."""


def precision(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Precisions are named by the stored dtype, not by a library; adamw_bf16 trains all weights in bf16."""
    if value in ("int2-quanto", "int2-sdnq"):
        return Outcome.unsupported("write int4 or nf4; fewer bits are not stored here")
    new = PRECISIONS.get(value, value)
    if new == "no_change" and config.get("model_type") == "full" and config.get("optimizer") == "adamw_bf16":
        new = "bf16"
    if new == value:
        return Outcome.runs(base_model_precision=value)
    library = str(value).rpartition("-")[2]
    unused = library in ("torchao", "quanto", "sdnq")
    return Outcome.translated({"base_model_precision": new}, f"our own {new}; {library} is not used" if unused else "")


def clipping(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Gradients are clipped by norm only: clipping by value, the existing trainer's default, becomes norm 1."""
    method = config.get("grad_clip_method") or (DEFAULTS["grad_clip_method"] if is_theirs(config) else "norm")
    if method == "value" and value:
        return Outcome.differs({"max_grad_norm": 1.0}, f"by norm; there each gradient element is cut at {value}")
    return Outcome.runs(max_grad_norm=value)


def shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A shift of 0 means none in other trainers, which is 1 here; a positive one overrides the automatic shift."""
    if is_theirs(config) and config.get("model_family") == "pixart_sigma":
        return Outcome.ignored("PixArt is no flow model")
    if value == 0 and config.get("flow_schedule_auto_shift"):
        return Outcome.ignored("flow_schedule_auto_shift takes its place")
    if value == 0:
        return Outcome.translated({"flow_schedule_shift": 1.0}, "no shift; null would be the sampler's own")
    return Outcome.runs(flow_schedule_shift=value)


def auto_shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A shift that grows with the resolution: our default, if the model's own sampler has it."""
    if not value:
        return Outcome.ignored("off")
    if config.get("flow_schedule_shift"):
        return Outcome.ignored("flow_schedule_shift is above 0, and wins")
    return Outcome.translated({"flow_schedule_shift": None}, "as the model's own sampler shifts")


def scheduler(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Learning-rate schedules by their names in diffusers; polynomial has other defaults of power and end there."""
    if value == "constant_with_warmup":
        return Outcome.translated({"lr_scheduler": "constant"}, "lr_warmup_steps works with every one")
    if value == "polynomial" and is_theirs(config):
        shape = {"lr_power": there(config, "lr_power"), "lr_end": there(config, "lr_end")}
        return Outcome.translated({"lr_scheduler": value, **shape})
    if value == "sine":
        return Outcome.unsupported("write lr_scheduler: cosine_with_restarts, or cosine")
    if value == "cosine" and is_theirs(config):
        why = "one fall at the last step; there it restarts after as many steps as lr_warmup_steps"
        return Outcome.differs({"lr_scheduler": value}, why)
    return Outcome.runs(lr_scheduler=value)


def layout(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A run writes the diffusers format; `tread export` writes the other layouts of the family."""
    if value in ("diffusers", None):
        return Outcome.ignored("off")
    if value in [name for name, families in LAYOUTS.items() if config.get("model_family") in families]:
        return Outcome.ignored(
            f"a run writes the diffusers format; `tread export RUN --layout {value}` writes this one"
        )
    return Outcome.unsupported("leave it out: adapters of this family are written in the diffusers format")


def only_with(name: str, *schedules: str) -> Rule:
    """The rule of a setting that only these schedules read.

    The existing trainer's configs often set it with other schedules.
    """

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        schedule = str(there(config, "lr_scheduler") if is_theirs(config) else config.get("lr_scheduler"))
        if schedule not in schedules and (is_theirs(config) or value == DEFAULTS[name]):
            return Outcome.ignored(f"lr_scheduler {schedule} does not read it")
        return Outcome.runs(**{name: value})

    return rule


def ema_interval(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The average is updated at every step."""
    if not config.get("use_ema") or value in (None, 1):
        return Outcome.ignored("the average is updated at every step")
    return Outcome.differs({}, f"the average is updated at every step; there every {value} steps")


def routes(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The routes, with a note about the schedule and routed_loss that a fine-tune adds by default."""
    try:
        bare = value is not None and "schedule" not in tread_mapping(value)
    except ConfigError:  # `translate` refuses it
        bare = False
    added = ["a schedule (fewer dropped tokens at first, none in the last steps; schedule: null has none)"] * bare
    if value is not None and "routed_loss" not in config:
        added.append("routed_loss: kept (dropped tokens carry no loss; all: they do)")
    verdict = "differs" if added and is_theirs(config) else "runs"
    text = f"tread adds {' and '.join(added)}" if added else ""
    return Outcome(verdict=verdict, text=text, settings={"tread_config": value})


def dynamo(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Any backend of torch.compile turns `compile` on."""
    return renamed("compile")(value not in OFF, config)


ATTENTION = {"diffusers": "auto", "cudnn": "cudnn"}
ATTENTION |= {f"native-{kernel}": kernel for kernel in ("flash", "efficient", "math")}
"""`attention_mechanism` -> `attention`."""


def attention(value: Any, config: Mapping[str, Any]) -> Outcome:
    """`attention` chooses among torch's kernels; those of other packages are ignored, as they compute the same."""
    name = str(value)
    if name not in ATTENTION and "attention" not in config:
        return Outcome.ignored("speed alone; attention chooses among torch's kernels")
    return renamed("attention")(ATTENTION.get(name), config)


def processes(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The number of processes is an option of `accelerate launch`."""
    return Outcome.ignored(f"start it with: accelerate launch --num_processes {value} -m tread finetune")


def prompts(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The prompts of a library, read from its file by config.py, are added to validation_prompt."""
    if not isinstance(value, Mapping):
        return Outcome.ignored("off")
    given = config.get("validation_prompt") or []
    together = [*(given if isinstance(given, list | tuple) else [given]), *value.values()]
    text = f"validation_prompt: {len(together)} prompts"
    return Outcome(verdict="translated", text=text, settings={"validation_prompt": together})


def prompt(value: Any, config: Mapping[str, Any]) -> Outcome:
    """validation_prompt; if there is a library, `prompts` has already joined the two."""
    if isinstance(config.get("user_prompt_library"), Mapping):
        return Outcome(verdict="runs", text="with those of user_prompt_library")
    return Outcome.runs(validation_prompt=value)


def no_previews(value: Any, config: Mapping[str, Any]) -> Outcome:
    """validation_disable draws no previews; the dense validation loss has its own interval."""
    return Outcome.translated({"validation_steps": 0}) if value else Outcome.ignored("off")


def unless_disabled(rule: Rule) -> Rule:
    """The rule of the preview interval, ignored if validation_disable is set."""
    why = "validation_disable is there, and no previews are drawn"
    return lambda value, config: Outcome.ignored(why) if config.get("validation_disable") else rule(value, config)


def repository(value: Any, config: Mapping[str, Any]) -> Outcome:
    """hub_model_id, ignored unless push_to_hub is set."""
    if not config.get("push_to_hub"):
        return Outcome.ignored("nothing is uploaded, as push_to_hub is off")
    return Outcome.runs(hub_model_id=value)


def targets(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The linears of an adapter, by the suffixes of their names."""
    return renamed("lora_targets")(value, config) if value else Outcome.ignored("off")


def offload(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Options that keep weights in host memory; an integer is the number of layers, any other value means auto."""
    if value in OFF:
        return Outcome.ignored("off")
    if "offload" in config:
        return Outcome.ignored("offload is there too, and is read instead")
    layers = value if type(value) is int else "auto"
    return Outcome.translated({"offload": layers}, "frozen layers in host memory, fetched ahead of use")


def lora_shape(name: str) -> Rule:
    """The rule of rank and alpha, which lycoris_config overrides."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if config.get("lora_type") == "lycoris":
            return Outcome.ignored("lycoris_config has its own")
        return Outcome.runs(**{name: value})

    return rule
