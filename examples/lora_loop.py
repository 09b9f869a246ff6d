"""A complete LoRA loop on a stock FLUX transformer; routing is the four lines with `handle`.

    python examples/lora_loop.py                    # a tiny model with random weights, made-up latents
    accelerate launch examples/lora_loop.py --model FOLDER --data LATENTS --steps 2000

FOLDER is a diffusers model (its `transformer` is used); LATENTS holds safetensors files, one per image, with `latents`
(16, H, W), `prompt_embeds` (T, 4096) and `pooled` (768,). The adapter loads with `FluxPipeline.load_lora_weights`.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle

import tread

TINY: Any = {"in_channels": 16, "num_layers": 4, "num_single_layers": 4, "num_attention_heads": 2}
TINY |= {"attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 32}
SHAPES = {"latents": (4, 16, 24), "prompt_embeds": (8, 32), "pooled": (32,)}
ROUTE = {"selection_ratio": 0.25, "start_layer_idx": 3, "end_layer_idx": -4}


def batches(folder: Path | None, size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Batches without end, from the files of a folder or made up."""
    found = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(4)]
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if folder and not files:
        raise SystemExit(f"no .safetensors files in {folder}: --data names a folder of latents.")
    while True:
        for chosen in torch.randperm(len(files) or len(found)).split(size):
            samples = [load_file(files[i]) if files else found[i] for i in chosen.tolist()]
            yield {name: torch.stack([sample[name] for sample in samples]).to(device) for name in SHAPES}


def flow_errors(model: nn.Module, batch: dict[str, Tensor], noise: Tensor, time: Tensor) -> Tensor:
    """The rectified flow loss of FLUX for each token, (B, S): latents in 2 x 2 patches, ids (image, row, column)."""
    latents, mix = batch["latents"], time.view(-1, 1, 1, 1)
    noisy, target = (pixel_unshuffle(x, 2) for x in ((1 - mix) * latents + mix * noise, noise - latents))
    rows, columns = (torch.arange(size, device=latents.device) for size in noisy.shape[2:])
    inputs = {
        "hidden_states": noisy.flatten(2).transpose(1, 2),  # (B, S, 4C)
        "encoder_hidden_states": batch["prompt_embeds"],
        "pooled_projections": batch["pooled"],
        "timestep": time,
        "img_ids": torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns),  # (S, 3)
        "txt_ids": rows.new_zeros(batch["prompt_embeds"].shape[1], 3),
        "guidance": torch.ones_like(time),
    }
    return (model(**inputs, return_dict=False)[0] - target.flatten(2).transpose(1, 2)).square().mean(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA on FLUX with routing.")
    parser.add_argument("--model", help="a diffusers model with a FLUX transformer (default: a tiny one)")
    parser.add_argument("--data", type=Path, help="a folder of safetensors files (default: made-up latents)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/lora-loop"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    device = accelerator.device

    model = FluxTransformer2DModel(**TINY, guidance_embeds=True)
    if options.model:
        model = FluxTransformer2DModel.from_pretrained(
            options.model, subfolder="transformer", torch_dtype=torch.bfloat16
        )
        model.enable_gradient_checkpointing()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    # routing, from the next training forward on; the last steps run dense, as the model will
    schedule = {"cooldown_fraction": 0.15, "total_steps": options.steps}
    handle = tread.attach(model, {"routes": [ROUTE], "schedule": schedule})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.data = parameter.data.float()  # small steps would be lost in bfloat16
    wrapped, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(trainable, lr=1e-3))

    data = batches(options.data, 2, device)
    first = next(data)
    fixed = torch.randn_like(first["latents"]), torch.linspace(0.3, 0.7, len(first["latents"]), device=device)
    for step in range(options.steps):
        if step == 0 or step == options.steps - 1:
            with torch.no_grad():  # validation runs dense by itself
                print(f"step {step}: dense loss {flow_errors(wrapped, first, *fixed).mean().item():.4f}")
        handle.set_step(step)  # where the schedule is; and a resumed run drops the same tokens
        batch = next(data)
        noise, time = torch.randn_like(batch["latents"]), torch.rand(len(batch["latents"]), device=device)
        errors, kept = flow_errors(wrapped, batch, noise, time), handle.kept
        # dropped tokens have little to learn from: they carry no loss
        accelerator.backward(errors.mean() if kept is None else (errors * kept).sum() / kept.sum())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        layers: Any = get_peft_model_state_dict(model)
        FluxPipeline.save_lora_weights(options.out, transformer_lora_layers=layers)
        print(f"adapter: {options.out}/pytorch_lora_weights.safetensors")


if __name__ == "__main__":
    main()
