"""Checks before anything is encoded: of the model's files, of the data, and of the run that is resumed.

- A run calls `check_model` first; `prepare` checks the headers of the data before it loads an encoder.
- `tread finetune --check` runs all checks (`look`) and collects their errors. It downloads nothing: a model that is not
  on the disk is listed as not looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from tread.config.schema import plain
from tread.data.captioned.samples import collect
from tread.errors import ConfigError, DataError, masked, shown
from tread.finetune.data.cache import check_cache
from tread.finetune.data.prepare import DTYPES, data_checks
from tread.finetune.families import distilled_risks, open_family
from tread.finetune.family import TuneFamily
from tread.finetune.job import FinetuneJob
from tread.finetune.model import scratch
from tread.finetune.model.adapters import find_linears
from tread.finetune.model.existing import is_local, read_adapter
from tread.finetune.model.quantize import check_precision
from tread.finetune.model.source import Source
from tread.finetune.previews import check_frames, check_image
from tread.finetune.result.hub import check_hub
from tread.finetune.settings import FinetuneConfig
from tread.finetune.target import Adjustments, Target
from tread.routing.risks import warn_once
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.job import CONFIG_FILE, check_folder, saved_settings
from tread.training.sharding.layout import check_layout

FIXED = (
    "model_family",
    "pretrained_model_name_or_path",
    "init",
    "transformer",
    "model_type",
    "lora_type",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lokr_factor",
    "lycoris_config",
    "use_dora",
    "experts",
    "sound",
    "optimizer",
)
"""Settings that decide which weights are trained, what they mean, and what the optimizer keeps of them; they cannot
change on resume."""

T = TypeVar("T")


class Findings(NamedTuple):
    """Errors that a run would raise, and the parts that could not be checked."""

    problems: list[str]
    unseen: list[str]


def look(config: FinetuneConfig) -> Findings:
    """All errors that a run of this config would raise before it trains."""
    found = Findings([], [])

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except (ConfigError, DataError) as error:
            found.problems.append(str(error))
            return None

    family, name_or_path = None, config.pretrained_model_name_or_path
    if is_here(name_or_path, config.revision):
        family = attempt(lambda: open_model(config))
    else:
        found.unseen.append(f"the model {shown(name_or_path)} is not on this disk: a run downloads it first")
    checks: list[Callable[[], object]] = []
    if family is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        adapter = config.init_lora
        if adapter is not None and not is_local(adapter):
            found.unseen.append(f"the adapter init_lora {shown(adapter)} is not on this disk: a run downloads it first")
            config = replace(config, init_lora=None)
        checks += [*_of_model(config, family, device), *_of_encoders(family)]
    layout = FinetuneJob.of(config)
    for check in (
        lambda: check_layout(layout),
        lambda: check_folder(layout),
        lambda: check_cache(config.cache_dir),
        *checks,
        lambda: check_resumed(config),
        lambda: _check_data(config, family),
    ):
        attempt(check)
    return found


def source_of(config: FinetuneConfig) -> Source:
    """The base model of a config, with the changes to its transformer."""
    name_or_path = config.pretrained_model_name_or_path
    return Source(name_or_path, revision=config.revision, variant=config.variant, changes=config.transformer)


def open_model(config: FinetuneConfig) -> TuneFamily:
    """The family of a config's model; refuses what its config files already rule out."""
    source = source_of(config)
    family = open_family(
        config.model_family,
        source,
        config.tokenizer_max_length,
        first_frame=config.first_frame,
        frame_rate=config.framerate,
        sound=config.sound == "train",
    )
    warn_once(distilled_risks(family), set())
    if (plan := config.plan()) is not None and source.depth:
        plan.resolve(source.depth)  # refuses windows outside the model
    return family


def check_model(config: FinetuneConfig, family: TuneFamily, device: torch.device) -> None:
    """Raise the first error about the model of a run on `device`."""
    for check in (*_of_model(config, family, device), lambda: check_resumed(config)):
        check()


def trained_experts(config: FinetuneConfig, family: TuneFamily) -> tuple[tuple[str, float, float], ...]:
    """The transformers that a config trains, each with its range of times."""
    return family.experts[{"both": slice(None), "high": slice(0, 1), "low": slice(1, 2)}[config.experts]]


def target_of(config: FinetuneConfig, family: TuneFamily) -> Target:
    """The training target of a config's model; refuses loss settings that it does not support."""
    adjustments = Adjustments(
        density=config.density(),
        tokens=config.flow_shift_tokens,
        weighting=config.loss_weighting,
        snr_gamma=config.snr_gamma,
    )
    return family.target(shift=config.flow_schedule_shift, distance=config.loss_type).adjusted(adjustments)


def check_batch(config: FinetuneConfig, family: TuneFamily) -> None:
    """Refuse a batch size above 1 for a model that takes one sample at a time, or that would read padding."""
    if family.one_sample and config.train_batch_size > 1:
        raise ConfigError(
            f"train_batch_size is {config.train_batch_size}, but the model of {family.name} reads one sample at a "
            "time: set it to 1 and raise gradient_accumulation_steps."
        )
    if family.one_length and config.train_batch_size > 1:
        raise ConfigError(
            f"train_batch_size is {config.train_batch_size}, but the model of {family.name} would read the padding of "
            "captions that share a batch: set it to 1 and raise gradient_accumulation_steps."
        )


def check_tiling(config: FinetuneConfig, family: TuneFamily) -> None:
    """Refuse tiles of an AutoencoderTiny whose latents have other than the 4 channels that diffusers writes them in."""
    if not config.vae_enable_tiling or "vae" not in family.pixel_parts:
        return
    vae = family.source.config("vae")
    channels = vae.get("latent_channels", 4)
    if vae.get("_class_name") == "AutoencoderTiny" and channels != 4:
        raise ConfigError(
            "vae_enable_tiling is true, but diffusers' AutoencoderTiny tiles latents of 4 channels alone, and this one "
            f"has {channels}: set it to false; such an autoencoder needs little memory."
        )


def check_dtypes(config: FinetuneConfig, family: TuneFamily) -> None:
    """Refuse float32 weights under autocast for a model whose stock forward then mixes dtypes."""
    low = torch.cuda.is_available() or config.base_model_precision == "bf16"
    autocast = config.mixed_precision == "bf16" or (config.mixed_precision == "auto" and low)
    if family.one_dtype and autocast and job_dtype(replace(config, mixed_precision="bf16")) == torch.float32:
        raise ConfigError(
            f"mixed_precision is bf16 and the weights of {family.name} are float32, which its stock model cannot mix: "
            "set mixed_precision to 'no', or train a LoRA on a base in bf16 (base_model_precision no_change)."
        )


def job_dtype(config: FinetuneConfig) -> torch.dtype:
    """dtype of the loaded weights: frozen ones in the compute dtype, trained ones in float32.

    bfloat16 would round small optimizer steps away.
    """
    if config.base_model_precision in DTYPES:
        return DTYPES[config.base_model_precision]
    return torch.bfloat16 if config.adapts and config.mixed_precision == "bf16" else torch.float32


def check_resumed(config: FinetuneConfig) -> None:
    """Refuse to resume a run whose trained weights have other names or shapes, or are of another base or scale."""
    folder = FinetuneJob.of(config).resumed
    if folder is None or not (folder / CONFIG_FILE).is_file() or not resumed_checkpoints(config):
        return
    before, now = saved_settings(folder), masked(plain(config))
    for name in FIXED:
        if name in before and (old := _effect(before, name)) != (new := _effect(now, name)):
            raise ConfigError(
                f"{name} is {shown(new)}, but the run in {folder} trains with {shown(old)}: set it back, or name "
                "another output_dir and begin anew."
            )


def _effect(settings: Mapping[str, Any], name: str) -> Any:
    """What a setting amounts to: the base may have moved to another folder, and no lora_alpha is that of the rank."""
    value = settings[name]
    if name == "pretrained_model_name_or_path":
        return Path(value).name
    return settings["lora_rank"] if name == "lora_alpha" and value is None else value


def resumed_checkpoints(config: FinetuneConfig) -> list[Path]:
    """The checkpoints of the run that a config resumes; empty for a new run."""
    folder = FinetuneJob.of(config).resumed
    return [] if folder is None else list_checkpoints(folder / CHECKPOINTS)


def is_here(name_or_path: str, revision: str | None) -> bool:
    """Whether a model is a folder, or its index is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name_or_path).exists():
        return True
    try:
        return isinstance(try_to_load_from_cache(name_or_path, "model_index.json", revision=revision), str)
    except HFValidationError:  # not a hub id but a path that does not exist: `Source` refuses it
        return True


def _of_model(config: FinetuneConfig, family: TuneFamily, device: torch.device) -> Iterator[Callable[[], object]]:
    yield lambda: target_of(config, family)
    if config.push_to_hub:
        yield lambda: check_hub(config)
    yield lambda: check_image(config, family)
    yield lambda: check_frames(config, family)
    yield lambda: check_batch(config, family)
    yield lambda: check_dtypes(config, family)
    yield lambda: check_tiling(config, family)
    if config.quantized:
        yield lambda: check_precision(config.base_model_precision, device)
    trained = {part for part, _, _ in trained_experts(config, family)}
    for part, _, _ in family.experts:
        if part in trained or config.prompts:  # previews need the untrained expert too
            yield lambda part=part: _check_transformer(config, family, part, trained=part in trained)


def _of_encoders(family: TuneFamily) -> Iterator[Callable[[], object]]:
    for part in dict.fromkeys((*family.text_parts, *family.pixel_parts)):
        yield lambda part=part: family.source.check(part)


def _check_transformer(config: FinetuneConfig, family: TuneFamily, part: str, *, trained: bool) -> None:
    """Refuse weight files with missing tensors, and lora_targets that match no linear."""
    if config.init == "scratch":
        scratch.check(family.source, part)
        return
    model: nn.Module = family.source.check(part)[part]
    by_preset = config.lora_type == "lycoris" and "apply_preset" in (config.lycoris_config or {})
    if trained and config.adapts and not by_preset:
        find_linears(model, config.lora_targets or family.lora_targets)
    if trained and config.init_lora is not None and not resumed_checkpoints(config):
        read_adapter(config, family, part, model)


def _check_data(config: FinetuneConfig, family: TuneFamily | None) -> None:
    """Check the data of a config by the headers of its files."""
    configs = config.entries()
    video = any(one.dataset_type == "video" for one in configs) if family is None else family.video
    collected = collect(configs, video=video, say=lambda _: None)
    for check in data_checks(family, collected.samples, configs):
        check()
