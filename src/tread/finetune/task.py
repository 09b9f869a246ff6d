"""`Finetuning`: the task that the training loop runs: batches from the cache, the loss, validation and previews.

- The expert and the times of a micro-batch are hashes of its position, like all draws of `finetune/loss.py`. So a run
  does not depend on the number of processes, and resumes exactly.
- Forced tokens are computed on the host, before the batch moves: their count would otherwise synchronise.
- The validation loss is dense, on fixed noise and evenly spread times, without loss weights of entries and times
  and without noise offset: the routed training loss includes the effect of dropped tokens, this one does not.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tread.attach.attach import Attachment
from tread.attach.registry import layers_of
from tread.data.workers import fetched
from tread.finetune.data.picks import PickSampler
from tread.finetune.data.prepare import Prepared
from tread.finetune.experts import Range, at_quantile, choose, joined, ranges
from tread.finetune.family import Batch, TuneFamily
from tread.finetune.loss import EXPERT, TIME, VALIDATION, Draws, SampleLosses, forced_tokens, noise_offset
from tread.finetune.model.sharded import shard_models
from tread.finetune.preflight import target_of
from tread.finetune.previews import make_previews
from tread.finetune.result.write import has_result, write_result
from tread.finetune.settings import FinetuneConfig
from tread.kernels.compiling import compiles, lengths
from tread.kernels.fast import Fast
from tread.routing import noise
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.together import gathered
from tread.training.checkpoint import read_manifest
from tread.training.parts import parameter_counts
from tread.training.task import Review, is_due
from tread.training.trial import flop_ratio
from tread.words import counted

Chunk = list[tuple[int, float]]
"""Samples of a batch, each with the quantile of its time."""
Validation = list[tuple[Range, Chunk]]
COMPILED_TEXT = 64
"""Texts are padded to a multiple of this many tokens for compiled layers."""


@dataclass(frozen=True)
class TuneBatch:
    """One micro-batch."""

    tensors: Batch
    """Latents, text and the positions of the samples in the run, on the device."""
    forced: Tensor | None
    """Tokens that may not drop, (B, S), on the host."""
    micro_step: int
    """Index of the micro-batch, counted over the run and all processes."""


class Finetuning:
    """The task; `models` are the transformers by part, `handles` their routing, None where dense."""

    def __init__(
        self,
        config: FinetuneConfig,
        accelerator: Accelerator,
        folder: Path,
        *,
        family: TuneFamily,
        models: dict[str, nn.Module],
        handles: dict[str, Handle | None],
        data: Prepared,
    ) -> None:
        self.config, self.accelerator, self.folder, self.family = config, accelerator, folder, family
        self.models, self.handles = models, handles
        self.model = joined(models)
        if config.sharded:
            shard_models(config, family, models, self.model, accelerator)
        self.data, self.train_set, self.held_out = data, data.train, data.held_out
        self.target = target_of(config, family)
        self.sample_losses = SampleLosses(family, handles, kept_only=config.routed_loss != "all")
        self._validated = self.target.unweighted()
        micro_steps, world = config.gradient_accumulation_steps, accelerator.num_processes
        size = config.train_batch_size * world
        self.order = data.train.order(size, config.seed)
        self._slices = {"batch": size * micro_steps, "micro_steps": micro_steps, "world": world}
        self._slices["rank"] = accelerator.process_index
        self._previews = make_previews(config, family, data, folder, accelerator)
        self._last = next(iter(models))
        plan = self.plan
        sample = (data.bucket.width, data.bucket.height, data.bucket.frames)
        self.loading: int | None = None
        """Peak host memory of loading the models in bytes, if known."""
        self.facts: dict[str, Any] = {
            "tread_config": plan and plan.to_config(),
            "model_family": config.model_family,
            "size": sample,
        }
        if references := max((len(entry.references) for entry in data.train.entries), default=0):
            self.facts["references"] = references
        self.facts |= {"depth": plan and plan.depth, "grid": self._token_grid(), **data.fingerprints()}
        self.unit = "clip" if data.bucket.frames > 1 else "img"

    def _token_grid(self) -> list[int]:
        """Frames, rows and columns of the target tokens of a typical sample."""
        bucket, family = self.data.bucket, self.family
        frames = 1 + (family.layers if family.layered else (bucket.frames - 1) // family.frame_factor)
        latents = (frames, bucket.height // family.factor, bucket.width // family.factor)
        return [size // patch for size, patch in zip(latents, family.patch, strict=True)]

    def summary(self) -> str:
        """One line with the model, the trained parameters, the routes and the data."""
        size, trained = parameter_counts(self.model)
        handle = next(iter(self.handles.values()))
        routes = "dense" if handle is None else ", ".join(str(route) for route in handle.plan.routes)
        config, accelerator = self.config, self.accelerator
        method = {"full": "all weights"}.get(config.model_type, config.lora_type.replace("standard", "lora"))
        loading = "" if self.loading is None else f", loaded with {self.loading / 2**30:.1f} GiB of host memory"
        return (
            f"{config.model_family}, {method}: {trained / 1e6:.1f} M of {size / 1e6:.1f} M parameters train, {routes}; "
            f"{counted(len(self.train_set), 'sample')} in {counted(len(set(self.train_set.groups)), 'bucket')}, "
            f"{counted(accelerator.num_processes, 'process')} on {accelerator.device.type}{loading}"
        )

    @property
    def routing(self) -> list[Handle]:
        """The handles of the experts, the one of the last forward first."""
        parts = sorted(self.handles, key=lambda part: part != self._last)
        return [handle for part in parts if (handle := self.handles[part]) is not None]

    @property
    def plan(self) -> RoutePlan | None:
        """The routing plan, which all experts share; None: dense."""
        return self.routing[0].plan if self.routing else None

    def make_fast(self) -> list[Fast]:
        """Compile each layer for all sequence lengths: those of buckets, texts and the schedule's ratios.

        See `tread.kernels.fast`.
        """
        config, device = self.config, self.accelerator.device
        compiled = compiles(config.compile, device)
        if compiled:
            self.family.text_multiple = COMPILED_TEXT
        texts = math.ceil(self.family.text_length / COMPILED_TEXT) if self.family.texts_differ else 1
        masked = any(entry.weight is not None for entry in self.train_set.entries)
        masked |= type(self.family).weight is not TuneFamily.weight  # tokens of clean latents are forced too
        return [
            Fast(
                model,
                layers_of(model),
                [] if (handle := self.handles[part]) is None else [handle],
                compiled=compiled,
                checkpointing=config.gradient_checkpointing,
                graphs=config.graphs,
                attention=config.attention,
                shapes=len(set(self.train_set.groups)) * texts * lengths(self.plan, masked=masked),
                say=self.accelerator.print,
                device=device,
            )
            for part, model in self.models.items()
        ]

    def batches(self, start_step: int) -> Iterator[TuneBatch]:
        """Cached latents and text of each micro-step, with some captions dropped."""
        config, device = self.config, self.accelerator.device
        sampler = PickSampler(
            self.order,
            **self._slices,
            start_step=start_step,
            steps=config.max_train_steps,
            caption_dropout=config.caption_dropout_probability,
            seed=config.seed,
        )
        loader = DataLoader(
            self.train_set,
            batch_sampler=sampler,
            collate_fn=self._collate,
            num_workers=config.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )
        for batch in fetched(loader):
            yield self._on_device(batch)

    def _collate(self, items: Sequence[Any]) -> Batch:
        return self.family.collated(self.train_set.collate(items, self.family.collate_text))

    def _on_device(self, batch: Batch) -> TuneBatch:
        forced = forced_tokens(self.family, batch)  # on the host, where counting them does not synchronise
        device, micro_step = self.accelerator.device, int(batch["position"][0]) // self.order.size
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return TuneBatch(tensors, forced, micro_step)

    def loss(self, model: nn.Module, batch: TuneBatch) -> Tensor:
        """The mean loss of one micro-batch."""
        seed, positions = self.config.seed, batch.tensors["position"]  # (B,)
        tokens = self.family.tokens(batch.tensors["mean"])
        span = choose(self._ranges(tokens), float(noise.uniform(seed, EXPERT, batch.micro_step)))
        u = span.spread(noise.uniform(seed, TIME, positions))
        handle, self._last = self.handles[span.expert], span.expert
        if isinstance(handle, Attachment):
            # batches of equal length may differ in references; set here, so that it is not read from the device
            handle.references = self.family.reference_tokens(batch.tensors)
        with _forcing(handle, batch.forced):
            draws = Draws(seed, positions, u, noise_offset(self.config, batch.tensors))
            losses = self.sample_losses(model, span, batch.tensors, draws, self.target)
        weight = batch.tensors.get("loss_weight")  # (B,)
        return (losses if weight is None else losses * weight).mean()

    def _ranges(self, tokens: int) -> list[Range]:
        return ranges(self.family, self.target, list(self.models), tokens)

    @torch.no_grad()
    def losses_at(self, batch: TuneBatch, u: float, kept: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,), at the u-quantile of the training times, with fixed noise.

        `kept` (B, S) restricts the loss of a dense forward to the tokens that a routed one kept, so that the two can be
        compared; it has no effect if `routed_loss` is "all".
        """
        tensors, tokens = batch.tensors, self.family.tokens(batch.tensors["mean"])
        span, at = at_quantile(self._ranges(tokens), u)
        handle, self._last = self.handles[span.expert], span.expert
        if isinstance(handle, Attachment):
            handle.references = self.family.reference_tokens(tensors)
        positions = tensors["position"]
        draws = Draws(VALIDATION, positions, torch.full_like(positions, at, dtype=torch.float32))
        with _forcing(handle, batch.forced), self.accelerator.autocast():
            return self.sample_losses(self.model, span, tensors, draws, self._validated, kept=kept)

    def reviews(self, step: int) -> dict[str, Review]:
        """The reviews due at a step: previews, and the validation loss, which checkpoints are ranked by."""
        config, last = self.config, self.config.max_train_steps
        all_: dict[str, Review] = {"validating": self.validate, "drawing": partial(self.preview, step)}
        every = {
            "validating": [config.eval_steps_interval],
            "drawing": [config.validation_steps if config.prompts else 0],
        }
        if config.checkpoints_keep_best and config.eval_steps_interval:
            every["validating"].append(config.checkpoint_step_interval)
        if step == 0 and config.validation_on_startup:
            return {doing: review for doing, review in all_.items() if any(every[doing])}
        return {doing: all_[doing] for doing in all_ if any(is_due(steps, step, last) for steps in every[doing])}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean dense loss on fixed samples, noise and times."""
        rank, world, device = self.accelerator.process_index, self.accelerator.num_processes, self.accelerator.device
        count = len(self.held_out)
        if count == 0:
            return {}
        total = torch.zeros((), device=device, dtype=torch.float64)
        for span, chunk, counts in self._shared(self._validation_batches(), rank, world):
            items = [self.held_out[i, False] for i, _ in chunk]
            batch = self.family.collated(self.held_out.collate(items, self.family.collate_text))
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            indices = torch.tensor([i for i, _ in chunk], device=device)
            draws = Draws(VALIDATION, indices, torch.tensor([u for _, u in chunk], device=device))
            with self.accelerator.autocast():
                losses = self.sample_losses(self.model, span, batch, draws, self._validated)
            total += losses.double().sum() * counts
        self.facts["val_loss"] = sum(gathered(float(total))) / count
        return {"val_loss": self.facts["val_loss"]}

    @staticmethod
    def _shared(batches: Validation, rank: int, world: int) -> Iterator[tuple[Range, Chunk, bool]]:
        """The batches of one rank, each with whether it counts in the mean.

        All ranks must run an expert equally often, because a sharded model gathers its weights in every forward. If the
        batches of an expert do not divide by the ranks, some ranks repeat the first one, which then does not count.
        """
        for span in dict.fromkeys(span for span, _ in batches):
            chunks = [chunk for other, chunk in batches if other == span]
            for first in range(0, len(chunks), world):
                counts = first + rank < len(chunks)
                yield span, chunks[first + rank if counts else 0], counts

    def _validation_batches(self) -> Validation:
        """Batches of (sample, quantile of its time), each of one bucket and one expert; quantiles are evenly spaced."""
        groups: dict[tuple[Any, Range], list[tuple[int, float]]] = {}
        count, size = len(self.held_out), self.config.train_batch_size
        for i, group in enumerate(self.held_out.groups):
            spans = self._ranges(self.family.tokens(self.held_out[i, False][0]["mean"][None]))
            span, u = at_quantile(spans, (i + 0.5) / count)
            groups.setdefault((group, span), []).append((i, u))
        return [(span, all_[i : i + size]) for (_, span), all_ in groups.items() for i in range(0, len(all_), size)]

    def preview(self, step: int) -> dict[str, float]:
        """Draw the validation prompts with the stock pipeline, on rank 0; on every rank if the weights are sharded."""
        if self.accelerator.is_main_process or self.config.sharded:
            with self.accelerator.autocast():
                self.facts["previews"] = self._previews.draw(self.models, step)
        return {}

    def saved(self, checkpoint: Path) -> None:
        """Write the result of a checkpoint: the adapter or the weights, and the card, from its manifest."""
        manifest = read_manifest(checkpoint)
        for name in ("val_loss", "previews"):  # from before the run was resumed
            if name in manifest:
                self.facts.setdefault(name, manifest[name])
        if self.config.sharded or has_result(self.folder, manifest):  # a sharded run writes its result at the end
            return
        write_result(self.folder, self.family, self.models, self.config, manifest)
        if manifest["step"] == self.config.max_train_steps and "speedup" in manifest:
            tqdm.write(  # not print: the progress bar is on the line
                f"routed layers kept {manifest['tokens_kept']:.0%} of the tokens: by FLOPs a step is "
                f"{manifest['speedup']:.2f} times as fast"
            )

    @torch.no_grad()
    def routing_gain(self) -> tuple[float, float]:
        """The share of tokens kept at the full ratio, and dense FLOPs / routed FLOPs, measured on one batch."""
        part = next(iter(self.models))
        handle = self.handles[part]
        assert handle is not None
        ratio = flop_ratio([handle], lambda: self.first_losses(part))
        return handle.kept_share, ratio  # that of the last forward, which was routed

    @torch.no_grad()
    def first_losses(self, part: str) -> Tensor:
        """The losses (B,) of samples of the first bucket with the transformer `part`."""
        group = self.train_set.groups[0]
        picks = [i for i, other in enumerate(self.train_set.groups) if other == group][: self.config.train_batch_size]
        batch = self._on_device(self._collate([self.train_set[i, False] for i in picks]))
        positions = torch.arange(len(picks), device=self.accelerator.device)
        u = torch.full_like(positions, 0.5, dtype=torch.float32)
        spans = self._ranges(self.family.tokens(batch.tensors["mean"]))
        span = next(span for span in spans if span.expert == part)
        draws = Draws(self.config.seed, positions, span.spread(u))
        with _forcing(self.handles[part], batch.forced), self.accelerator.autocast():
            return self.sample_losses(self.model, span, batch.tensors, draws, self.target)


def _forcing(handle: Handle | None, forced: Tensor | None) -> AbstractContextManager[None]:
    return nullcontext() if handle is None or forced is None else handle.force_keep(forced)
