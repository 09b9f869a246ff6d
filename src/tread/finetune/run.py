"""`tread finetune`: from a config to a tuned model, one stage after the other.

Each stage has in memory what it needs and no more: the list of samples, then the text encoders, then the autoencoder,
then the transformer. Encoded text and latents are on disk, so a second run starts at the transformer.
"""

import json
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
from tread.training import checkpoint
from tread.training.checkpoint import CHECKPOINTS
from tread.training.job import claimed_folder, end, make_accelerator, run
from tread.training.memory import AnonymousPeak, out_of_memory
from tread.training.parts import averaged_part, load_into, trained

DRAWING = 0.25
"""Share of the GPU that `offload: auto` leaves to the autoencoder, in runs that draw previews."""


def finetune(config: FinetuneConfig) -> Path:
    """Run (or go on with) the fine-tuning of a config; returns the run's folder; `Stopped` if a signal ended it."""
    if config.offloads:
        let_segments_grow()
    config, family, accelerator = open_job(config)
    job = FinetuneJob.of(config)
    with claimed_folder(job, accelerator) as folder, out_of_memory(job.memory_advice):
        check_model(config, family, accelerator.device)
        data = prepare(config, family, accelerator, folder)
        order = data.train.order(config.train_batch_size * accelerator.num_processes, config.seed)
        config = config.with_steps(order.batches)
        begun = resumed_checkpoints(config)  # they have the adapter's weights, and its first file may be gone
        with AnonymousPeak() as loading:
            models = load_models(replace(config, init_lora=None) if begun else config, family, accelerator.device)
            handles = {part: attach_routes(config, model) for part, model in models.items()}
            task = Finetuning(config, accelerator, folder, family=family, models=models, handles=handles, data=data)
        task.loading = loading.bytes
        if config.init == "scratch":
            for part in models:
                with scratch.fitting(family.source, part):
                    task.first_losses(part)
        if task.routing:  # now, so that every checkpoint can say it
            task.facts["tokens_kept"], task.facts["speedup"] = task.routing_gain()
        kept = replace(config, data_changed="refuse")  # accepted once
        stopped = run(task, FinetuneJob.of(config, accelerator.num_processes), accelerator, folder, plain(kept))
        write_at_end(folder, accelerator)
        if config.push_to_hub and not stopped and accelerator.is_main_process:
            push(folder, config, accelerator.print)
    del task, models, handles
    end(accelerator)
    if config.sharded and accelerator.is_main_process:  # nobody waits for it any more
        write_newest(folder, config)
    accelerator.print(made(folder))
    if stopped:
        raise Stopped(stopped)
    return folder


def write_newest(folder: Path, config: FinetuneConfig) -> None:
    """Write the result of a sharded run's newest checkpoint, unless it is there."""
    found = checkpoint.newest(folder / CHECKPOINTS)
    if found is not None and not has_result(folder, found[1]):
        models, family = load_saved(config, *found)
        write_result(folder, family, models, config, found[1])


def load_saved(config: FinetuneConfig, path: Path, manifest: dict[str, Any]) -> tuple[dict[str, nn.Module], TuneFamily]:
    """The transformers with the weights of a checkpoint, on the CPU, and their family."""
    family = open_model(config)
    if config.init == "pretrained":
        family.source.check(*(part for part, _, _ in trained_experts(config, family)))
    plain = replace(config, parallel="ddp", shard_size=None, cpu_offload=False)
    plain = replace(
        plain, gradient_checkpointing=False, offload="none", init_lora=None
    )  # the checkpoint has the adapter
    if config.quantized:
        plain = replace(plain, base_model_precision="no_change")
    models = load_models(plain, family, torch.device("cpu"))
    load_into(trained(joined(models)), path, averaged_part(manifest))
    return models, family


def made(folder: Path) -> str:
    """What a run has left in its folder, line by line: its result and previews."""
    record = folder / RECORD
    files = json.loads(record.read_bytes())["files"] if record.is_file() else ()
    results = sorted({folder / name.partition("/")[0] for name in files})
    pictures = sorted((folder / "previews").glob("step-*"))
    lines = [f"run: {folder}", *(f"result: {path}" for path in results)]
    kept, checkpoints = checkpoint.best(folder / CHECKPOINTS), checkpoint.list_checkpoints(folder / CHECKPOINTS)
    if kept is not None and kept[0] != checkpoints[-1]:
        step, loss = kept[1]["step"], kept[1][checkpoint.VALIDATED]
        lines.append(f"lowest validation loss: {loss:.4f} at step {step}; its result: tread export {folder} --best")
    return "\n".join([*lines, *(f"newest preview: {path}" for path in pictures[-1:])])


def open_job(config: FinetuneConfig) -> tuple[FinetuneConfig, TuneFamily, Accelerator]:
    """The config with its precision decided, its model's family and the accelerator; refuses what cannot run before
    anything is encoded."""
    if config.mixed_precision == "auto":
        low = torch.cuda.is_available() or config.base_model_precision == "bf16"
        config = replace(config, mixed_precision="bf16" if low else "no")
    family = open_model(config)
    return config, family, make_accelerator(FinetuneJob.of(config), find_unused=True)


def load_models(config: FinetuneConfig, family: TuneFamily, device: torch.device) -> dict[str, nn.Module]:
    """The transformers to train, by part, on the device: quantized, with an adapter, or all weights."""
    load = load_quantized if config.quantized else load_stock
    first = torch.device("cpu") if config.offloads and not config.quantized else device
    return {
        part: make_trainable(config, family, part, load(config, family, part, first), device)
        for part, _, _ in trained_experts(config, family)
    }


def load_quantized(config: FinetuneConfig, family: TuneFamily, part: str, device: torch.device) -> nn.Module:
    """One transformer whose linears are quantized as they are read, so that it is never whole in memory."""
    source, dtype = family.source, job_dtype(config)
    empty = source.empty(part, dtype=dtype)
    model = source.transformer(part, dtype=dtype) if empty is None else empty
    quantize_stock(config, model, device, None if empty is None else source.weights(part))
    return model


def quantize_stock(
    config: FinetuneConfig, model: nn.Module, device: torch.device, weights: Weights | None = None
) -> None:
    """Quantize a transformer where the config says; `weights` fill one that is on the meta device."""
    # bitsandbytes' scales do not move with the weights
    stays = config.quantize_via == "cpu" and METHODS[config.base_model_precision].package is None
    store = torch.device("cpu") if config.offloads else None
    quantize(model, config.base_model_precision, "cpu" if stays else device, weights, store=store)


def load_stock(config: FinetuneConfig, family: TuneFamily, part: str, device: torch.device | str = "cpu") -> nn.Module:
    """One transformer as its library loads or makes it, in the dtype of the job; on the meta device if each process is
    to have a shard of it."""
    dtype = job_dtype(config)
    if config.init == "scratch":
        seed = config.seed_of(part)
        model = scratch.empty(family.source, part) if config.sharded else scratch.make(family.source, part, seed=seed)
        return model if dtype == torch.float32 else model.to(dtype)
    if not config.sharded:
        return family.source.transformer(part, dtype=dtype, device=device)
    # too much for one process: filled when it is sharded
    empty = family.source.empty(part, dtype=dtype)
    return family.source.transformer(part, dtype=dtype) if empty is None else empty


def make_trainable(
    config: FinetuneConfig, family: TuneFamily, part: str, model: Any, device: torch.device
) -> nn.Module:
    """The transformer `part`, changed in place: with an adapter, checkpointed, on the device."""
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
    # compiled layers do it themselves
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
    # a sharded one moves layer by layer, when it is sharded
    return model.train() if config.sharded else model.to(device).train()


def attach_routes(config: FinetuneConfig, model: nn.Module) -> Handle | None:
    """Route a transformer by the config's plan; None if it has none."""
    plan = config.plan()
    if plan is None:
        return None
    if config.adapts:
        warn_once(adapter_risks(plan), set())
    return tread.attach(model, plan, seed=int(noise.bits(plan.seed, config.seed)))
