"""A trial of a `tread finetune` config: compare its model with the stock one on a real batch, and run a few steps.

- One batch is encoded: into the config's cache if that exists, where a run will find it, else into a temporary folder.
- The stock prediction comes from the transformer as diffusers loads it, before tread changes it. With a quantized base
  the difference from the unquantized model is only reported, if that fits into memory; routing is compared with the
  quantized model before `attach`.
- If a model has two transformers, each is tried on a batch with times of its range.
"""

from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tread.errors import ConfigError
from tread.finetune.data.prepare import Prepared, prepare
from tread.finetune.experts import choose, ranges
from tread.finetune.family import TuneFamily
from tread.finetune.job import FinetuneJob
from tread.finetune.loss import EXPERT
from tread.finetune.preflight import check_model, trained_experts
from tread.finetune.run import attach_routes, load_stock, make_trainable, open_job, quantize_stock
from tread.finetune.settings import FinetuneConfig
from tread.finetune.task import Finetuning, TuneBatch
from tread.kernels.attention import kernel
from tread.routing import noise
from tread.routing.handle import Handle
from tread.training.memory import is_out_of_memory, out_of_memory
from tread.training.session import Session
from tread.training.trial import (
    TOLERANCE,
    Comparison,
    Trial,
    compare,
    compare_routed,
    eager_figures,
    predict,
    try_steps,
)

STEPS = 1000
"""Assumed steps of a run whose config counts epochs, since the trial collects a single batch."""
MICRO_STEPS = 10_000
"""Micro-steps searched for one that trains a given transformer."""


def try_finetune(config: FinetuneConfig, folder: Path) -> tuple[str, list[Trial]]:
    """The task's summary line, and the trial of each transformer; files go to `folder`, not to the run's folder."""
    cache = Path(config.cache_dir)
    cache = cache if cache.is_dir() else folder / "cache"
    config = replace(steps_alone(config, folder), cache_dir=str(cache), resume_from_checkpoint=None)
    config, family, accelerator = open_job(config)
    job = FinetuneJob.of(config)
    with out_of_memory(job.memory_advice), kernel.explained(config.attention):
        check_model(config, family, accelerator.device)
        data = prepare(config, family, accelerator, folder, batches=1)
        return _Trials(config, accelerator, folder, family, data).run(job)


def steps_alone(config: FinetuneConfig, folder: Path) -> FinetuneConfig:
    """The config of a few steps in one process, without what a run has beside them; files go to `folder`."""
    return replace(
        config,
        output_dir=str(folder),
        validation_prompt=None,
        num_eval_images=0,
        max_train_steps=config.max_train_steps if config.num_train_epochs == 0 else STEPS,
        num_train_epochs=0,
        dataloader_num_workers=0,
        parallel="ddp",
        shard_size=None,
        cpu_offload=False,
        report_to="none",
    )


class _Trials:
    """The stages of a trial, which share its config, data and accelerator."""

    def __init__(
        self, config: FinetuneConfig, accelerator: Accelerator, folder: Path, family: TuneFamily, data: Prepared
    ) -> None:
        self.config, self.accelerator, self.folder, self.family, self.data = config, accelerator, folder, family, data
        self.quantized = config.quantized

    def run(self, job: FinetuneJob) -> tuple[str, list[Trial]]:
        """See `try_finetune`."""
        models: dict[str, nn.Module] = {}
        before: dict[str, tuple[Tensor, list[Comparison]]] = {}
        for part, _, _ in trained_experts(self.config, self.family):
            models[part], prediction, comparisons = self._load(part)
            before[part] = prediction, comparisons
        handles = {part: attach_routes(self.config, model) for part, model in models.items()}
        task = self._task(models, handles)
        summary = task.summary()
        compared: dict[str, list[Comparison]] = {}
        for part, (prediction, comparisons) in before.items():
            compared[part] = comparisons
            if handles[part] is not None:
                beside = "quantized" if self.quantized else "stock"
                batch = self._batch(task, part)
                compared[part] += compare_routed(task, self.accelerator, batch, prediction, beside=beside)
        if not all(one.fits for comparisons in compared.values() for one in comparisons):
            return summary, [Trial(part=part, comparisons=comparisons) for part, comparisons in compared.items()]
        eager = {part: eager_figures(task, self.accelerator, self._batch(task, part)) for part in models}
        session = Session(task, job, self.accelerator)
        # a new batch: `Session` compiles the layers, which pads texts to other lengths
        return summary, [
            try_steps(session, self._batch(task, part), part, compared[part], *eager[part]) for part in models
        ]

    def _task(self, models: dict[str, nn.Module], handles: dict[str, Handle | None]) -> Finetuning:
        return Finetuning(
            self.config,
            self.accelerator,
            self.folder,
            family=self.family,
            models=models,
            handles=handles,
            data=self.data,
        )

    def _batch(self, task: Finetuning, part: str) -> TuneBatch:
        """The first batch, renumbered as a micro-step that trains the transformer `part`."""
        batch = next(task.batches(0))
        spans = ranges(self.family, task.target, list(task.models), self.family.tokens(batch.tensors["mean"]))
        chances = noise.uniform(self.config.seed, EXPERT, torch.arange(MICRO_STEPS)).tolist()
        micro_step = next((n for n, chance in enumerate(chances) if choose(spans, chance).expert == part), None)
        if micro_step is None:
            raise ConfigError(
                f"the {part} is drawn in none of {MICRO_STEPS} micro-steps: flow_schedule_shift leaves it hardly any "
                "times. Change that, or train one of the two with experts."
            )
        return replace(batch, micro_step=micro_step)

    def _load(self, part: str) -> tuple[nn.Module, Tensor, list[Comparison]]:
        """The transformer to train, the prediction that routing must reproduce, and its difference from stock."""
        config, device = self.config, self.accelerator.device
        model = load_stock(config, self.family, part)
        stock = self._stock(part, model, device)
        if self.quantized:
            quantize_stock(config, model, device)
        model = make_trainable(config, self.family, part, model, device)
        task = self._task({part: model}, {part: None})
        own, _ = predict(task, self.accelerator, self._batch(task, part))
        if self.quantized:
            changed = [] if stock is None else [compare("quantized", own, stock, None)]
            return model, own, changed
        if stock is None:
            return model, own, []
        limit = TOLERANCE[self.accelerator.mixed_precision]
        return model, stock, [compare("adapted" if config.adapts else "loaded to train", own, stock, limit)]

    def _stock(self, part: str, model: nn.Module, device: torch.device) -> Tensor | None:
        """The stock transformer's prediction; None if it does not fit into memory unquantized and not offloaded."""
        smaller = self.quantized or self.config.offloads
        try:
            task = self._task({part: model.to(device)}, {part: None})
            return predict(task, self.accelerator, self._batch(task, part))[0]
        except RuntimeError as error:
            if not (smaller and is_out_of_memory(error)):
                raise
            self.accelerator.print(f"the {part} does not fit as it is, so the two are not compared.")
        finally:
            if smaller:
                model.to("cpu")  # quantizing and offloading move it to the device piece by piece
        return None
