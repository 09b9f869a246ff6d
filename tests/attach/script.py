"""A training script built as the official diffusers LoRA scripts are, at tiny size, with two lines added.

The order is theirs: accelerator, model, checkpointing, adapter, hooks that save and load it, optimizer, `prepare`,
resume, the loop with accumulation, clipping, checkpoints and validation, the adapter at the end. The tiny FLUX stands
for the transformer, or the model of another case; random numbers that depend on the sample stand for the data.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.utils.data import DataLoader

import tread
from tests.attach.attached import FLUX

CONFIG = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}
STEPS, ACCUMULATION, BATCH, HALFWAY = 6, 2, 2, 3


class Model(Protocol):
    """What the script needs of a `Case`."""

    def model(self) -> Any: ...

    def inputs(self, batch: int, /) -> dict[str, Any]: ...

    def call(self, model: Any, arguments: dict[str, Any], /) -> Tensor: ...


def main(
    folder: Path,
    case: Model = FLUX,
    *,
    routed: bool = True,
    checkpointing: Any = None,
    reentrant: bool = False,
    resume: bool = False,
    stop_at: int | None = None,
    mixed_precision: str = "no",
    device: str = "cpu",
    compiled: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Train, and return the adapter's weights; `compiled` has the arguments of `handle.compile`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, mixed_precision=mixed_precision, cpu=device == "cpu"
    )
    set_seed(0)
    transformer = case.model().to(accelerator.device)
    transformer.requires_grad_(False)
    if checkpointing is not None:
        checkpointing(transformer)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))

    def save_model_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        for model in models:
            torch.save(get_peft_model_state_dict(accelerator.unwrap_model(model)), Path(output_dir) / "lora.pt")
            weights.pop()

    def load_model_hook(models: list[Any], input_dir: str) -> None:
        while models:
            state = torch.load(Path(input_dir) / "lora.pt", weights_only=True)
            set_peft_model_state_dict(accelerator.unwrap_model(models.pop()), state, adapter_name="default")

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    cast_training_params([transformer], dtype=torch.float32)
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
    train_dataloader = DataLoader(range(STEPS * ACCUMULATION * BATCH), batch_size=BATCH)  # pyright: ignore[reportArgumentType]
    handle = tread.attach(transformer, CONFIG)  # the first line
    if compiled is not None:
        handle.compile(**compiled)  # a third line, for speed
    if not routed:
        handle.detach()
    transformer, optimizer, train_dataloader, scheduler = accelerator.prepare(
        transformer, optimizer, train_dataloader, scheduler
    )
    global_step = 0
    if resume:
        accelerator.load_state(str(folder / "checkpoint"))
        global_step = HALFWAY
        train_dataloader = accelerator.skip_first_batches(train_dataloader, global_step * ACCUMULATION)
    transformer.train()
    for _step, batch in enumerate(train_dataloader):
        if accelerator.sync_gradients:
            handle.set_step(global_step)  # the second line
        with accelerator.accumulate([transformer]):
            prediction, target = denoise(case, transformer, batch.tolist(), accelerator.device, reentrant)
            loss = (prediction.float() - target.float()).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            global_step += 1
            if global_step == HALFWAY:
                accelerator.save_state(str(folder / "checkpoint"))
                validate(case, accelerator.unwrap_model(transformer))
        if global_step == stop_at:
            break
    accelerator.end_training()
    return {
        name: value.cpu().clone()
        for name, value in get_peft_model_state_dict(accelerator.unwrap_model(transformer)).items()
    }


def denoise(
    case: Model, transformer: Any, samples: list[int], device: torch.device, reentrant: bool = False
) -> tuple[Tensor, Tensor]:
    """One noisy batch through the model: the prediction and its target."""
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    shape = case.inputs(1)["hidden_states"].shape[1:]
    latents, noise = (
        torch.stack([torch.randn(shape, generator=one) for one in generators]).to(device) for _ in range(2)
    )
    sigma = torch.stack([torch.rand((), generator=one) for one in generators]).to(device)
    noisy = (1 - sigma[:, None, None]) * latents + sigma[:, None, None] * noise
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in case.inputs(len(samples)).items()
    }
    if reentrant:
        noisy.requires_grad_()  # it needs an input with a gradient, and the base is frozen
    arguments |= {"hidden_states": noisy, "timestep": sigma}
    return case.call(transformer, arguments), noise - latents


def validate(case: Model, transformer: Any) -> None:
    """As pipelines do: in eval mode, without gradients, and back to training."""
    transformer.eval()
    with torch.no_grad():
        prediction, _ = denoise(case, transformer, [1000, 1001], next(transformer.parameters()).device)
    assert prediction.isfinite().all()
    transformer.train()
