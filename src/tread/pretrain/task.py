"""Pretraining as a task of the loop: a class-conditional DiT, a dataset, an objective.

Labels, noise, times and the data's own randomness are hashes of (seed, purpose, global sample position), so a
step is the same step whatever the number of processes, and a resumed run needs no random state.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tread.data import Groups, Order, Readable, StepSampler, Visited, positions, split
from tread.data.readable import SKIPPED_FILE
from tread.data.workers import fetched
from tread.errors import ConfigError
from tread.files import writing
from tread.kernels.compiling import compiles, lengths
from tread.kernels.fast import Fast
from tread.kernels.float8 import SMALLEST, Float8, supported, train_in_float8
from tread.models import DiT, load_published_dit
from tread.objectives import Objective
from tread.pretrain.build import build_dataset, build_model, build_objective, read_weights
from tread.pretrain.decode import make_decode
from tread.pretrain.evaluation import Evaluation, ModelImages
from tread.pretrain.settings import EvaluateConfig, PretrainConfig
from tread.routing import noise
from tread.routing.cost import LayerShape, plan_cost
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.sampling.generate import generate
from tread.sampling.grid import make_grid
from tread.together import gathered, together
from tread.training.fingerprint import fingerprint
from tread.training.metrics import track_image
from tread.training.sharding.layout import shard
from tread.training.task import Review, is_due
from tread.words import counted

NOISE, TIME, LABEL, VALIDATION = (int.from_bytes(word) for word in (b"nois", b"time", b"labe", b"vali"))
"""Words that separate the hashes of different purposes."""


class Batch(NamedTuple):
    """One micro-batch on the device."""

    x: Tensor
    labels: Tensor
    positions: Tensor
    """The positions of the samples in the run, (B,): everything random about them is a hash of these."""


class Pretraining:
    """The task: a DiT, a dataset, an objective."""

    def __init__(self, config: PretrainConfig, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator, self.folder = accelerator, folder
        with together():  # before `shard`, which opens process groups
            self.dataset = build_dataset(config.data)  # the ranks of a machine share the work of an index
            if accelerator.is_main_process and (doubt := self.dataset.doubt()) is not None:
                accelerator.print(f"warning: {doubt}")
            self.train_set, self.held_out, self._groups = self._split(config)
            config = self.config = config.with_steps(len(self.train_set))
            self.objective: Objective = build_objective(config.objective)
            self.model: DiT = self._make_model()
            self.handle: Handle | None = None
            if config.model.tread_config is not None:
                plan = RoutePlan.from_config(config.model.tread_config).with_total_steps(config.train.steps)
                self.handle = self.model.route(plan, seed=int(noise.bits(plan.seed, config.train.seed)))
        if config.train.sharded:
            shard(self.model, self.model.blocks, config, accelerator)
        self.facts: dict[str, Any] = self._make_facts()
        self.unit = "img"
        self._slices = {
            "batch": config.train.batch_size,
            "micro_steps": config.train.micro_steps,
            "rank": accelerator.process_index,
            "world": accelerator.num_processes,
        }
        self._micro_batch = len(positions(0, 0, **self._slices))  # refuses sizes that do not divide
        channels = self.dataset.shape[0]
        self._decode = make_decode(
            config.data, channels, config.sample.vae, setting="sample.vae", device=accelerator.device
        )
        self._evaluation: Evaluation | None = None
        if config.evaluate.every > 0:
            self._evaluation = Evaluation(
                config, config.evaluate, accelerator, folder, dataset=self.dataset, decode=self._decode
            )

    def _split(self, config: PretrainConfig) -> tuple[Readable, Readable, Groups | None]:
        """The training set, the held-out set, and the groups of the training set's samples."""
        wanted = config.validation.samples
        count = min(wanted, len(self.dataset) // 2)
        if count < wanted:
            self.accelerator.print(
                f"validation.samples is {wanted}, but half of the data is {count}: {count} are held out."
            )
        groups = self.dataset.groups()
        parts = split(len(self.dataset), count, config.train.seed, groups)
        train, held_out = (Readable(self.dataset, part.tolist(), self.folder / SKIPPED_FILE) for part in parts)
        return train, held_out, None if groups is None else groups.at(parts[0])

    def _make_model(self) -> DiT:
        """The model on its device, dense, in the precision and with the weights that the config asks for."""
        config, device = self.config, self.accelerator.device
        torch.manual_seed(config.train.seed)
        compiled = compiles(config.train.compile, device)
        checkpointing = False if compiled else config.train.checkpointing  # compiled layers do it themselves
        shape, num_classes = self.dataset.shape, self.dataset.num_classes
        model = build_model(config.model, shape, num_classes, checkpointing=checkpointing)
        model = model if config.train.sharded else model.to(device)
        if config.train.precision == "bf16-stream":
            model.stream = torch.bfloat16
        if config.model.weights is not None:
            load_published_dit(model, read_weights(Path(config.model.weights)))
        if config.train.float8 is not None:
            self._use_float8(model, config.train.float8)
        return model

    def _make_facts(self) -> dict[str, Any]:
        """The facts for the manifest of a checkpoint; see `Task.facts`."""
        facts: dict[str, Any] = {"shape": list(self.dataset.shape), "num_classes": self.dataset.num_classes}
        facts["tread_config"] = None if self.handle is None else self.handle.plan.to_config()
        facts |= {"grid": [1, *self.model.grid], "depth": self.model.depth}
        if self.handle is not None:
            facts["speedup"] = self._speedup(self.handle.plan)
        return facts | {"classes": list(self.dataset.classes), "contents": fingerprint(self.dataset.contents())}

    def _use_float8(self, model: DiT, granularity: Float8) -> None:
        if self.config.train.sharded:
            raise ConfigError(
                f"train.float8 is {granularity!r}, but the float8 linears are not proven on the gathered weights of "
                f"train.parallel={self.config.train.parallel}: set train.float8 to null, or train.parallel=ddp."
            )
        check_float8(self.accelerator.device, self.accelerator.mixed_precision)
        if train_in_float8(model.blocks, granularity) == 0:
            raise ConfigError(
                f"train.float8 is set, but no linear of this model, which is {model.width} wide, has two sides of "
                f"at least {SMALLEST}, so nothing would be faster: set train.float8 to null."
            )

    def _speedup(self, plan: RoutePlan) -> float:
        """Dense over routed FLOPs of the layers, at the full ratio."""
        model = self.model
        hidden: int = model.get_submodule("blocks.0.mlp.fc2").in_features  # pyright: ignore[reportAssignmentType]
        shape = LayerShape(width=model.width, mlp_hidden=hidden, gated_mlp=model.mlp == "swiglu")
        return plan_cost(plan, shape, tokens=math.prod(model.grid)).speedup

    def summary(self) -> str:
        """One line: what is trained, on what, with which routes."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        routes = "dense" if self.handle is None else ", ".join(str(route) for route in self.handle.plan.routes)
        processes, device = self.accelerator.num_processes, self.accelerator.device.type
        return (
            f"{self.config.model.size} ({size / 1e6:.1f} M parameters, {routes}), {len(self.train_set)} samples of "
            f"{counted(self.dataset.num_classes, 'class')} ({len(self.held_out)} held out), "
            f"{counted(processes, 'process')} on {device}"
        )

    @property
    def routing(self) -> list[Handle]:
        """The handle of the model; empty if it is dense."""
        return [] if self.handle is None else [self.handle]

    def make_fast(self) -> list[Fast]:
        """Compile each block for one shape inside windows and one outside; see `tread.kernels.fast`."""
        train, device = self.config.train, self.accelerator.device
        shapes = lengths(None if self.handle is None else self.handle.plan)
        if self._evaluation is not None:
            # batches of samples, with guidance and without
            guided = {scale != 1 for scale in self.config.evaluate.scales}
            shapes += 2 if self.config.sample.interval is not None else len(guided)
        fast = Fast(
            self.model,
            list(self.model.blocks),
            self.routing,
            compiled=compiles(train.compile, device),
            checkpointing=train.checkpointing,
            graphs=train.graphs,
            attention=train.attention,
            shapes=shapes,
            say=self.accelerator.print,
            graphs_setting=self.config.called("train.graphs"),
            device=device,
        )
        return [fast]

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Samples, labels and positions of each micro-step, on the device."""
        train, device = self.config.train, self.accelerator.device
        order = Order(len(self.train_set), train.seed, self._groups)
        coming = self.dataset.coming if self._groups is not None and self.accelerator.is_local_main_process else None
        sampler = StepSampler(order, coming, start_step=start_step, steps=train.steps, **self._slices)
        loader = DataLoader(
            Visited(self.train_set), batch_sampler=sampler, num_workers=train.workers, pin_memory=device.type == "cuda"
        )
        for tensors in fetched(loader):
            yield Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The objective's mean loss; labels are dropped here, so the model never does."""
        x, labels, position = batch
        seed = self.config.train.seed
        x = self.dataset.prepare(x, seed, position)  # (B, C, H, W)
        dropped = noise.uniform(seed, LABEL, position) < self.config.train.class_dropout
        labels = labels.masked_fill(dropped, self.dataset.num_classes)
        return self.objective.loss(
            model,
            x,
            labels,
            noise=noise.per_sample_normal(seed, position, x.shape[1:], NOISE),
            u=noise.uniform(seed, TIME, position),
        ).mean()

    @torch.no_grad()
    def losses_at(self, batch: Batch, u: float, kept: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,), at the u-quantile of the training times, with fixed noise and all labels.

        Every token carries loss in this job, so `kept` (see `Finetuning.losses_at`) changes nothing.
        """
        x, labels, position = batch
        x = self.dataset.prepare(x, VALIDATION, position)
        drawn = noise.per_sample_normal(VALIDATION, position, x.shape[1:])
        with self.accelerator.autocast():
            return self.objective.loss(
                self.model, x, labels, noise=drawn, u=torch.full_like(position, u, dtype=torch.float32)
            )

    def reviews(self, step: int) -> dict[str, Review]:
        """The validation loss, a grid of samples and the figures of an evaluation, each every so many steps."""
        config, steps = self.config, self.config.train.steps
        due: dict[str, tuple[Review, int]] = {
            "validating": (self.validate, config.validation.every),
            "drawing": (partial(self.preview, step), config.sample.every),
            "evaluating": (partial(self.evaluate, step), config.evaluate.every),
        }
        return {doing: review for doing, (review, every) in due.items() if is_due(every, step, steps)}

    def validate(self) -> dict[str, float]:
        """The mean loss on held-out data with fixed noise and evenly spread times."""
        count = len(self.held_out)
        if count == 0:
            return {}
        total = torch.zeros((), device=self.accelerator.device, dtype=torch.float64)
        for _, losses in self.validation_losses():
            total += losses.double().sum()
        return {"val_loss": sum(gathered(float(total))) / count}

    @torch.no_grad()
    def validation_losses(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of this rank's batches of held-out data: the quantiles of the times, and the losses; (B,) each.

        All ranks run the same number of forwards, because a forward of a sharded model is a collective.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        count, device = len(self.held_out), self.accelerator.device
        for start in range(0, count, world * self._micro_batch):
            chunk = torch.arange(count)[start + rank :: world][: self._micro_batch]  # (B,)
            nothing_left = len(chunk) == 0
            chunk = torch.zeros(1, dtype=torch.long) if nothing_left else chunk
            samples = [self.held_out[int(i)] for i in chunk]
            x = torch.stack([sample for sample, _ in samples]).to(device)
            labels = torch.tensor([label for _, label in samples], device=device)
            position = chunk.to(device)
            x = self.dataset.prepare(x, VALIDATION, position)
            # each of `count` evenly spread quantiles is used once, in an order unlike the samples'
            u = (position * _coprime(count) % count + 0.5) / count
            drawn = noise.per_sample_normal(VALIDATION, position, x.shape[1:])
            with self.accelerator.autocast():
                losses = self.objective.loss(self.model, x, labels, noise=drawn, u=u)
            if not nothing_left:
                yield u, losses

    def preview(self, step: int) -> dict[str, float]:
        """A grid of samples, one row per class, drawn on rank 0; on every rank if they share the weights."""
        if self.accelerator.is_main_process or self.config.train.sharded:
            sample, classes = self.config.sample, self.dataset.num_classes
            labels = torch.arange(min(sample.classes, classes)).repeat_interleave(sample.per_class)
            with self.accelerator.autocast():
                samples = generate(
                    self.model,
                    self.objective,
                    labels,
                    shape=self.dataset.shape,
                    guidance=sample.guidance,
                    null_label=classes,
                    **sample.drawing,
                    device=self.accelerator.device,
                    progress=False,
                )
            if self.accelerator.is_main_process:
                path = self.folder / "samples" / f"step-{step:08d}.png"
                grid = make_grid(self._decode(samples), columns=sample.per_class, rows=self.dataset.classes)
                with writing(path):
                    path.parent.mkdir(exist_ok=True)
                    grid.save(path)
                track_image(self.accelerator, "samples", path, step)
        return {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Figures of as many samples as `evaluate` asks for, at each of its guidance scales."""
        if self._evaluation is None:
            return {}
        figures: dict[str, float] = {}
        for scale in self._evaluation.evaluate.scales:
            figures |= self._evaluation.run(self.evaluation_images(self._evaluation.evaluate, scale), step)
        return figures

    def evaluation_images(self, evaluate: EvaluateConfig, guidance: float | None = None) -> ModelImages:
        """The samples that an evaluation measures, by default at the first of its guidance scales."""
        return ModelImages(
            self.model,
            self.objective,
            self.config,
            evaluate,
            evaluate.scales[0] if guidance is None else guidance,
            shape=self.dataset.shape,
            num_classes=self.dataset.num_classes,
            decode=self._decode,
            accelerator=self.accelerator,
        )

    def saved(self, checkpoint: Path) -> None:
        """Nothing to write: `tread sample` reads checkpoints."""


def _coprime(count: int) -> int:
    """A stride near count / 1.618 that visits every residue."""
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


def check_float8(device: torch.device, precision: str) -> None:
    """Refuse a device without float8, or an autocast `precision` other than bf16."""
    if not supported(device):
        raise ConfigError(
            "train.float8 is set, which needs a GPU of compute capability 8.9 or above (Ada, Hopper); this run is on "
            f"{device}. Set train.float8 to null."
        )
    if precision != "bf16":
        raise ConfigError("train.float8 is set, which needs bf16 autocast: set train.precision to 'bf16' too.")
