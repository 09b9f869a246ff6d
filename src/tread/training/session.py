"""A session: a task with everything that training changes, the optimizer step that changes it, and its checkpoints.

- A step sets the routing's step and the learning rate, runs forward and backward of each micro-batch, clips, updates
  the weights and then their average. It never synchronises: its results are still on the device.
- A checkpoint holds weights, average and optimizer moments and nothing else, because everything else that changes is a
  function of the step.
- Code that takes single steps (the tuner of routes, `tread doctor`, the benchmarks) uses a session without the loop.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tread.errors import ConfigError
from tread.eval_mode import evaluating
from tread.kernels.attention import kernel
from tread.routing import noise
from tread.together import together
from tread.training import checkpoint
from tread.training.fingerprint import check_data
from tread.training.metrics import FILE as METRICS_FILE
from tread.training.optimizers.ema import EMA
from tread.training.optimizers.make import averaged_weights, keeps_average, make_optimizer
from tread.training.optimizers.muon import embedding_tables
from tread.training.optimizers.rates import learning_rate
from tread.training.parts import averaged_part, load_into, load_moments, optimizer_tensors, trained
from tread.training.ranks import from_main
from tread.training.settings import JobConfig
from tread.training.sharding.saver import Saver
from tread.training.task import Task


class Session:
    """A task with everything that training it changes: weights, their average, optimizer moments."""

    def __init__(self, task: Task, config: JobConfig, accelerator: Accelerator) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        self.model = task.model if config.train.sharded else accelerator.prepare(task.model)
        with together():  # before the saver's process group, for which a process would wait in vain
            self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = self.new_optimizer()
            # a copy of the weights after all ranks have agreed on them
            self.ema = None if config.ema is None else EMA(task.model, decay=config.ema.decay, warmup=config.ema.warmup)
            self.fast = list(task.make_fast())
            """The compiled layers, graphs and kernels; one `Fast` for each part of the model."""
        self.complete_steps: int | None = None
        """Steps that weights, average and moments have all taken; None before the first one and during an update."""
        self.due = False
        """Whether the reviews due after the last complete step have not been run yet."""
        self.saved: int | None = None
        """Step of the last checkpoint written by this session."""
        self.validated: tuple[int, float] = 0, math.nan
        """Step of the last validation, and its loss."""
        saves = config.train.sharded and config.checkpoint.every
        self.saver = Saver(accelerator.device, config.train.timeout) if saves else None
        """Writes the checkpoints of sharded weights."""

    def new_optimizer(self) -> Optimizer:
        """The optimizer as it is before the first step."""
        return make_optimizer(self.trained, self.config.optimizer, embedding_tables(self.model))

    @property
    def kept_share(self) -> float:
        """The share of tokens kept by the routed layers of the last forward; 1 if it was dense."""
        routing = self.task.routing
        return routing[0].kept_share if routing else 1.0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the task's model has its averaged weights (the EMA's, else the optimizer's own), in eval mode, not
        compiled: other shapes than training's would fill the compiler's caches."""
        with evaluating(self.task.model):
            eager = torch.compiler.set_stance("force_eager")
            kernels = kernel.relaxed(self.config.train.attention, self.accelerator.device)
            with self.ema.applied() if self.ema else averaged_weights(self.optimizer), eager, kernels:
                yield

    def step(self, step: int, batches: Iterator[Any], *, rate: float | None = None) -> dict[str, Tensor]:
        """One optimizer step; returns its loss and gradient norm, still on the device. `rate` replaces the learning
        rate of this step."""
        config, accelerator = self.config, self.accelerator
        for handle in self.task.routing:
            handle.set_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.train.steps) if rate is None else rate
        micro_steps = config.train.micro_steps
        losses = []
        for micro_step in range(micro_steps):
            batch = next(batches)
            # layers such as dropout draw from torch's generator: seeding makes that a function of the step too; after
            # the batch, because a loader draws from it when it starts
            torch.manual_seed(int(noise.bits(config.train.seed, step, micro_step, accelerator.process_index)))
            last = micro_step == micro_steps - 1
            # sharded gradients are reduced in every micro-step, or each process would hold them whole
            with nullcontext() if last or config.train.sharded else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.task.loss(self.model, batch)
                accelerator.backward(loss / micro_steps)
            losses.append(loss.detach())
            del loss  # frees its autograd graph, which must not be alive when a CUDA graph is captured
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.trained, config.optimizer.clip, norm)
        self.complete_steps = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            with averaged_weights(self.optimizer):
                self.ema.update(step)
        self.complete_steps, self.due = step + 1, True
        # with train.cpu_offload the gradients, and so their norm, are on the host
        return {"loss": torch.stack(losses).mean(), "grad_norm": norm.to(accelerator.device, non_blocking=True)}

    def save(self, folder: Path, step: int, *, together: bool = True, wait: bool = True) -> None:
        """Write the checkpoint after `step` steps, on rank 0; `together`: all ranks call it and wait for it.

        Shards are written by every rank, in the background unless `wait`. With `checkpoint.every` 0 nothing is written.
        """
        if self.config.checkpoint.every == 0:
            return
        facts = self.task.facts | {"optimizer": self.config.optimizer.name} | ({"due": True} if self.due else {})
        if self.validated[0] == step and math.isfinite(self.validated[1]):  # else the loss is of other weights
            facts |= {checkpoint.VALIDATED: self.validated[1]}
        keep = {"keep": self.config.checkpoint.keep, "keep_best": self.config.checkpoint.keep_best}
        if self.saver is not None:
            self.saver.start(folder, step, self._parts(), facts, **keep)
            if wait:
                self.saver.wait()
            self.saved = self.saver.saved
            return

        def write() -> None:
            path = checkpoint.save(folder, step, self._parts(), facts, **keep)
            self.saved = step
            self.make_result(path)

        if together:
            from_main(self.accelerator, write)
        elif self.accelerator.is_main_process:
            write()

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint, by part."""
        parts = {"model": trained(self.task.model), "optimizer": optimizer_tensors(self.optimizer)}
        if self.ema is not None:
            parts["ema"] = self.ema.averages
        elif keeps_average(self.optimizer):  # results are made of it; training resumes from the other weights
            with averaged_weights(self.optimizer):
                parts["ema"] = trained(self.task.model)
        return parts

    def make_result(self, path: Path) -> None:
        """Let the task write the result of the loaded checkpoint at `path`, on rank 0; see `Task.saved`."""
        if self.accelerator.is_main_process:
            with self.averaged():
                self.task.saved(path)

    def load(self, folder: Path) -> int:
        """Load the newest whole checkpoint; returns its step, 0 if there is none."""
        newest = from_main(self.accelerator, lambda: checkpoint.newest(folder, self.accelerator.print))
        if newest is None:
            if (folder.parent / METRICS_FILE).exists():  # the run was stopped before its first checkpoint
                self.accelerator.print(f"no checkpoint in {folder}: the run starts at step 0.")
            return 0
        path, manifest = newest
        check_data(self.config, path, manifest, self.task.facts, self.accelerator.print)
        name, before = self.config.optimizer.name, manifest.get("optimizer")
        if before not in (None, name):  # earlier versions did not keep it
            raise ConfigError(
                f"{self.config.called('optimizer.name')} is {name!r}, but {path} has the state of {before!r}: set it "
                "back, or begin a run in another output_dir."
            )
        load_into(trained(self.task.model), path, "model")
        if self.ema is not None:
            # a run that had no average so far starts it from its weights
            load_into(self.ema.averages, path, averaged_part(manifest))
        load_moments(self.optimizer, path)
        self.due = manifest.get("due", False)
        self.accelerator.print(f"resumed from {path}")
        return manifest["step"]
