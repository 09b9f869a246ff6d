"""Anyone's training loop: a stock diffusers model, peft's LoRA, torch's AdamW and autocast, and tread's public calls.

    python -m benchmarks.loop                                        # FLUX.1-dev, every way to run it
    python -m benchmarks.loop --models sd3 wan qwen flux2 --ways call --rows checkpointed

- A way is one line that a user adds after `tread.attach`: nothing, `handle.compile()`, the same with selective
  checkpointing or with dense steps alone recomputed, or his own `compile_repeated_blocks()`. Dense and routed steps
  alternate on one model.
- `trainer` is the same work by `tread finetune`'s own step (benchmarks.common.lora), for comparison in one run.
- Without `handle.compile()` attention is torch's flash kernel: torch 2.11's own way to cuDNN fails on FLUX.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

import tread
from benchmarks import flux, sd3, wan
from benchmarks.common import flux2, qwen
from benchmarks.common.flops import count_flops
from benchmarks.common.lora import ROUTES, Shape, Variant, build, lora_steps
from benchmarks.common.record import Facts, Record, compared, options
from benchmarks.common.steps import WARM_STEPS, compile_options
from benchmarks.common.timing import alternate, clocks, watched

MODELS = {"flux": flux.SHAPES, "sd3": sd3.SHAPES, "wan": wan.SHAPES, "qwen": qwen.SHAPES, "flux2": flux2.SHAPES}
LORA = LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
ROWS = {"checkpointed": True, "plain": False}
WAYS: dict[str, Callable[..., object]] = {
    "call": lambda model, handle, **options: handle.compile(**options),
    "selective": lambda model, handle, **options: handle.compile(checkpointing="selective", **options),
    "dense-steps": lambda model, handle, **options: handle.compile(checkpointing="dense", **options),
    "own-compile": lambda model, handle, **options: model.compile_repeated_blocks(**options),
    "eager": lambda model, handle, **options: None,
}
CALLS = ("call", "selective", "dense-steps")
"""The ways with CUDA graphs."""


class Loop:
    """A user's loop: model, handle, optimizer and one batch."""

    def __init__(self, model: nn.Module, handle: tread.Attachment, batch: dict[str, Any]) -> None:
        self.model, self.handle, self.batch = model, handle, batch
        self.device = next(model.parameters()).device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.steps = 0

    def routed(self) -> dict[str, Tensor]:
        """One training step."""
        self.handle.set_step(self.steps)
        self.steps += 1
        with torch.autocast(self.device.type, torch.bfloat16):
            (prediction,) = self.model(**self.batch, return_dict=False)
        # Z-Image returns a list
        whole = prediction if isinstance(prediction, Tensor) else torch.stack(prediction)
        loss = (whole.float() - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.detach()}

    def dense(self) -> dict[str, Tensor]:
        """One training step with all tokens in all layers."""
        with self.handle.dense():
            return self.routed()


@contextmanager
def looping(model: Any, shape: Shape, device: torch.device, *, checkpointed: bool) -> Iterator[Loop]:
    """A loop over an attached model; afterwards the model is as it was."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.enable_gradient_checkpointing() if checkpointed else model.disable_gradient_checkpointing()
    handle = tread.attach(model, ROUTES)
    try:
        yield Loop(model, handle, shape.inputs(device))
    finally:
        handle.detach()
        for module in model.modules():
            module._compiled_call_impl = None
        torch._dynamo.reset()


def compare(record: Record, model: Any, shape: Shape, way: str, checkpointed: bool) -> Facts:
    """Dense and routed steps of one way, against what their FLOPs say."""
    with looping(model, shape, record.device, checkpointed=checkpointed) as loop:
        kinds = {"routed": loop.routed, "dense": loop.dense}
        flops = {name: count_flops(step, record.device).total for name, step in kinds.items()}
        WAYS[way](model, loop.handle, **compile_options("default", record.device))
        alone = {}
        for name, step in kinds.items():
            for _ in range(WARM_STEPS):
                step()
            alone[name] = watched(step, record.device, graphs=way in CALLS)
        times = alternate(kinds, record.device, seconds=record.seconds, rounds=2 if record.smoke else 3)
        seen = clocks()
        found = {name: asdict(timing) | alone[name] for name, timing in times.items()}
    return {"clocks": seen} | compared(found["dense"], found["routed"], flops["dense"], flops["routed"])


def compare_trainer(record: Record, model: Any, shape: Shape, checkpointed: bool) -> Facts:
    """The same work by the trainer's step."""
    model.disable_gradient_checkpointing()
    graphs = Variant(name="graphs", graphs=record.device.type == "cuda")
    with lora_steps(model, shape, graphs, record.device, checkpointed=checkpointed) as steps:
        return steps.compare(seconds=record.seconds, rounds=2 if record.smoke else 3)


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """The model in bf16 with peft's LoRA in float32, its second matrices at noise instead of zero."""
    model: Any = build(shape, device)
    model.requires_grad_(False)
    model.add_adapter(LORA)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return model.train()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen ways on the chosen models."""
    ways = [*WAYS, "trainer"]
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["flux"])
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="in this order")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="checkpointed or not")
    given = parser.parse_args(arguments)
    record = Record("loop", given)
    for name in given.models:
        shape = MODELS[name]["smoke" if record.smoke else "shallow" if record.warm else "full"]
        made: list[nn.Module] = []
        record.measure(f"build {name}", lambda shape=shape, made=made: _build(shape, record.device, made), row="set-up")
        for row in given.rows if made else ():
            for way in given.ways:
                facts = {"row": f"loop-{name}-{row}", "checkpointed": ROWS[row], "shapes": shape.notes}
                run = compare_trainer if way == "trainer" else partial(compare, way=way)
                record.measure(way, partial(run, record, made[0], shape, checkpointed=ROWS[row]), **facts)
    return 0


def _build(shape: Shape, device: torch.device, made: list[nn.Module]) -> Facts:
    made.append(make_model(shape, device))
    return {"summary": {"parameters": sum(parameter.numel() for parameter in made[0].parameters())}}


if __name__ == "__main__":
    raise SystemExit(main())
