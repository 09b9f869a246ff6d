"""LoRA steps on stock diffusers models of released shapes, with random weights made on the device.

- The adapter, the quantized base and routing are the product's own functions; so is the way layers are compiled.
- One model serves all variants of a script: a variant sets precision, attention and compilation, and undoes them
  afterwards. Quantizing the base cannot be undone, so it comes last.
- LoRA's second matrices start as noise: at their usual zero, products on zeros would run faster than in training.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

import tread
from benchmarks.common.kinds import by_kind
from benchmarks.common.profile import profile_routing
from benchmarks.common.record import Facts, Record, options
from benchmarks.common.steps import WARM_STEPS, Steps, Work, compile_options, job_config, stepping
from tread.attach.registry import layers_of
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.quantize import METHODS, check_precision, quantize
from tread.kernels.attention.kernel import Attention
from tread.kernels.compiling import lengths
from tread.kernels.fast import Fast
from tread.training.settings import OptimizerName

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
RANK = 16
NOTES = {"lora_rank": RANK, "route": "0.5 over 2..-2"}
"""Facts recorded for every shape."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the same step."""

    name: str
    sdpa: Attention = "auto"
    """The product's `attention`."""
    lora: Literal["float32", "bf16", "bf16 + float32 copy"] = "float32"
    """float32 weights under autocast; or bf16 weights without it, stepped as they are or through a float32 copy."""
    graphs: bool = True
    """The product's `graphs`."""
    compiled: str | None = "default"
    """torch.compile's mode for each layer; None: eager."""
    around: bool = False
    """Whether torch's checkpointing wraps compiled layers, instead of being compiled into them."""
    selective: bool = False
    """The product's `gradient_checkpointing: selective`, of the row that is not checkpointed."""
    base: str = "bf16"
    """The frozen base: bf16, one of the product's `base_model_precision`, or a trial of benchmarks.common.float8."""

    @property
    def beyond(self) -> list[str]:
        """The parts of this variant that no setting of the product gives."""
        flags = {
            "torch's checkpointing around compiled layers": self.around,
            f"LoRA in {self.lora}": self.lora != "float32",
            f"compile mode {self.compiled}": self.compiled not in (None, "default"),
            "trial of a base": self.base != "bf16" and self.base not in METHODS,
        }
        return [words for words, true in flags.items() if true]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A stock model and its inputs, at one size."""

    model: Callable[[], nn.Module]
    """Builds the model on the current device in the current dtype."""
    inputs: Callable[..., dict[str, Any]]
    """The forward's arguments on a device; benchmarks.buckets also passes rows, columns and text tokens."""
    notes: dict[str, Any]
    """Tokens and layers, for the record."""
    loss: Callable[[nn.Module, Any, int], Tensor] | None = None
    """The loss of a batch, where the inputs are not the forward's arguments."""


def build(shape: Shape, device: torch.device) -> nn.Module:
    """The model in bf16 with an adapter, allocated on the device directly, without a copy in host memory."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = shape.model()
    finally:
        torch.set_default_dtype(before)
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in kept):  # as loading a released model does
            parameter.data = parameter.data.float()
    return model.train()


def adapt(model: nn.Module) -> None:
    """Add the product's LoRA."""
    add_adapter(model, kind="standard", rank=RANK, alpha=RANK, targets=TARGETS, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)


def set_base(model: nn.Module, base: str, device: torch.device) -> None:
    """Quantize the frozen linears of the layers, before or after the adapter as the method needs it."""
    from benchmarks.common import float8

    if base in float8.BASES:
        adapt(model)
        float8.BASES[base](model)
    else:
        if base != "bf16":
            check_precision(base, device)
            quantize(model, base, device)
        adapt(model)


@contextmanager
def lora_steps(
    model: nn.Module,
    shape: Shape,
    variant: Variant,
    device: torch.device,
    *,
    checkpointed: bool,
    routes: Mapping[str, Any] | str = ROUTES,
    optimizer: OptimizerName = "adamw",
) -> Iterator[Steps]:
    """Steps of one variant on a model with its adapter; the model is restored afterwards."""
    dtype = torch.float32 if variant.lora == "float32" else torch.bfloat16
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)
    autocast = dtype == torch.float32
    inputs = shape.inputs(device)
    if not autocast:
        inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    handle = tread.attach(model, routes)
    mode = variant.compiled
    within = "selective" if variant.selective else checkpointed and mode is not None and not variant.around
    work = Work(
        model=model,
        handle=handle,
        batch=inputs,
        loss_of=shape.loss or _loss,
        fast=lambda: Fast(
            model,
            layers_of(model),
            [handle],
            compiled=mode is not None,
            checkpointing=within,
            graphs=variant.graphs and device.type == "cuda",
            attention=variant.sdpa,
            shapes=lengths(handle.plan),
            **compile_options(mode or "default", device),
        ),
    )
    config = job_config(
        batch_size=1,
        autocast=autocast,
        compiled=mode is not None,
        attention=variant.sdpa,
        graphs=variant.graphs,
        ema=False,
        optimizer=optimizer,
    )
    try:
        with _checkpointing(model, checkpointed and not within), stepping(work, config, device) as steps:
            if variant.lora == "bf16 + float32 copy":
                steps.session.optimizer = Copied(trained, lr=1e-4, fused=device.type == "cuda")
            yield steps
    finally:
        handle.detach()


@contextmanager
def _checkpointing(model: Any, on: bool) -> Iterator[None]:
    """Enable torch's checkpointing around layers."""
    before = model.is_gradient_checkpointing
    _checkpoint(model, on)
    try:
        yield
    finally:
        _checkpoint(model, before)


def _checkpoint(model: Any, on: bool) -> None:
    model.enable_gradient_checkpointing() if on else model.disable_gradient_checkpointing()


def _loss(model: nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
    prediction = model(**batch, return_dict=False)[0]
    return mse_loss(prediction.float(), torch.ones_like(prediction, dtype=torch.float32))


class Copied(Optimizer):
    """AdamW on a float32 copy of bf16 parameters."""

    def __init__(self, parameters: Sequence[Tensor], *, lr: float, fused: bool) -> None:
        self._given = list(parameters)
        self._copies = [parameter.detach().float() for parameter in self._given]
        self._adamw = torch.optim.AdamW(self._copies, lr=lr, fused=fused)
        super().__init__(self._given, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for copy, parameter in zip(self._copies, self._given, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self._adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._adamw.step()
        torch._foreach_copy_(self._given, self._copies)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements that a script takes of each variant."""

    rows: dict[bool, str]
    """The rows of the table by whether layers are checkpointed."""
    rounds: int = 3
    warm_steps: int = WARM_STEPS
    profiled: str | None = None
    """The variant whose routing overhead is profiled; if set, variants with graphs record time by kind of kernel."""


def measure_variants(record: Record, shape: Shape, variants: Sequence[Variant], plan: Plan) -> None:
    """Measure variants in order; the model is rebuilt only if the next variant has another base."""
    base, model = "", None
    for variant in variants:
        if variant.base != base:
            model = None  # frees the memory before the next one is made
            base, model = variant.base, _made(record, shape, variant)
        try:
            _measure_variant(record, shape, variant, plan, model)
        except Exception as error:  # before the first step: measurements keep their own
            record.measure(variant.name, partial(_raise, error), row=next(iter(plan.rows.values())))


def _measure_variant(record: Record, shape: Shape, variant: Variant, plan: Plan, model: nn.Module | None) -> None:
    facts: Facts = {"variant": asdict(variant), "beyond": variant.beyond, "shapes": shape.notes | NOTES}
    if model is None:
        for row in plan.rows.values():
            record.measure(variant.name, partial(_raise, RuntimeError("the model was not made")), row=row, **facts)
        return
    for checkpointed, row in plan.rows.items():
        if checkpointed and variant.selective:
            continue
        with lora_steps(model, shape, variant, record.device, checkpointed=checkpointed) as steps:
            compare = partial(_compare, record, steps, plan)
            record.measure(variant.name, compare, row=row, checkpointed=checkpointed, **facts)
            if variant.name == plan.profiled and not record.warm and not variant.graphs:
                record.measure(f"{row}, {variant.name}", partial(profile_routing, steps), row="routing")
            if plan.profiled and variant.graphs and not record.warm:
                record.measure(f"{row}, {variant.name}", partial(by_kind, steps), row="kinds")


def _raise(error: Exception) -> Facts:
    raise error


def _made(record: Record, shape: Shape, variant: Variant) -> nn.Module | None:
    made: list[nn.Module] = []

    def make() -> Facts:
        start = time.monotonic()
        model = build(shape, record.device)
        set_base(model, variant.base, record.device)
        made.append(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        return {"summary": {"parameters": count, "build_seconds": round(time.monotonic() - start, 1)}}

    record.measure(f"build, {variant.base} base", make, row="set-up")
    return made[0] if made else None


def _compare(record: Record, steps: Steps, plan: Plan) -> Facts:
    if record.warm:
        return steps.warm_up(1)
    return steps.compare(seconds=record.seconds, warm_steps=plan.warm_steps, rounds=plan.rounds)


def run_script(
    name: str,
    description: str | None,
    arguments: Sequence[str] | None,
    *,
    variants: Sequence[Variant],
    chosen: Sequence[str],
    shapes: dict[str, Shape],
    plan: Plan,
) -> int:
    """The body of a script of this kind; `shapes` are `full`, `shallow` for compiling ahead, and `smoke`."""
    parser = options(description, [variant.name for variant in variants], chosen)
    parser.add_argument("--rows", nargs="+", choices=list(plan.rows.values()), help="of the table; all of the script's")
    given = parser.parse_args(arguments)
    record = Record(name, given)
    plan = replace(plan, rows={key: row for key, row in plan.rows.items() if row in (given.rows or plan.rows.values())})
    by_name = {variant.name: variant for variant in variants}
    size = "smoke" if given.smoke else "shallow" if given.warm else "full"
    plan = replace(plan, rounds=2) if given.smoke else plan
    measure_variants(record, shapes[size], [by_name[one] for one in given.variants], plan)
    return 0
