"""Tables from the keys of other trainers to their rules: `RULES` for a config, `DATA_RULES` for a data entry.

- A key has a rule if `FinetuneConfig` lacks it, or names some of its values differently. A field without a rule runs
  unchanged.
- A key that would change what is learned is never ignored; an unsupported one says what to write instead.
"""

from tread.finetune.compat import entries, models, objective, rules
from tread.finetune.compat.rules import OFF, Outcome, Rule, ignored, lora_shape, renamed, reworded, unless_off


def _each(keys: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(keys.split(), rule)


_CACHED = ignored("images and captions are always encoded first, once, and kept in cache_dir")
_UPLOAD = ignored("the model card is tread's own")
_MEMORY = (
    "quantize the base instead (base_model_precision: int8 or nf4), with gradient_checkpointing and an 8-bit optimizer"
)
_RAMTORCH = ignored("an option of ramtorch")
_SDNQ = ignored("an option of sdnq, which is not used; base_model_precision chooses what is stored")
_WHOLE = ignored("every layer is checkpointed on its own")
_SPEED = ignored("it concerns speed alone; attention chooses the kernel")
_ENCODER = ignored("text encoders run once per caption and then leave memory")
_PREVIEW = ignored("it concerns previews alone")
_LYCORIS = unless_off("write it inside lycoris_config", off=())
_LOSS = unless_off("leave it out; no loss is added to the denoising loss")
_NOTHING = ignored("nothing that is learned depends on it")

_ADDED = ("crepa", "urepa", "irepa", "layersync", "nextlat", "internal_guidance", "mixflow", "twinflow", "xm")
"""Prefixes of the options of auxiliary losses, each of which PREFIX_enabled turns on."""

RULES: dict[str, Rule] = {
    "model_family": models.family,
    "model_flavour": models.flavour,
    "model_type": reworded(
        "model_type", {}, {"controlnet": "train a ControlNet in a script of yours (docs/attach.md)"}
    ),
    "pretrained_vae_model_name_or_path": unless_off("put that autoencoder into the base model's folder as vae/"),
    "pretrained_transformer_model_name_or_path": unless_off("put that transformer into the base model's folder"),
    "pretrained_t5_model_name_or_path": unless_off("put that text encoder into the base model's folder"),
    "trust_remote_code": ignored("only classes of diffusers and transformers are loaded"),
    "controlnet": unless_off("train a ControlNet in a script of yours; tread.attach routes the transformer"),
    "control": unless_off("train a control LoRA in a script of yours; tread.attach routes the transformer"),
    **_each("distillation_method distillation_config", unless_off("leave it out; distillation is not trained here")),
    "tread_config": rules.routes,
    "lora_rank": lora_shape("lora_rank"),
    "lora_alpha": lora_shape("lora_alpha"),
    "lora_format": rules.layout,
    "init_lokr_norm": unless_off("leave it out; LoKr starts at zero"),
    "lora_init_type": unless_off("leave it out; adapters start at zero", off=("default", *OFF)),
    "flux_lora_target": unless_off("name the layers in lora_targets, or leave it out for the family's own"),
    "peft_lora_target_modules": rules.targets,
    "flux_guidance_mode": unless_off("leave it out; guidance is 1 in training", off=("constant", *OFF)),
    "flux_guidance_value": unless_off("leave it out; guidance is 1 in training", off=(1, None)),
    "flux_attention_masked_training": unless_off("leave it out; text is fed as the stock pipeline feeds it"),
    **_each("algo multiplier linear_dim linear_alpha factor full_matrix bypass_mode apply_preset", _LYCORIS),
    "base_model_precision": rules.precision,
    "base_model_default_dtype": unless_off("write base_model_precision: fp32", off=("bf16", *OFF)),
    "quantize_activations": unless_off("write base_model_precision: fp8-forward, which does"),
    **_each(
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision", _ENCODER
    ),
    **_each("ramtorch musubi_blocks_to_swap enable_group_offload", rules.offload),
    "ramtorch_text_encoder": _ENCODER,
    **_each(
        "ramtorch_transformer_percent ramtorch_target_modules ramtorch_disable_extensions ramtorch_disable_sync_hooks",
        _RAMTORCH,
    ),
    "context_parallel_size": unless_off(
        "each GPU takes whole samples: use a smaller resolution or fewer frames, or quantize the base", off=(1, *OFF)
    ),
    "context_parallel_comm_strategy": ignored("an option of context_parallel_size"),
    **_each("fsdp_enable deepspeed_config", unless_off(_MEMORY)),
    "offload_during_startup": _ENCODER,
    **_each(
        "gradient_checkpointing_backend gradient_checkpointing_interval gradient_checkpointing_segment_stride", _WHOLE
    ),
    "attention_mechanism": rules.attention,
    **_each("fuse_qkv_projections allow_tf32 disable_tf32 enable_xformers_memory_efficient_attention", _SPEED),
    "dynamo_backend": rules.dynamo,
    "dynamo_mode": ignored("layers are compiled one by one in the default mode"),
    "dynamo_use_regional_compilation": ignored("layers are compiled one by one always"),
    "num_processes": rules.processes,
    "num_machines": ignored("accelerate launch sets it"),
    "accelerator_cache_clear_interval": ignored("the cache of the allocator is left to torch"),
    "torch_num_threads": ignored("set OMP_NUM_THREADS"),
    "optimizer": rules.optimizer,
    "optimizer_beta1": renamed("adam_beta1"),
    "optimizer_beta2": renamed("adam_beta2"),
    "optimizer_config": unless_off("write adam_beta1, adam_beta2, adam_epsilon and adam_weight_decay"),
    "optimizer_offload_gradients": unless_off("write an 8-bit optimizer: adamw-8bit or lion-8bit"),
    "grad_clip_method": ignored("clipping is by norm (max_grad_norm)"),
    "max_grad_norm": rules.clipping,
    "gradient_precision": ignored("gradients have the precision of the trained weights, float32 for an adapter"),
    "lr_scheduler": rules.scheduler,
    "lr_num_cycles": rules.only_with("lr_num_cycles", "cosine_with_restarts"),
    "lr_power": rules.only_with("lr_power", "polynomial"),
    "lr_end": rules.only_with("lr_end", "polynomial", "linear", "cosine", "cosine_with_restarts"),
    "mixed_precision": reworded(
        "mixed_precision", {False: "no", None: "no", "fp32": "no"}, {"fp16": "write bf16", "fp8": "write bf16"}
    ),
    "max_train_steps": rules.steps,
    "strict_epoch_limit": ignored("max_train_steps or num_train_epochs ends the run"),
    "flow_schedule_shift": rules.shift,
    "flow_schedule_auto_shift": rules.auto_shift,
    "flow_use_uniform_schedule": objective.uniform_times,
    "flow_use_beta_schedule": objective.beta_times,
    **_each("flow_beta_schedule_alpha flow_beta_schedule_beta", ignored("an option of flow_use_beta_schedule")),
    "flow_sigmoid_scale": objective.sigmoid_scale,
    "snr_gamma": objective.min_snr,
    "offset_noise": objective.offset_noise,
    **{name: objective.offset(name) for name in ("noise_offset", "noise_offset_probability")},
    "input_perturbation": unless_off("leave it out"),
    "masked_loss_probability": unless_off(
        "leave it out: a mask always counts; to train without, take the masks out of the data", off=(1, None)
    ),
    "loss_type": objective.loss,
    **_each("huber_c huber_schedule", objective.huber),
    **_each("lr_scale lr_scale_sqrt", unless_off("leave it out, and write the learning_rate that it comes to")),
    "timestep_bias_strategy": unless_off("write time_density, logit_mean or flow_schedule_shift"),
    **_each("use_soft_min_snr soft_min_snr_sigma_data", unless_off("write snr_gamma")),
    **_each("train_text_encoder text_encoder_lr", unless_off("leave it out; text encoders stay as they are")),
    "ema_warmup_steps": unless_off("leave it out; the average begins with the first step"),
    "checkpoint_epoch_interval": unless_off("write checkpoint_step_interval"),
    "data_backend_sampling": unless_off(
        "leave it out; an epoch visits every sample `repeats` times", ("auto-weighting", *OFF)
    ),
    **_each(
        "maximum_image_size target_downsample_size only_instance_prompt prepend_instance_prompt",
        unless_off("write it in the data entries"),
    ),
    "parquet_caption_column": unless_off("write caption_column in the data entry"),
    "parquet_filename_column": unless_off("write image_column in the data entry"),
    "ema_update_interval": rules.ema_interval,
    "ema_validation": ignored("previews use the average where use_ema is on"),
    **_each("ema_device ema_cpu_only", ignored("the average is kept on the device of the trained weights")),
    "checkpointing_steps": renamed("checkpoint_step_interval"),
    "validation_step_interval": rules.unless_disabled(renamed("validation_steps")),
    "validation_steps": rules.unless_disabled(lambda value, config: Outcome.runs(validation_steps=value)),
    "validation_disable": rules.no_previews,
    "user_prompt_library": rules.prompts,
    "validation_prompt": rules.prompt,
    "validation_prompt_library": unless_off("write the prompts as a list in validation_prompt"),
    "validation_guidance_real": unless_off("leave it out; previews use validation_guidance", off=(1, *OFF)),
    "validation_guidance_rescale": _PREVIEW,
    "validation_disable_unconditional": ignored("the empty prompt is never drawn"),
    "validation_lycoris_strength": ignored("previews use the adapter at full strength"),
    **_each("validation_torch_compile validation_noise_scheduler", _PREVIEW),
    **_each(
        "validation_audio_duration validation_lyrics audio_flow_schedule_shift",
        ignored("no model of sound alone is tuned here; that of clips has the times of its picture"),
    ),
    "evaluation_type": ignored("the dense validation loss is what is logged (num_eval_images)"),
    "eval_dataset_id": ignored("entries of dataset_type eval are the evaluation data"),
    "report_to": reworded(
        "report_to",
        {"all": "auto", None: "none"},
        dict.fromkeys(("comet_ml", "trackio", "swanlab", "custom-tracker"), "write tensorboard or wandb"),
    ),
    "hub_model_id": rules.repository,
    "push_to_hub_background": ignored("the result is uploaded once, at the end"),
    "push_checkpoints_to_hub": unless_off("leave it out, and upload checkpoints with `hf upload`"),
    "data_backend_config": lambda value, config: Outcome(verdict="translated", text="data: its entries"),
    **_each(
        "compress_disk_cache text_cache_disable text_cache_ondemand vae_cache_disable vae_cache_ondemand "
        "skip_file_discovery cache_dir_text cache_dir_vae preserve_data_backend_cache override_dataset_config "
        "write_batch_size read_batch_size image_processing_batch_size",
        _CACHED,
    ),
    **_each("max_workers dataloader_prefetch dataloader_prefetch_qlen", ignored("set dataloader_num_workers")),
    "vae_enable_slicing": ignored("set vae_batch_size to 1"),
    **_each("vae_enable_patch_conv vae_enable_temporal_roll", ignored("set vae_enable_tiling")),
    "vae_dtype": reworded("vae_dtype", {"default": "fp32", "fp16": "bf16"}),
    "disable_bucket_pruning": ignored("no sample is ever pruned; a batch is filled from its own bucket"),
    "allow_dataset_oversubscription": ignored("no sample is ever pruned; a batch is filled from its own bucket"),
    **_each("aspect_bucket_rounding aspect_bucket_alignment", ignored("sides are multiples of what the model needs")),
    "delete_problematic_images": ignored("unreadable files are listed and skipped, never deleted"),
    "delete_unwanted_images": ignored("unwanted files are listed and skipped, never deleted"),
    "conditioning_multidataset_sampling": ignored("every entry has its own conditioning"),
    "caption_strategy": entries.captions,
    "instance_data_dir": unless_off("write it as data"),
    "instance_prompt": unless_off("write it in the data entry, with caption_strategy instanceprompt"),
    "disable_benchmark": ignored("validation_on_startup draws with the untouched model first"),
    "i_know_what_i_am_doing": ignored("nothing asks for it"),
    "webhook_config": ignored("nothing is posted"),
    **_each("crepa_self_flow diff2flow_enabled diff2flow_loss", _LOSS),
    **{f"{name}_enabled": _LOSS for name in _ADDED},
    "scheduled_sampling_probability": unless_off("leave it out; a step sees the noise that its time says"),
    **_each(
        "validation_external_background validation_external_script validation_preview "
        "validation_preview_steps validation_randomize validation_adapter_config validation_adapter_mode "
        "validation_adapter_name validation_adapter_path validation_adapter_strength validation_epoch_interval "
        "validation_guidance_skip_layers validation_guidance_skip_layers_start validation_guidance_skip_layers_stop "
        "validation_guidance_skip_scale validation_input validation_image_format validation_image_quality "
        "validation_internal_guidance_scale validation_method validation_multigpu validation_seed_source "
        "validation_stitch_input_location validation_using_datasets validate_after_epoch validate_after_step "
        "num_validation_images inference_scheduler_timestep_spacing enable_watermark",
        _PREVIEW,
    ),
    **_each(
        "accelerate_config accelerate_extra_args aspect_bucket_disable_rebuild aspect_bucket_worker_count "
        "checkpointing_rolling_steps checkpointing_use_tempdir checkpoints_rolling_total_limit configs_dir "
        "debug_aspect_buckets debug_dataset_loader delete_invalid_checkpoints delete_model_after_load disk_low_action "
        "disk_low_script disk_low_threshold dynamo_dynamic dynamo_fullgraph ema_foreach_disable enable_multiprocessing "
        "eval_dataset_pooling eval_epoch_interval eval_loss_disable eval_timesteps find_unused_parameters "
        "fully_unload_text_encoder fuse_optimizer gradient_checkpointing_offload_attention "
        "gradient_checkpointing_offload_pin_memory_max_buckets gradient_checkpointing_offload_prefetch "
        "keep_vae_loaded local_rank logging_dir machine_rank main_process_ip main_process_port "
        "merge_environment_config metadata_update_interval modelspec_comment musubi_block_swap_device "
        "offload_during_save offload_param_path post_checkpoint_script post_upload_script "
        "pretrained_evaluation_model_name_or_path print_filenames print_sampler_statistics publishing_config "
        "sageattention_usage set_grads_to_none text_embed_full_cache tracker_image_layout unet_attention_slice "
        "vae_cache_scan_behaviour",
        _NOTHING,
    ),
}
"""Key of a config -> its rule; fields of FinetuneConfig that have none run unchanged."""

PREFIXES: dict[str, Rule] = {
    "model_card_": _UPLOAD,
    "sdnq_": _SDNQ,
    "ramtorch_": _RAMTORCH,
    **_each("ideogram_ cosmos_ ltx hidream_ minimax", ignored("an option of another family")),
    "cosmos3_": ignored("the half of Cosmos 3 that draws is trained, and the half that reads stays as it is"),
    "webhook_": ignored("nothing is posted"),
    "aws_": ignored("data is read from local folders"),
    "fsdp_": ignored("an option of fsdp_enable"),
    "wan_": ignored("Wan's experts and time embedding are read from the model"),
    **{f"{name}_": ignored(f"an option of {name}_enabled") for name in _ADDED},
    "scheduled_sampling_": ignored("an option of scheduled_sampling_probability"),
    "group_offload_": ignored("an option of enable_group_offload"),
    "nsfw_check_": ignored("an option of enable_nsfw_check"),
    "timestep_bias_": ignored("an option of timestep_bias_strategy"),
}
"""Prefix of a key -> the rule of keys that are neither fields nor in RULES."""

_TEXT_ENTRY = ignored("an option of text_embeds entries; captions are kept in cache_dir")
DATA_RULES: dict[str, Rule] = {
    "cache_dir_vae": ignored("latents are kept in cache_dir, named by content"),
    **_each("cache_dir default text_embeds image_embeds", _TEXT_ENTRY),
    **_each("disabled disable", ignored("off")),
    "metadata_backend": ignored("files are listed at every start, which is quick"),
    **_each("write_batch_size hash_filenames preserve_data_backend_cache", _CACHED),
    "vae_cache_clear_each_epoch": unless_off("leave it out; crops stay the same in every epoch"),
    "skip_file_discovery": _CACHED,
    "huggingface": entries.columns,
    "video_column": renamed("image_column"),
    "video": entries.video,
    "conditioning_type": reworded(
        "conditioning_type",
        {"reference_strict": "reference", "reference_loose": "reference"},
        {"controlnet": "train a ControlNet in a script of yours; here: mask, segmentation or reference"},
    ),
    "parquet": unless_off("write type: huggingface with dataset_name, or metadata_file with a CSV or JSONL"),
    "conditioning": unless_off("make those images first, and name their folder in conditioning_data_dir"),
    "audio": ignored("the sound of clips is trained if the config says sound: train (LTX-2)"),
    "probability": unless_off("write repeats", off=(1, *OFF)),
    **_each("is_regularisation_data is_regularization_data", entries.regularisation),
    "aws_bucket_name": unless_off("copy the data to a local folder"),
    "only_instance_prompt": entries.one_prompt,
    "prepend_instance_prompt": entries.prompt_first,
}
"""Key of a data entry -> its rule; fields of DataConfig that have none run unchanged."""

THEIR_DATA_RULES = DATA_RULES | {"repeats": entries.visits}
"""The rules for entries of data_backend_config, whose keys have the existing trainer's meaning."""
