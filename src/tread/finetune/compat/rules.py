"""Rules that turn keys and values of other trainers into settings of `FinetuneConfig`; `keys` assigns them to keys.

- A rule takes the value of a key and the whole config, and returns an `Outcome`: the verdict, a text that explains it,
  and our settings.
- Four functions make most rules: `ignored`, `renamed`, `reworded` and `unless_off`. The rest are written out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tread.finetune.families import TUNE_FAMILIES

Verdict = Literal["runs", "translated", "ignored", "unsupported"]
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
        """The value is worded otherwise here; the text names our settings, and `why` follows in brackets."""
        text = ", ".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in settings.items()
        )
        return cls(verdict="translated", text=f"{text} ({why})" if why else text, settings=dict(settings))

    @classmethod
    def ignored(cls, why: str) -> Self:
        """The key changes nothing that is learned."""
        return cls(verdict="ignored", text=why)

    @classmethod
    def unsupported(cls, instead: str) -> Self:
        """The config cannot run with this value; the text says what to write instead."""
        return cls(verdict="unsupported", text=instead)


Rule = Callable[[Any, Mapping[str, Any]], Outcome]
"""The value of a key and the whole config -> the outcome."""


def ignored(why: str) -> Rule:
    """The rule of a key that changes nothing that is learned."""
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
    """The rule of a field: some `values` have another name here, some are `refused` with advice, others run."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        key = value if isinstance(value, str | int | None) else repr(value)
        if refused and key in refused:
            return Outcome.unsupported(refused[key])
        return Outcome.translated({name: values[key]}) if key in values else Outcome.runs(**{name: value})

    return rule


MODELS: dict[str, dict[str, str]] = {
    "auraflow": {"v0.3": "fal/AuraFlow-v0.3", "v0.2": "fal/AuraFlow-v0.2"},
    "flux": {
        "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    },
    "lumina2": {"2.0": "Alpha-VLLM/Lumina-Image-2.0"},
    "pixart_sigma": {"1024-ms": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"},
    "qwen_image": {"v1.0": "Qwen/Qwen-Image"},
    "sd3": {"medium": "stabilityai/stable-diffusion-3.5-medium", "large": "stabilityai/stable-diffusion-3.5-large"},
    "wan": {
        "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "i2v-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "t2v-14b-2.2-high": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "t2v-14b-2.2-low": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "i2v-14b-2.2-high": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "i2v-14b-2.2-low": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    },
}
"""Family -> `model_flavour` -> the id on the hub, for configs without pretrained_model_name_or_path."""


def family(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A family that `tread finetune` has, or where else to train it."""
    if value in TUNE_FAMILIES:
        return Outcome.runs(model_family=value)
    return Outcome.unsupported(
        f"tread finetune has {', '.join(TUNE_FAMILIES)}; other transformers train in a script of yours with "
        "tread.attach (docs/attach.md; `tread families` lists them)"
    )


def flavour(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The flavour names the model if no path does, and the expert of Wan 2.2 that is trained."""
    models = MODELS.get(str(config.get("model_family")), {})
    settings: dict[str, Any] = {}
    if config.get("model_family") == "wan" and str(value).endswith(("-high", "-low")) and "experts" not in config:
        settings["experts"] = str(value).rpartition("-")[2]
    if config.get("pretrained_model_name_or_path") is None and value is not None:
        if str(value) not in models:  # a flavour such as 2.0 may have been read as a number
            known = f" ({', '.join(models)} are known)" if models else ""
            return Outcome.unsupported(f"write pretrained_model_name_or_path instead{known}")
        settings["pretrained_model_name_or_path"] = models[str(value)]
    return Outcome.translated(settings) if settings else Outcome.ignored("the flavour is read from the model itself")


def steps(value: Any, config: Mapping[str, Any]) -> Outcome:
    """max_train_steps is ignored if num_train_epochs is set."""
    if value and config.get("num_train_epochs"):
        return Outcome.ignored("num_train_epochs takes its place; set that to 0 to train by steps")
    return Outcome.runs(max_train_steps=value)


def _by_word(ours: Mapping[str, str]) -> dict[str, str]:
    """Our word for each word of others, from their words for each of ours."""
    return {word: own for own, words in ours.items() for word in words.split()}


OPTIMIZERS = _by_word(
    {
        "adamw-bf16": "adamw_bf16",
        "adamw": "torch-adamw optimi-adamw bnb-adamw bnb-adamw-paged",
        "adamw-8bit": "bnb-adamw8bit bnb-adamw8bit-paged ao-adamw8bit",
        "adafactor": "torch-adafactor",
        "lion": "optimi-lion bnb-lion bnb-lion-paged",
        "lion-8bit": "bnb-lion8bit bnb-lion8bit-paged",
    }
)
"""Names of optimizers in other trainers -> `optimizer`."""


def optimizer(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Optimizers are named by their update rule, not by the library that computes it."""
    if value in ("adamw_bf16", "adamw-bf16") and config.get("model_type", "lora") == "lora":
        return Outcome.translated({"optimizer": "adamw"}, "an adapter's weights are float32")
    if value in OPTIMIZERS:
        settings = {"optimizer": OPTIMIZERS[value]}
        if value == "adamw_bf16" and "base_model_precision" not in config:
            settings["base_model_precision"] = "bf16"
        return Outcome.translated(settings)
    if any(word in str(value) for word in ("prodigy", "dadapt", "schedulefree", "soap", "stable", "came", "muon")):
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
    """Precisions are named by what is stored, not by a library; the weights that adamw_bf16 trains are bf16."""
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
    """Clipping by value does not exist here; clipping by norm 1 takes its place."""
    if config.get("grad_clip_method") == "value" and value:
        return Outcome.translated({"max_grad_norm": 1.0}, "gradients are clipped by norm, not by value")
    return Outcome.runs(max_grad_norm=value)


def shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A shift of 0 means none in other trainers, which is 1 here."""
    if config.get("flow_schedule_auto_shift"):
        return Outcome.ignored("flow_schedule_auto_shift takes its place")
    if value == 0:
        return Outcome.translated({"flow_schedule_shift": 1.0}, "no shift; null would be the sampler's own")
    return Outcome.runs(flow_schedule_shift=value)


def auto_shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A shift that grows with the resolution is what the sampler of such a model does, our default."""
    if not value:
        return Outcome.ignored("off")
    return Outcome.translated({"flow_schedule_shift": None}, "as the model's own sampler shifts")


def scheduler(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Schedules of the learning rate under their names in diffusers."""
    same = {"constant_with_warmup": "constant"}
    if config.get("lr_power", 1) == 1:
        same["polynomial"] = "linear"
    if config.get("lr_num_cycles", 1) == 1:
        same["cosine_with_restarts"] = "cosine"
    if value in same:
        return Outcome.translated({"lr_scheduler": same[value]}, "lr_warmup_steps works with every one")
    if value in ("polynomial", "cosine_with_restarts", "sine"):
        return Outcome.unsupported("write lr_scheduler: cosine, or linear")
    return Outcome.runs(lr_scheduler=value)


def dynamo(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Any backend of torch.compile turns `compile` on."""
    return renamed("compile")(value not in OFF, config)


ATTENTION = {"diffusers": "auto", "cudnn": "cudnn"}
ATTENTION |= {f"native-{kernel}": kernel for kernel in ("flash", "efficient", "math")}
"""`attention_mechanism` -> `attention`."""


def attention(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Kernels of torch are chosen by `attention`; those of other packages compute the same and are ignored."""
    name = str(value)
    if name not in ATTENTION and "attention" not in config:
        return Outcome.ignored("speed alone; attention chooses among torch's kernels")
    return renamed("attention")(ATTENTION.get(name), config)


def processes(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The number of processes is an option of `accelerate launch`."""
    return Outcome.ignored(f"start it with: accelerate launch --num_processes {value} -m tread finetune")


def prompts(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The prompts of a library, which config.py has read from its file, join those of validation_prompt."""
    if not isinstance(value, Mapping):
        return Outcome.ignored("off")
    given = config.get("validation_prompt") or []
    together = [*(given if isinstance(given, list | tuple) else [given]), *value.values()]
    text = f"validation_prompt: {len(together)} prompts"
    return Outcome(verdict="translated", text=text, settings={"validation_prompt": together})


def prompt(value: Any, config: Mapping[str, Any]) -> Outcome:
    """validation_prompt, which `prompts` has already read if there is a library."""
    if isinstance(config.get("user_prompt_library"), Mapping):
        return Outcome(verdict="runs", text="with those of user_prompt_library")
    return Outcome.runs(validation_prompt=value)


def lora_shape(name: str) -> Rule:
    """The rule of rank and alpha, which lycoris_config replaces by its own."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if config.get("lora_type") == "lycoris":
            return Outcome.ignored("lycoris_config has its own")
        return Outcome.runs(**{name: value})

    return rule


def columns(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """The names of columns, which other trainers nest in a data entry, move into the entry itself."""
    if not isinstance(value, Mapping):
        return Outcome.unsupported("write image_column, caption_column and split in the entry itself")
    known = ("image_column", "caption_column", "split")
    if others := [key for key in value if key not in known]:
        return Outcome.unsupported(
            f"{', '.join(others)}: choose the rows before, in a dataset of your own; write the rest in the entry"
        )
    return Outcome.translated({key: value[key] for key in value if key not in entry})


def video(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """The settings of clips, without those that the model decides."""
    decided = ("is_i2v", "bucket_strategy", "frame_interval")
    if not isinstance(value, Mapping) or not (left := [key for key in decided if key in value]):
        return Outcome.runs(video=value)
    kept = {key: item for key, item in value.items() if key not in decided}
    text = f"video without {', '.join(left)}: the model decides, and clips have as many frames as it takes"
    return Outcome(verdict="translated", text=text, settings={"video": kept})
