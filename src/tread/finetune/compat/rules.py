"""How the keys and values of the existing trainer become settings of `FinetuneConfig`.

- A rule takes a value and the whole config, and gives an outcome: what happens to the key, and our settings for it.
- Most rules are made by one of four words: `ignored`, `renamed`, `reworded`, `unless_off`; the rest are functions.
- Which key has which rule is in `compat_keys.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tread.finetune.families import TUNE_FAMILIES

Kind = Literal["runs", "translated", "ignored", "unsupported"]
OFF = (None, False, 0, "", "none", "no", [], {})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one key, and the settings of ours that it gives."""

    kind: Kind
    text: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Any, Mapping[str, Any]], Outcome]
"""The value of a key and the whole config -> its outcome."""


def ignored(why: str) -> Rule:
    """A key that changes nothing that is learned."""
    return lambda value, config: Outcome(kind="ignored", text=why)


def unless_off(instead: str, off: tuple[Any, ...] = OFF) -> Rule:
    """A key that is harmless while switched off, and not supported otherwise."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        return Outcome(kind="ignored", text="off") if value in off else Outcome(kind="unsupported", text=instead)

    return rule


def renamed(name: str) -> Rule:
    """A key with another name here."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if name in config:
            return Outcome(kind="ignored", text=f"{name} is there too, and is read instead")
        return Outcome(kind="translated", text=f"{name}: {value}", settings={name: value})

    return rule


def reworded(name: str, values: Mapping[Any, Any], refused: Mapping[Any, str] | None = None) -> Rule:
    """A field some of whose values have other names here, or are refused with advice."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        key = value if isinstance(value, str | int | None) else repr(value)
        if refused and key in refused:
            return Outcome(kind="unsupported", text=refused[key])
        if key in values:
            return Outcome(kind="translated", text=f"{name}: {values[key]}", settings={name: values[key]})
        return Outcome(kind="runs", settings={name: value})

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
    "sd3": {
        "medium": "stabilityai/stable-diffusion-3.5-medium",
        "large": "stabilityai/stable-diffusion-3.5-large",
    },
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
"""`model_flavour` -> the model it names, for configs that leave pretrained_model_name_or_path to it."""


def family(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A family that can be tuned, or where else to train it."""
    if value in TUNE_FAMILIES:
        return Outcome(kind="runs", settings={"model_family": value})
    text = (
        f"tread finetune has {', '.join(TUNE_FAMILIES)}; other transformers train in a script of yours with "
        "tread.attach (docs/attach.md; `tread families` lists them)"
    )
    return Outcome(kind="unsupported", text=text)


def flavour(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The flavour names the model where no path does, and an expert of Wan 2.2."""
    models = MODELS.get(str(config.get("model_family")), {})
    settings: dict[str, Any] = {}
    if config.get("model_family") == "wan" and str(value).endswith(("-high", "-low")) and "experts" not in config:
        settings["experts"] = str(value).rpartition("-")[2]
    if config.get("pretrained_model_name_or_path") is None and value is not None:
        if value not in models:
            known = f" ({', '.join(models)} are known)" if models else ""
            return Outcome(kind="unsupported", text=f"write pretrained_model_name_or_path instead{known}")
        settings["pretrained_model_name_or_path"] = models[value]
    if not settings:
        return Outcome(kind="ignored", text="the model itself says what it is")
    return Outcome(kind="translated", text=settings_text(settings), settings=settings)


def steps(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Steps give way to epochs."""
    if value and config.get("num_train_epochs"):
        return Outcome(kind="ignored", text="num_train_epochs takes its place; set that to 0 to train by steps")
    return Outcome(kind="runs", settings={"max_train_steps": value})


def optimizer(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Optimizers by what they compute, whichever library did."""
    if value in ("adamw_bf16", "adamw-bf16") and config.get("model_type", "lora") == "lora":
        text = "optimizer: adamw (an adapter's weights are float32)"
        return Outcome(kind="translated", text=text, settings={"optimizer": "adamw"})
    if value in OPTIMIZERS:
        settings = {"optimizer": OPTIMIZERS[value]}
        if value == "adamw_bf16" and "base_model_precision" not in config:
            settings["base_model_precision"] = "bf16"
        return Outcome(kind="translated", text=settings_text(settings), settings=settings)
    if any(word in str(value) for word in ("prodigy", "dadapt", "schedulefree", "soap", "stable", "came", "muon")):
        return Outcome(kind="unsupported", text="write optimizer: adamw, with learning_rate 1e-4 for a LoRA")
    return Outcome(kind="runs", settings={"optimizer": value})


def precision(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Libraries by what they store; weights that adamw_bf16 trains are bf16."""
    if value in ("int2-quanto", "int2-sdnq"):
        return Outcome(kind="unsupported", text="write int4-torchao, or nf4-bnb")
    new = PRECISIONS.get(value, value)
    if new == "no_change" and config.get("model_type") == "full" and config.get("optimizer") == "adamw_bf16":
        new = "bf16"
    if new == value:
        return Outcome(kind="runs", settings={"base_model_precision": value})
    settings = {"base_model_precision": new}
    return Outcome(kind="translated", text=settings_text(settings), settings=settings)


OPTIMIZERS = {
    "adamw_bf16": "adamw-bf16",
    "torch-adamw": "adamw",
    "optimi-adamw": "adamw",
    "bnb-adamw": "adamw",
    "bnb-adamw-paged": "adamw",
    "bnb-adamw8bit": "adamw-8bit",
    "bnb-adamw8bit-paged": "adamw-8bit",
    "ao-adamw8bit": "adamw-8bit",
    "torch-adafactor": "adafactor",
    "optimi-lion": "lion",
    "bnb-lion": "lion",
    "bnb-lion-paged": "lion",
    "bnb-lion8bit": "lion-8bit",
    "bnb-lion8bit-paged": "lion-8bit",
}
PRECISIONS = {
    "int8-sdnq": "int8-torchao",
    "int4-sdnq": "int4-torchao",
    "uint4-sdnq": "int4-torchao",
    "fp8-sdnq": "fp8wo-torchao",
    "fp4-bnb": "nf4-bnb",
    "fp8uz-quanto": "fp8-quanto",
    "no": "no_change",
    "none": "no_change",
}


def clipping(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Clipping by value has no equal here."""
    if config.get("grad_clip_method") == "value" and value:
        text = "max_grad_norm: 1.0 (a limit by value says nothing of the norm)"
        return Outcome(kind="translated", text=text, settings={"max_grad_norm": 1.0})
    return Outcome(kind="runs", settings={"max_grad_norm": value})


def shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """0 is no shift there; a shift by resolution is what samplers of such models do."""
    if config.get("flow_schedule_auto_shift"):
        return Outcome(kind="ignored", text="flow_schedule_auto_shift takes its place")
    if value == 0:
        text = "flow_schedule_shift: 1 (no shift; null would be the sampler's own)"
        return Outcome(kind="translated", text=text, settings={"flow_schedule_shift": 1.0})
    return Outcome(kind="runs", settings={"flow_schedule_shift": value})


def auto_shift(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The samplers of models that were trained so do the same."""
    if not value:
        return Outcome(kind="ignored", text="off")
    text = "flow_schedule_shift: null (as the model's own sampler shifts)"
    return Outcome(kind="translated", text=text, settings={"flow_schedule_shift": None})


def scheduler(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Decays under the names of diffusers."""
    same = {"constant_with_warmup": "constant"}
    if config.get("lr_power", 1) == 1:
        same["polynomial"] = "linear"
    if config.get("lr_num_cycles", 1) == 1:
        same["cosine_with_restarts"] = "cosine"
    if value in same:
        text = f"lr_scheduler: {same[value]} (lr_warmup_steps works with every one)"
        return Outcome(kind="translated", text=text, settings={"lr_scheduler": same[value]})
    if value in ("polynomial", "cosine_with_restarts", "sine"):
        return Outcome(kind="unsupported", text="write lr_scheduler: cosine, or linear")
    return Outcome(kind="runs", settings={"lr_scheduler": value})


def dynamo(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Any backend means: compile."""
    if "compile" in config:
        return Outcome(kind="ignored", text="compile is there too, and is read instead")
    settings = {"compile": value not in OFF}
    return Outcome(kind="translated", text=settings_text(settings), settings=settings)


ATTENTION = {
    "diffusers": "auto",
    "native-flash": "flash",
    "native-efficient": "efficient",
    "native-math": "math",
    "cudnn": "cudnn",
}


def attention(value: Any, config: Mapping[str, Any]) -> Outcome:
    """Torch's own kernels; those of other packages compute the same."""
    if "attention" in config:
        return Outcome(kind="ignored", text="attention is there too, and is read instead")
    if value not in ATTENTION:
        return Outcome(kind="ignored", text="speed alone; attention chooses among torch's kernels")
    settings = {"attention": ATTENTION[value]}
    return Outcome(kind="translated", text=settings_text(settings), settings=settings)


def processes(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The launcher decides."""
    return Outcome(kind="ignored", text=f"start it with: accelerate launch --num_processes {value} -m tread finetune")


def prompts(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A library of prompts, read from its file by config.py, joins the validation prompts."""
    if not isinstance(value, Mapping):
        return Outcome(kind="ignored", text="off")
    given = config.get("validation_prompt") or []
    together = [*([given] if isinstance(given, str) else given), *value.values()]
    text = f"validation_prompt: {len(together)} prompts"
    return Outcome(kind="translated", text=text, settings={"validation_prompt": together})


def prompt(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The prompt, unless `prompts` has it."""
    if isinstance(config.get("user_prompt_library"), Mapping):
        return Outcome(kind="runs", text="with those of user_prompt_library")
    return Outcome(kind="runs", settings={"validation_prompt": value})


def lora_shape(name: str) -> Rule:
    """Rank and alpha stand in lycoris_config where that is used."""

    def rule(value: Any, config: Mapping[str, Any]) -> Outcome:
        if config.get("lora_type") == "lycoris":
            return Outcome(kind="ignored", text="lycoris_config has its own")
        return Outcome(kind="runs", settings={name: value})

    return rule


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def columns(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """Columns may stand in a mapping of their own."""
    if not isinstance(value, Mapping):
        return Outcome(kind="unsupported", text="write image_column, caption_column and split in the entry itself")
    known = ("image_column", "caption_column", "split")
    if others := [key for key in value if key not in known]:
        text = f"{', '.join(others)}: choose the rows before, in a dataset of your own; write the rest in the entry"
        return Outcome(kind="unsupported", text=text)
    settings = {key: value[key] for key in value if key not in entry}
    return Outcome(kind="translated", text=settings_text(settings), settings=settings)


def video(value: Any, entry: Mapping[str, Any]) -> Outcome:
    """Frames are counted; what the model decides is left out."""
    decided = ("is_i2v", "bucket_strategy", "frame_interval")
    if not isinstance(value, Mapping) or not (left := [key for key in decided if key in value]):
        return Outcome(kind="runs", settings={"video": value})
    kept = {key: item for key, item in value.items() if key not in decided}
    text = f"video without {', '.join(left)}: the model decides, and clips have as many frames as it takes"
    return Outcome(kind="translated", text=text, settings={"video": kept})
