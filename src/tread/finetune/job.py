"""`FinetuneJob`: a `FinetuneConfig` as the `JobConfig` of the training loop, with messages that name the flat keys."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from tread.finetune.settings import FinetuneConfig
from tread.training.job import CONFIG_FILE
from tread.training.settings import CheckpointConfig, EMAConfig, JobConfig, LogConfig, LoopConfig, OptimizerConfig

EMA_WARMUP = 10
NAMES = {
    "train.steps": "max_train_steps",
    "train.attention": "attention",
    "train.graphs": "graphs",
    "train.parallel": "parallel",
    "train.shard_size": "shard_size",
    "train.cpu_offload": "cpu_offload",
    "train.timeout_minutes": "timeout_minutes",
    "optimizer.name": "optimizer",
    "train.workers": "dataloader_num_workers",
    "log.trackers": "report_to",
    "optimizer.warmup_steps": "lr_warmup_steps",
    "checkpoint.data_changed": "data_changed",
    "resume": "resume_from_checkpoint",
}
"""Setting of the loop -> key of `FinetuneConfig`, for error messages."""


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(JobConfig):
    """The loop's view of a `FinetuneConfig`."""

    tune: FinetuneConfig

    @classmethod
    def of(cls, config: FinetuneConfig, processes: int = 1) -> "FinetuneJob":
        """The job of a config on this many processes."""
        return cls(
            tune=config,
            output_dir=config.output_dir,
            resume=config.resume_from_checkpoint,
            train=LoopConfig(
                steps=config.max_train_steps or 1,  # 0 until `with_steps` has counted the batches of an epoch
                batch_size=config.train_batch_size * config.gradient_accumulation_steps * processes,
                micro_steps=config.gradient_accumulation_steps,
                seed=config.seed,
                precision="bf16" if config.mixed_precision == "bf16" else "float32",
                compile=config.compile,
                attention=config.attention,
                graphs=config.graphs,
                parallel=config.parallel,
                shard_size=config.shard_size,
                cpu_offload=config.cpu_offload,
                timeout_minutes=config.timeout_minutes,
            ),
            optimizer=OptimizerConfig(
                name=config.optimizer,
                learning_rate=config.learning_rate,
                schedule=config.lr_scheduler,
                warmup_steps=config.lr_warmup_steps,
                end_rate=config.lr_end,
                power=config.lr_power,
                cycles=config.lr_num_cycles,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                weight_decay=config.adam_weight_decay,
                clip=config.max_grad_norm or None,
            ),
            ema=EMAConfig(decay=config.ema_decay, warmup=EMA_WARMUP) if config.use_ema else None,
            checkpoint=CheckpointConfig(
                every=config.checkpoint_step_interval,
                keep=config.checkpoints_total_limit,
                keep_best=config.checkpoints_keep_best,
                data_changed=config.data_changed,
            ),
            log=LogConfig(
                every=config.logging_steps,
                trackers=config.report_to,
                project=config.tracker_project_name,
                run=config.tracker_run_name,
            ),
        )

    def called(self, setting: str) -> str:
        return NAMES[setting]

    @property
    def divergence_advice(self) -> str:
        return (
            "Lower learning_rate or max_grad_norm, or set mixed_precision to 'no', and continue with "
            "resume_from_checkpoint=latest."
        )

    def resume_command(self, folder: Path) -> str:
        """The command that resumes a stopped run, from the config saved in its folder."""
        return shlex.join(["tread", "finetune", str(folder / CONFIG_FILE), "resume_from_checkpoint=latest"])

    @property
    def memory_advice(self) -> str:
        """The settings that would still save memory, the most effective first."""
        ways = ["set graphs to false"] if self.tune.graphs else []
        if self.tune.gradient_checkpointing is not True:
            ways.append("set gradient_checkpointing to true")
        if not self.tune.adapts:
            ways.append("set model_type to 'lora'")
            if not self.tune.optimizer.endswith("8bit"):
                ways.append("set optimizer to 'adamw-8bit'")
        elif "4" not in self.tune.base_model_precision:
            quantized = self.tune.base_model_precision.startswith(("int8", "fp8"))
            smaller = "int4" if self.tune.lora_type == "lokr" else "nf4"
            ways.append(f"set base_model_precision to {smaller if quantized else 'int8'!r}")
        if self.tune.adapts and not self.tune.offloads and self.tune.lora_type != "lycoris":
            ways.append("set offload to 'auto'")
        if self.tune.train_batch_size > 1:
            ways.append("set train_batch_size to 1 and raise gradient_accumulation_steps instead")
        if self.tune.use_ema:
            ways.append("set use_ema to false")
        if self.tune.plan() is None:
            ways.append("route tokens (tread_config: lora)")
        ways.append("lower the resolution of the data")
        return "Any of these needs less: " + "; ".join(ways) + "."
