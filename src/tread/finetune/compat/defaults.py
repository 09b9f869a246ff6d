"""Options of the existing trainer and the value of each in a config that leaves it out; facts, not settings of ours."""

from typing import Any

_SHARED: tuple[tuple[Any, str], ...] = (
    (
        False,
        "allow_dataset_oversubscription aspect_bucket_disable_rebuild checkpointing_use_tempdir control controlnet "
        "crepa_drop_vae_encoder crepa_enabled crepa_normalize_neighbour_sum crepa_self_flow "
        "crepa_use_backbone_features crepa_use_tae dataloader_prefetch debug_aspect_buckets debug_dataset_loader "
        "delete_invalid_checkpoints delete_model_after_load delete_nsfw_images delete_problematic_images "
        "delete_unwanted_images diff2flow_enabled diff2flow_loss disable_assistant_lora disable_benchmark "
        "disable_bucket_pruning disable_segmented_timestep_sampling disable_tf32 dynamo_dynamic dynamo_fullgraph "
        "dynamo_use_regional_compilation ema_cpu_only ema_foreach_disable enable_group_offload "
        "enable_multiprocessing enable_nsfw_check enable_watermark eval_dataset_pooling eval_loss_disable "
        "flow_schedule_auto_shift flow_use_beta_schedule flow_use_uniform_schedule fsdp_activation_checkpointing "
        "fsdp_cpu_offload fsdp_cpu_ram_efficient_loading fsdp_enable fully_unload_text_encoder fuse_optimizer "
        "gradient_checkpointing_offload_attention gradient_checkpointing_offload_prefetch "
        "group_offload_text_encoder group_offload_use_stream group_offload_vae i_know_what_i_am_doing "
        "ignore_missing_files internal_guidance_enabled irepa_enabled keep_vae_loaded layersync_enabled lr_scale "
        "lr_scale_sqrt mixflow_enabled model_card_safe_for_work nextlat_enabled offload_during_save "
        "offload_during_startup offset_noise only_instance_prompt optimizer_offload_gradients "
        "optimizer_release_gradients override_dataset_config prepend_instance_prompt preserve_data_backend_cache "
        "print_filenames print_sampler_statistics push_checkpoints_to_hub push_to_hub push_to_hub_background "
        "quantize_activations ramtorch ramtorch_controlnet ramtorch_disable_sync_hooks ramtorch_text_encoder "
        "ramtorch_vae refiner_training refiner_training_invert_schedule rescale_betas_zero_snr save_text_encoder "
        "set_grads_to_none slider_lora_target strict_epoch_limit text_cache_disable text_cache_ondemand "
        "text_embed_full_cache train_text_encoder trust_remote_code twinflow_enabled unet_attention_slice "
        "urepa_enabled urepa_use_tae use_dora use_ema use_soft_min_snr vae_cache_disable vae_cache_ondemand "
        "vae_enable_patch_conv vae_enable_slicing vae_enable_temporal_roll vae_enable_tiling validation_disable "
        "validation_disable_unconditional validation_external_background validation_on_startup validation_preview "
        "validation_prompt_library validation_randomize xm_enabled",
    ),
    (
        None,
        "accelerate_config accelerate_extra_args accelerator_cache_clear_interval assistant_lora_path "
        "audio_flow_schedule_shift audio_max_duration_seconds audio_min_duration_seconds cache_dir "
        "checkpoint_epoch_interval controlnet_custom_config controlnet_model_name_or_path "
        "crepa_similarity_threshold crepa_teacher_block_index custom_tracker data_backend_config deepspeed_config "
        "diffusion_blocks_config disk_low_script disk_low_threshold distillation_config distillation_method "
        "eval_dataset_id eval_epoch_interval eval_steps_interval find_unused_parameters "
        "flow_cubic_schedule_weights flow_custom_timesteps framerate fsdp_transformer_layer_cls_to_wrap "
        "gradient_checkpointing_interval gradient_checkpointing_segment_stride gradient_precision hub_model_id "
        "init_lokr_norm init_lora init_lora_ema init_lora_step instance_prompt internal_guidance_block_index "
        "layer_freeze_strategy layersync_student_block layersync_teacher_block lora_alpha max_train_steps "
        "max_upscale_threshold maximum_image_size merge_environment_config minimum_image_size model_card_note "
        "model_family model_flavour modelspec_comment nsfw_check_models offload_param_path optimizer_beta1 "
        "optimizer_beta2 optimizer_config optimizer_cpu_offload_method parquet_caption_column "
        "parquet_filename_column peft_lora_target_modules post_checkpoint_script post_upload_script "
        "prediction_type pretrained_gemma_model_name_or_path pretrained_grounding_model_name_or_path "
        "pretrained_model_name_or_path pretrained_t5_model_name_or_path pretrained_transformer_model_name_or_path "
        "pretrained_unet_model_name_or_path pretrained_vae_model_name_or_path prodigy_steps publishing_config "
        "quantization_config qwen_text_encoder_model_name_or_path ramtorch_target_modules revision "
        "scheduled_sampling_reflexflow sdnq_group_size sdnq_use_quantized_matmul sdnq_weights_dtype seed "
        "sla_config snr_gamma soft_min_snr_sigma_data target_downsample_size text_encoder_lr "
        "timestep_bias_strategy tokenizer_max_length tread_config urepa_similarity_threshold user_prompt_library "
        "validate_after_epoch validate_after_step validation_adapter_config validation_adapter_name "
        "validation_adapter_path validation_epoch_interval validation_external_script "
        "validation_guidance_skip_layers validation_input validation_noise_scheduler validation_num_video_frames "
        "validation_prompt validation_seed validation_using_datasets variant webhook_config "
        "webhook_reporting_interval",
    ),
    (
        0,
        "checkpointing_rolling_steps crepa_cutoff_step crepa_decay_steps crepa_warmup_steps ema_warmup_steps "
        "input_perturbation_steps lr_warmup_steps machine_rank max_grounding_entities musubi_blocks_to_swap "
        "scheduled_sampling_max_step_offset scheduled_sampling_ramp_steps scheduled_sampling_start_step "
        "singlora_ramp_up_steps timestep_bias_begin urepa_cutoff_step urepa_decay_steps urepa_warmup_steps "
        "xm_block_size",
    ),
    (
        1,
        "audio_channels checkpoints_rolling_total_limit context_parallel_size crepa_adjacent_distance "
        "ema_update_interval gradient_accumulation_steps group_offload_blocks_per_group lr_num_cycles "
        "nsfw_check_video_min_flagged_frames num_machines num_processes num_train_epochs num_validation_images "
        "text_encoder_batch_size twinflow_target_step_count validation_preview_steps xm_candidate_count",
    ),
    (
        1.0,
        "assistant_lora_strength crepa_adjacent_tau crepa_power flow_sigmoid_scale masked_loss_probability "
        "scheduled_sampling_reflexflow_alpha scheduled_sampling_reflexflow_beta2 snr_weight "
        "timestep_bias_multiplier urepa_power validation_adapter_strength validation_internal_guidance_scale "
        "validation_lycoris_strength",
    ),
    (
        True,
        "compress_disk_cache crepa_normalize_by_frames crepa_spatial_align fsdp_limit_all_gathers "
        "fsdp_reshard_after_forward gradient_checkpointing model_card_private ramtorch_disable_extensions "
        "same_network seed_for_each_device",
    ),
    (
        0.0,
        "assistant_lora_inference_strength crepa_lambda_end input_perturbation nextlat_kl_weight nextlat_weight "
        "scheduled_sampling_prob_start scheduled_sampling_probability urepa_lambda_end validation_guidance_rescale",
    ),
    (
        "",
        "cache_dir_vae configs_dir dynamo_mode group_offload_to_disk_path skip_file_discovery",
    ),
    (
        0.1,
        "caption_dropout_probability crepa_self_flow_mask_ratio huber_c lora_dropout noise_offset",
    ),
    (
        2,
        "aspect_bucket_rounding fsdp_version nsfw_check_min_votes scheduled_sampling_order",
    ),
    (
        0.5,
        "crepa_lambda internal_guidance_loss_weight scheduled_sampling_prob_end urepa_lambda",
    ),
    (
        100,
        "ramtorch_text_encoder_percent ramtorch_transformer_percent text_encoder_limit validation_step_interval",
    ),
    (
        12,
        "aspect_bucket_worker_count freeze_encoder_before gradient_checkpointing_offload_pin_memory_max_buckets",
    ),
    (
        3.0,
        "audio_duration_interval flow_schedule_shift urepa_manifold_weight",
    ),
    (
        "bf16",
        "base_model_default_dtype mixed_precision vae_dtype",
    ),
    (
        -1,
        "crepa_encoder_frames_batch_size local_rank nextlat_block_index",
    ),
    (
        "cpu",
        "ema_device musubi_block_swap_device validation_seed_source",
    ),
    (
        2.0,
        "flow_beta_schedule_alpha flow_beta_schedule_beta max_grad_norm",
    ),
    (
        0.2,
        "layersync_lambda refiner_training_strength validation_guidance_skip_layers_stop",
    ),
    (
        4,
        "num_eval_images train_batch_size vae_batch_size",
    ),
)
"""Default -> the options that have it; null for a default that the trainer computes."""

DEFAULTS: dict[str, Any] = {option: value for value, options in _SHARED for option in options.split()} | {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "adam_weight_decay": 0.01,
    "aspect_bucket_alignment": 64,
    "attention_mechanism": "diffusers",
    "audio_truncation_mode": "beginning",
    "aws_max_pool_connections": 128,
    "base_model_precision": "no_change",
    "cache_dir_text": "cache",
    "caption_strategy": "filename",
    "checkpoint_step_interval": 500,
    "checkpoints_total_limit": 5,
    "conditioning_multidataset_sampling": "random",
    "context_parallel_comm_strategy": "allgather",
    "crepa_block_index": 8,
    "crepa_encoder": "dinov2_vitg14",
    "crepa_encoder_image_size": 518,
    "crepa_feature_source": "encoder",
    "crepa_scheduler": "constant",
    "crepa_similarity_ema_decay": 0.99,
    "crepa_threshold_mode": "permanent",
    "data_aesthetic_score": 7.0,
    "data_backend_sampling": "auto-weighting",
    "dataloader_prefetch_qlen": 10,
    "disk_low_action": "stop",
    "dynamo_backend": "no",
    "ema_decay": 0.995,
    "ema_validation": "comparison",
    "eval_timesteps": 28,
    "evaluation_type": "none",
    "flow_timesteps_mode": "fixed-list",
    "freeze_encoder_after": 17,
    "freeze_encoder_strategy": "after",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "grad_clip_method": "value",
    "gradient_checkpointing_backend": "torch",
    "group_offload_type": "block_level",
    "huber_schedule": "snr",
    "image_processing_batch_size": 32,
    "inference_scheduler_timestep_spacing": "trailing",
    "irepa_projector_kernel_size": 3,
    "irepa_spatial_norm_alpha": 0.6,
    "learning_rate": 4e-07,
    "logging_dir": "logs",
    "lora_format": "diffusers",
    "lora_init_type": "default",
    "lora_rank": 16,
    "lora_type": "standard",
    "loss_type": "l2",
    "lr_end": 4e-07,
    "lr_power": 0.8,
    "lr_scheduler": "constant_with_warmup",
    "lycoris_config": "config/lycoris_config.json",
    "main_process_ip": "127.0.0.1",
    "main_process_port": 29500,
    "max_workers": 32,
    "metadata_update_interval": 3600,
    "mixflow_gamma": 0.8,
    "model_type": "full",
    "nextlat_state_loss": "smooth_l1",
    "noise_offset_probability": 0.25,
    "nsfw_check_backend_types": "all",
    "nsfw_check_sample_types": "image,conditioning",
    "nsfw_check_video_frame_count": 3,
    "nsfw_check_video_frame_selection": "uniform",
    "optimizer": "adamw_bf16",
    "output_dir": "simpletuner-results",
    "peft_lora_mode": "standard",
    "pretrained_evaluation_model_name_or_path": "openai/clip-vit-large-patch14-336",
    "pretrained_transformer_subfolder": "transformer",
    "pretrained_unet_subfolder": "unet",
    "quantize_via": "accelerator",
    "read_batch_size": 25,
    "report_to": "none",
    "resolution": 1024,
    "resolution_type": "pixel_area",
    "resume_from_checkpoint": "latest",
    "sageattention_usage": "inference",
    "scheduled_sampling_ramp_shape": "linear",
    "scheduled_sampling_reflexflow_beta1": 10.0,
    "scheduled_sampling_sampler": "unipc",
    "scheduled_sampling_strategy": "uniform",
    "sdnq_compile_mode": "auto",
    "sdnq_quantized_matmul_dtype": "auto",
    "t5_padding": "unmodified",
    "timestep_bias_end": 1000,
    "timestep_bias_portion": 0.25,
    "torch_num_threads": 8,
    "tracker_image_layout": "gallery",
    "tracker_project_name": "simpletuner",
    "tracker_run_name": "simpletuner-testing",
    "training_scheduler_timestep_spacing": "trailing",
    "urepa_encoder_image_size": 518,
    "urepa_model": "dinov2_vitg14",
    "urepa_scheduler": "constant",
    "urepa_similarity_ema_decay": 0.99,
    "urepa_threshold_mode": "permanent",
    "vae_cache_scan_behaviour": "recreate",
    "validation_adapter_mode": "adapter_only",
    "validation_guidance": 7.5,
    "validation_guidance_skip_layers_start": 0.01,
    "validation_guidance_skip_scale": 2.8,
    "validation_image_format": "png",
    "validation_image_quality": 90,
    "validation_method": "simpletuner-local",
    "validation_multigpu": "batch-parallel",
    "validation_negative_prompt": "blurry, cropped, ugly",
    "validation_num_inference_steps": 30,
    "validation_resolution": "256",
    "validation_stitch_input_location": "left",
    "write_batch_size": 128,
    "xm_selection_scope": "sample",
    "xm_training_target": "noise",
}
"""Option -> its default."""
