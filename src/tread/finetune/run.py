"""`tread finetune`: the stages of a run, from a config to a tuned model.

Each stage keeps in memory only what it needs: the list of samples, then the text encoders, then the autoencoder,
then the transformer. Encoded text and latents are on disk, so a second run starts at the transformer.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import tread
from tread.attach.registry import layers_of
from tread.config.schema import plain
from tread.errors import Stopped
from tread.finetune.data.prepare import prepare
from tread.finetune.experts import joined
from tread.finetune.family import TuneFamily
from tread.finetune.job import FinetuneJob
from tread.finetune.model import scratch
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.existing import put_in, read_adapter
from tread.finetune.model.quantize import METHODS, quantize
from tread.finetune.model.weights import Weights
from tread.finetune.preflight import check_model, job_dtype, open_model, resumed_checkpoints, trained_experts
from tread.finetune.result.hub import push
from tread.finetune.result.write import RECORD, has_result, write_result
from tread.finetune.settings import FinetuneConfig
from tread.finetune.task import Finetuning
from tread.kernels.checkpointing import checkpoint_layers, recomputing
from tread.kernels.compiling import compiles
from tread.kernels.fast import print_once_per_job
from tread.kernels.offload.call import unless_offloaded
from tread.kernels.offload.memory import MARGIN, let_segments_grow
from tread.kernels.offload.offload import Offload
from tread.page.write import write_at_end
from tread.routing import noise
from tread.routing.handle import Handle
from tread.routing.risks import adapter_risks, warn_once
from tread.together import together
from tread.training import checkpoint
from tread.training.checkpoint import CHECKPOINTS
from tread.training.job import claimed_folder, end, make_accelerator, run
from tread.training.memory import AnonymousPeak, out_of_memory
from tread.training.parts import averaged_part, load_into, trained

DRAWING = 0.25
"""Share of GPU memory that `offload: auto` leaves free for the autoencoder in runs that draw previews."""


def finetune(config: FinetuneConfig) -> Path:
    """Run or resume the fine-tune of a config and return its folder; raises `Stopped` if a signal ended it."""
    if config.offloads:
        let_segments_grow()
    config, family, accelerator = open_job(config)
    job = FinetuneJob.of(config)
    with claimed_folder(job, accelerator) as folder, out_of_memory(job.memory_advice):
        with together():
            check_model(config, family, accelerator.device)
            data = prepare(config, family, accelerator, folder)
        order = data.train.order(config.train_batch_size * accelerator.num_processes, config.seed)
        config = config.with_steps(order.batches)
        resumed = resumed_checkpoints(config)  # these hold the adapter's weights; the init_lora file may be gone
        with AnonymousPeak() as loading:
            with together():
                models = load_models(replace(config, init_lora=None) if resumed else config, family, accelerator.device)
            handles = {part: attach_routes(config, model) for part, model in models.items()}
            task = Finetuning(config, accelerator, folder, family=family, models=models, handles=handles, data=data)
        task.loading = loading.bytes
        if config.init == "scratch":
            for part in models:
                with scratch.fitting(family.source, part):
                    task.first_losses(part)
        if task.routing:  # before the first checkpoint, whose manifest stores both
            task.facts["tokens_kept"], task.facts["speedup"] = task.routing_gain()
        saved = replace(config, data_changed="refuse")  # "accept" holds for this resume only
        stopped = run(task, FinetuneJob.of(config, accelerator.num_processes), accelerator, folder, plain(saved))
        write_at_end(folder, accelerator)
        del task, models, handles
        end(accelerator)
    if accelerator.is_main_process:  # after `end`: other ranks need not wait for the file and its upload
        if config.sharded:
            write_newest(folder, config)
        if config.push_to_hub and not stopped:
            push(folder, config, print)
    accelerator.print(made(folder))
    if stopped:
        raise Stopped(stopped)
    return folder


def write_newest(folder: Path, config: FinetuneConfig) -> None:
    """Write the result of a sharded run's newest checkpoint, unless it exists already."""
    newest = checkpoint.newest(folder / CHECKPOINTS)
    if newest is not None and not has_result(folder, newest[1]):
        models, family = load_saved(config, *newest)
        write_result(folder, family, models, config, newest[1])


def load_saved(config: FinetuneConfig, path: Path, manifest: dict[str, Any]) -> tuple[dict[str, nn.Module], TuneFamily]:
    """The transformers with the weights of a checkpoint, on the CPU, and their family."""
    family = open_model(config)
    if config.init == "pretrained":
        family.source.check(*(part for part, _, _ in trained_experts(config, family)))
    unsharded = replace(config, parallel="ddp", shard_size=None, cpu_offload=False)
    # init_lora is None because the checkpoint holds the adapter
    unsharded = replace(unsharded, gradient_checkpointing=False, offload="none", init_lora=None)
    if config.quantized:
        unsharded = replace(unsharded, base_model_precision="no_change")
    models = load_models(unsharded, family, torch.device("cpu"))
    load_into(trained(joined(models)), path, averaged_part(manifest))
    return models, family


def made(folder: Path) -> str:
    """A summary of the run's folder, one line each: its result, its best checkpoint and its newest preview."""
    record = folder / RECORD
    files = json.loads(record.read_bytes())["files"] if record.is_file() else ()
    results = sorted({folder / name.partition("/")[0] for name in files})
    pictures = sorted((folder / "previews").glob("step-*"))
    lines = [f"run: {folder}", *(f"result: {path}" for path in results)]
    best, checkpoints = checkpoint.best(folder / CHECKPOINTS), checkpoint.list_checkpoints(folder / CHECKPOINTS)
    if best is not None and best[0] != checkpoints[-1]:
        step, loss = best[1]["step"], best[1][checkpoint.VALIDATED]
        command = shlex.join(["tread", "export", str(folder), "--best"])
        lines.append(f"lowest validation loss: {loss:.4f} at step {step}; its result: {command}")
    return "\n".join([*lines, *(f"newest preview: {path}" for path in pictures[-1:])])


def open_job(config: FinetuneConfig) -> tuple[FinetuneConfig, TuneFamily, Accelerator]:
    """The config with mixed_precision resolved, the family of its model, and the accelerator.

    Raises a ConfigError for a model or settings that cannot run.
    """
    if config.mixed_precision == "auto":
        low = torch.cuda.is_available() or config.base_model_precision == "bf16"
        config = replace(config, mixed_precision="bf16" if low else "no")
    family = open_model(config)
    return config, family, make_accelerator(FinetuneJob.of(config), find_unused=True)


def load_models(config: FinetuneConfig, family: TuneFamily, device: torch.device) -> dict[str, nn.Module]:
    """The transformers to train, by part: quantized, adapted or fully trainable, and on the device."""
    load = load_quantized if config.quantized else load_stock
    first = torch.device("cpu") if config.offloads and not config.quantized else device
    return {
        part: make_trainable(config, family, part, load(config, family, part, first), device)
        for part, _, _ in trained_experts(config, family)
    }


def load_quantized(config: FinetuneConfig, family: TuneFamily, part: str, device: torch.device) -> nn.Module:
    """One transformer whose linears are quantized as they are read: the unquantized model is never in memory."""
    source, dtype = family.source, job_dtype(config)
    empty = source.empty(part, dtype=dtype)
    model = source.transformer(part, dtype=dtype) if empty is None else empty
    quantize_stock(config, model, device, None if empty is None else source.weights(part))
    return model


def quantize_stock(
    config: FinetuneConfig, model: nn.Module, device: torch.device, weights: Weights | None = None
) -> None:
    """Quantize a transformer on the device that quantize_via names; `weights` fill a model on the meta device."""
    # not for bitsandbytes, whose scales do not follow `Module.to`
    on_cpu = config.quantize_via == "cpu" and METHODS[config.base_model_precision].package is None
    store = torch.device("cpu") if config.offloads else None
    quantize(model, config.base_model_precision, "cpu" if on_cpu else device, weights, store=store)


def load_stock(config: FinetuneConfig, family: TuneFamily, part: str, device: torch.device | str = "cpu") -> nn.Module:
    """One stock transformer in the dtype of the job, loaded or drawn anew; on the meta device in a sharded run."""
    dtype = job_dtype(config)
    if config.init == "scratch":
        seed = config.seed_of(part)
        model = scratch.empty(family.source, part) if config.sharded else scratch.make(family.source, part, seed=seed)
        return model if dtype == torch.float32 else model.to(dtype)
    if not config.sharded:
        return family.source.transformer(part, dtype=dtype, device=device)
    # the whole model may not fit into one process: `shard_models` fills the shards
    empty = family.source.empty(part, dtype=dtype)
    return family.source.transformer(part, dtype=dtype) if empty is None else empty


def make_trainable(
    config: FinetuneConfig, family: TuneFamily, part: str, model: Any, device: torch.device
) -> nn.Module:
    """Add the adapter, activation checkpointing and offloading to a transformer, in place, and move it."""
    if config.adapts:
        existing = None if config.init_lora is None else read_adapter(config, family, part, model)
        add_adapter(
            model,
            kind=config.lora_type,
            rank=config.lora_rank,
            alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,
            targets=config.lora_targets or family.lora_targets,
            seed=config.seed_of(part),
            dropout=config.lora_dropout,
            dora=config.use_dora,
            factor=config.lokr_factor,
            lycoris_config=config.lycoris_config,  # pyright: ignore[reportArgumentType]  (a file is read in by then)
            weights=family.source.weights(part) if config.sharded and not config.quantized else None,
        )
        if existing is not None:
            put_in(model, existing, str(config.init_lora))
    else:
        model.requires_grad_(True)
    # `Fast` checkpoints compiled layers itself
    if config.gradient_checkpointing and not compiles(config.compile, device):
        if family.checkpoints_whole:
            model.enable_gradient_checkpointing(unless_offloaded(recomputing(config.gradient_checkpointing)))
        else:
            checkpoint_layers(layers_of(model), config.gradient_checkpointing)
    if config.offloads:
        assert config.offload != "none"
        margin = DRAWING if config.prompts else MARGIN
        Offload(model, layers_of(model), config.offload, device=device, margin=margin, say=print_once_per_job)
        return model.train()
    # `shard_models` moves a sharded one layer by layer
    return model.train() if config.sharded else model.to(device).train()


def attach_routes(config: FinetuneConfig, model: nn.Module) -> Handle | None:
    """Attach the config's routes to a transformer; None if it trains dense."""
    plan = config.plan()
    if plan is None:
        return None
    if config.adapts:
        warn_once(adapter_risks(plan), set())
    return tread.attach(model, plan, seed=int(noise.bits(plan.seed, config.seed)))
