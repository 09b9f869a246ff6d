"""Checks across the settings of a fine-tune, each with a sentence that names the setting to change.

Checks that need the model or the data are in `preflight.py` and `data/prepare.py`.
"""

from typing import TYPE_CHECKING

from tread.config.schema import at_least
from tread.data.captioned.entries import LONGEST
from tread.errors import ConfigError, nearest, shown
from tread.finetune.families import TUNE_FAMILIES
from tread.training.settings import check_rates, check_timeout

if TYPE_CHECKING:
    from tread.finetune.settings import FinetuneConfig

BITSANDBYTES = ("int8-bnb", "nf4")
RATES = {
    "name": "optimizer",
    "learning_rate": "learning_rate",
    "schedule": "lr_scheduler",
    "end_rate": "lr_end",
    "power": "lr_power",
    "cycles": "lr_num_cycles",
    "beta1": "adam_beta1",
}
"""Learning-rate settings: the training loop's name -> the key of `FinetuneConfig`."""


def check_settings(config: "FinetuneConfig") -> None:
    """Refuse settings that are out of bounds or contradict each other."""
    if config.model_family not in TUNE_FAMILIES:
        raise ConfigError(
            f"model_family is {config.model_family!r}{nearest(config.model_family, TUNE_FAMILIES)} "
            f"Choose one of: {', '.join(TUNE_FAMILIES)}; other transformers train in a script of yours with "
            "tread.attach (docs/attach.md)."
        )
    _check_bounds(config)
    _check_init(config)
    _check_adapter(config)
    _check_sharded(config)
    _check_offload(config)
    check_rates(**{name: getattr(config, key) for name, key in RATES.items()}, called=RATES)
    if config.max_train_steps == 0 and config.num_train_epochs == 0:
        raise ConfigError("max_train_steps and num_train_epochs are both 0; set one of them to at least 1.")
    if config.experts != "both" and config.model_family != "wan":
        raise ConfigError(f"experts is {config.experts!r}, but only wan has two transformers; leave it out.")
    if any(len(prompt) > LONGEST for prompt in (*config.prompts, config.validation_negative_prompt)):
        raise ConfigError(f"validation_prompt has more than {LONGEST} characters; write a shorter one.")
    if not config.data:
        raise ConfigError("data is empty; give a folder of images or videos with captions (docs/data.md).")
    if config.validation_size is not None and min(config.validation_size) < 1:
        raise ConfigError(f"validation_resolution is {config.validation_resolution!r}; both sides must be positive.")
    config.density()
    config.plan()


def _check_bounds(config: "FinetuneConfig") -> None:
    at_least(
        config, "", lora_rank=1, lora_alpha=0, max_train_steps=0, num_train_epochs=0, train_batch_size=1,
        gradient_accumulation_steps=1, seed=0, learning_rate=0, lr_warmup_steps=0, lr_end=0, lr_num_cycles=1,
        adam_weight_decay=0, max_grad_norm=0, vae_batch_size=1, text_encoder_batch_size=1, tokenizer_max_length=1,
        dataloader_num_workers=0, checkpoint_step_interval=1, checkpoints_total_limit=1, shard_size=1,
        num_eval_images=0, eval_steps_interval=0,
        validation_steps=0, validation_num_inference_steps=1, validation_guidance=0, validation_seed=0,
        validation_num_video_frames=1, framerate=1, logging_steps=1, minimum_image_size=0,
        noise_offset=0, flow_shift_tokens=1,
    )  # fmt: skip
    check_timeout(config.timeout_minutes, "timeout_minutes")
    for name in ("caption_dropout_probability", "lora_dropout", "adam_beta1", "adam_beta2", "ema_decay"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; allowed is 0 <= value < 1.")
    if config.lora_alpha == 0:
        raise ConfigError("lora_alpha is 0, which scales the adapter to nothing: leave it out for lora_rank.")
    for name in ("output_dir", "cache_dir"):
        if not getattr(config, name).strip():
            raise ConfigError(f"{name} is empty; name a folder, or write '.' for the working directory.")
    if not 0 <= config.noise_offset_probability <= 1:
        raise ConfigError(f"noise_offset_probability is {config.noise_offset_probability}; allowed is 0 to 1.")
    for name in ("flow_schedule_shift", "resolution", "adam_epsilon", "snr_gamma"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value}; it must be above 0, or left out.")


def _check_init(config: "FinetuneConfig") -> None:
    if config.transformer is not None and config.init != "scratch":
        raise ConfigError(
            f"transformer is {shown(config.transformer)}, but init is {config.init!r}, and released weights have the "
            "sizes they have: set init to 'scratch', or leave transformer out."
        )
    if config.init == "scratch" and config.adapts:
        raise ConfigError(
            "init is 'scratch' and model_type 'lora', but an adapter needs a trained base: set model_type to 'full'."
        )


def _check_sharded(config: "FinetuneConfig") -> None:
    if not config.sharded:
        return
    if config.base_model_precision in BITSANDBYTES:
        raise ConfigError(
            f"base_model_precision is {config.base_model_precision!r}, whose packed weights torch cannot shard: with "
            f"parallel {config.parallel!r} use 'int8', 'int4' or 'fp8', which stay whole on each GPU, or set "
            "parallel to 'ddp'."
        )
    if config.lora_type == "lycoris" and config.adapts:
        raise ConfigError(
            f"lora_type is 'lycoris', whose network reads weights outside of the layer that gathers them: with "
            f"parallel {config.parallel!r} use 'standard' or 'lokr', or set parallel to 'ddp'."
        )


def _check_offload(config: "FinetuneConfig") -> None:
    if not config.offloads:
        return
    given = f"offload is {config.offload!r}"
    if isinstance(config.offload, int) and config.offload < 0:
        raise ConfigError(f"{given}; give a number of layers, 'auto' or 'none'.")
    if not config.adapts:
        raise ConfigError(
            f"{given}, but model_type is 'full', and only frozen weights can wait in host memory: set model_type to "
            "'lora', or parallel to 'fsdp' with cpu_offload."
        )
    if config.sharded:
        raise ConfigError(
            f"{given} and parallel is {config.parallel!r}, which moves the weights itself: set parallel to 'ddp', or "
            "offload to 'none' and cpu_offload to true."
        )
    if config.base_model_precision == "int8-bnb":
        raise ConfigError(
            f"{given} and base_model_precision is 'int8-bnb', which keeps weights where they cannot be moved: use "
            "'int8', or 'nf4'."
        )
    if config.lora_type == "lycoris":
        raise ConfigError(
            f"{given} and lora_type is 'lycoris', whose weights are not in the layers: use 'standard' or 'lokr', or "
            "set offload to 'none'."
        )


def _check_adapter(config: "FinetuneConfig") -> None:
    if not config.adapts and config.quantized:
        raise ConfigError(
            f"base_model_precision is {config.base_model_precision!r}, but model_type is 'full', and quantized "
            "weights cannot be trained: set base_model_precision to 'no_change', or model_type to 'lora'."
        )
    if config.base_model_precision == "bf16" and config.mixed_precision == "no":
        raise ConfigError(
            "base_model_precision is 'bf16' and mixed_precision is 'no', which would multiply bf16 weights with "
            "float32 activations: set mixed_precision to 'bf16', or leave base_model_precision out for float32 "
            "weights."
        )
    if config.lokr_factor < 1 and config.lokr_factor != -1:
        raise ConfigError(f"lokr_factor is {config.lokr_factor}; it must be at least 1, or -1 for the most square one.")
    if (config.lora_type == "lycoris") != (config.lycoris_config is not None):
        raise ConfigError(
            f"lora_type is {config.lora_type!r} and lycoris_config is {config.lycoris_config!r}: lora_type 'lycoris' "
            "needs a lycoris_config, and nothing else reads one. For LoKr, set lora_type to 'lokr' and lokr_factor."
        )
    if config.lora_type == "lokr" and config.base_model_precision == "nf4":
        raise ConfigError(
            "base_model_precision is 'nf4' and lora_type is 'lokr', which peft cannot combine: set "
            "base_model_precision to 'int4', or lora_type to 'standard'."
        )
    kind = f"lora_type is {config.lora_type!r}" if config.adapts else "model_type is 'full'"
    if config.use_dora and (not config.adapts or config.lora_type != "standard"):
        raise ConfigError(
            f"use_dora is true, but {kind}, and DoRA is a LoRA: set model_type to 'lora' and lora_type to "
            "'standard', or leave use_dora out."
        )
    if config.init_lora is not None and (not config.adapts or config.lora_type == "lycoris"):
        raise ConfigError(
            f"init_lora is {shown(config.init_lora)}, but {kind}: only lora_type 'standard' and 'lokr' go on with an "
            "adapter. To train all weights from it, merge it first (`tread export --merge`)."
        )
    if config.lora_targets == ():
        raise ConfigError("lora_targets is empty, so nothing would be trained; name layers, or leave it out.")
