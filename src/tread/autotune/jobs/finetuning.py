"""`tread autotune` on a config of `tread finetune`.

A few batches of the most frequent bucket are encoded into the config's cache, where a run reuses them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tread.attach.attach import Attachment
from tread.attach.registry import family_of, layers_of
from tread.autotune.jobs.job import TrainedJob, batches_of, check_alone, newest_checkpoint, routing_beside, stacks_of
from tread.autotune.jobs.trainer import TrainerLoop
from tread.autotune.subject import Opened, check_depth, check_samples, wide_routes
from tread.config.schema import plain
from tread.errors import ConfigError
from tread.finetune.data.prepare import prepare
from tread.finetune.job import FinetuneJob
from tread.finetune.preflight import check_model, resumed_checkpoints
from tread.finetune.run import attach_routes, finetune, load_models, open_job
from tread.finetune.settings import FinetuneConfig
from tread.finetune.task import Finetuning, TuneBatch
from tread.finetune.trial import steps_alone
from tread.kernels.attention import kernel
from tread.routing.schedule import Schedule
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.fingerprint import KINDS
from tread.training.memory import out_of_memory
from tread.training.session import Session

LEFT_OUT = (
    *("output_dir", "cache_dir", "vae_batch_size", "text_encoder_batch_size", "dataloader_num_workers", "lora_dtype"),
    *("tread_config", "max_train_steps", "num_train_epochs", "timeout_minutes", "data_changed", "logging_steps"),
    *("num_eval_images", "eval_steps_interval", "checkpoint", "validation_", "push_to_hub", "hub_"),
    *("report_to", "tracker_"),
)
"""Settings that no measurement depends on, or the beginnings of their names."""


class FinetuneTuning(TrainedJob):
    """The job of a `FinetuneConfig`."""

    program = "finetune"
    setting = "tread_config"

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config

    @property
    def routing(self) -> dict[str, Any]:
        return routing_beside(self.config.tread_config)

    def identity(self) -> dict[str, Any]:
        settings = {name: value for name, value in plain(self.config).items() if not name.startswith(LEFT_OUT)}
        checkpoint = newest_checkpoint(FinetuneJob.of(self.config).resumed)
        return {"job": "finetune", **settings, "tread_config": self.routing, **checkpoint}

    def schedule(self, tread_config: Mapping[str, Any], steps: int) -> Schedule | None:
        plan = replace(self.config, tread_config=dict(tread_config), max_train_steps=steps, num_train_epochs=0).plan()
        return None if plan is None else plan.schedule

    @contextmanager
    def explained(self) -> Iterator[None]:
        advice = FinetuneJob.of(self.config).memory_advice
        with out_of_memory(advice), kernel.explained(self.config.attention):
            yield

    def check_verify(self) -> None:
        if self.config.num_eval_images == 0:
            raise ConfigError(
                "--verify compares validation losses, and num_eval_images is 0: set it, or leave --verify out."
            )

    def validation(self) -> dict[str, Any]:
        return {"num_eval_images": self.config.num_eval_images}

    def open(self, folder: Path, ratios: Sequence[float]) -> Opened:
        beside = {name: value for name, value in self.routing.items() if name != "schedule"}
        config = replace(steps_alone(self.config, folder), tread_config=None)
        if resumed_checkpoints(self.config):  # these hold the adapter's weights; the init_lora file may be gone
            config = replace(config, init_lora=None)
        config, family, accelerator = open_job(config)
        device = check_alone(accelerator)
        check_model(config, family, device)
        data = prepare(config, family, accelerator, folder, batches=batches_of(config.train_batch_size))
        count = check_samples(len(data.train), config.train_batch_size, "train_batch_size")
        models = load_models(config, family, device)
        for model in models.values():
            check_depth(len(layers_of(model)), ratios)
        config = replace(config, tread_config={**beside, "routes": wide_routes(ratios), "schedule": None})
        handles = {part: attach_routes(config, model) for part, model in models.items()}
        task = Finetuning(config, accelerator, folder, family=family, models=models, handles=handles, data=data)
        for kind in KINDS:  # a resume would compare the few samples that are encoded here with all of the run's
            del task.facts[kind]
        session = Session(task, FinetuneJob.of(config), accelerator)
        resumed = FinetuneJob.of(
            self.config
        ).resumed  # without a checkpoint, the weights that a run begins with are measured
        done = 0 if resumed is None else session.load(resumed / CHECKPOINTS)
        batches = list(islice(task.batches(0), count))
        first, handle = batches[0], task.routing[0]
        references = family.reference_tokens(first.tensors) if handle.plan.reference_tokens == "keep" else 0
        loop = TrainerLoop(task, session)
        return Opened(
            loop=loop,
            batches=batches,
            stacks=stacks_of(model := next(iter(models.values())), family_of(model)),
            tokens=family.tokens(first.tensors["mean"]),
            forced=_forced(first),
            always=references if isinstance(handle, Attachment) else 0,
            adapts=config.adapts,
            start=loop.start if config.init == "scratch" and done == 0 else None,
        )

    def train(self, tread_config: Mapping[str, Any] | None, steps: int, folder: Path) -> None:
        finetune(
            replace(
                self.config,
                output_dir=str(folder),
                resume_from_checkpoint="latest" if list_checkpoints(folder / CHECKPOINTS) else None,
                tread_config=None if tread_config is None else dict(tread_config),
                max_train_steps=steps,
                num_train_epochs=0,
                eval_steps_interval=steps,
                validation_prompt=None,
                validation_on_startup=False,
                checkpoint_step_interval=steps,
                checkpoints_total_limit=1,
                report_to="none",
                push_to_hub=False,
            )
        )


def _forced(batch: TuneBatch) -> int | None:
    return None if batch.forced is None else int(batch.forced.sum(1).max())
