"""`handle.offload()` computes the same bits as the model without it, whatever is on the model.

On a CPU the slots are memory of their own too, so a layer that read a slot too late or too early would compute with
another layer's weights.
"""

from typing import Any

import pytest
import torch
from peft import LoKrConfig, LoraConfig
from torch import Tensor, nn

import tread
from tests.attach.attached import BY_NAME, FLUX, ROUTES, Attach
from tests.attach.offload.offloaded import DEPTH, assert_equal, compared, count_runs, train
from tests.attach.steps import LORA, TRACED, adapted, assert_same, inputs_of, step
from tread.attach.registry import layers_of
from tread.finetune.model.quantize import quantize
from tread.kernels.checkpointing import recomputing
from tread.kernels.offload.call import unless_offloaded
from tread.kernels.offload.offload import Offload

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_the_bits_are_those_of_the_model_on_the_device(
    name: str, checkpointed: bool, attach: Attach, poisoned: None
) -> None:
    def make() -> Any:
        model = adapted(BY_NAME[name])
        if checkpointed:
            model.enable_gradient_checkpointing()
        return model

    compared(BY_NAME[name], make, attach)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_some_layers(layers: int, attach: Attach) -> None:
    compared(FLUX, lambda: adapted(FLUX), attach, layers)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "nf4"])
def test_quantized_bases(precision: str, attach: Attach, poisoned: None) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model: Any = FLUX.model()
        quantize(model, precision, "cpu")
        model.add_adapter(LORA)
        return _started(model)

    handle = compared(FLUX, make, attach)
    assert handle.offloaded is not None
    host = handle.offloaded.calls[0].host
    assert host is not None
    assert any(tensor.dtype in (torch.int8, torch.uint8) for tensor in host.tensors)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["to_q", "to_v"], use_dora=True),
        LoraConfig(r=4, target_modules=["to_q", "to_v"], lora_dropout=0.3),
        LoKrConfig(r=4, target_modules=["to_q", "to_v"]),
    ],
    ids=["dora", "dropout", "lokr"],
)
def test_adapters(config: Any, attach: Attach, poisoned: None) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model: Any = FLUX.model().requires_grad_(False)
        model.add_adapter(config)
        return _started(model)

    compared(FLUX, make, attach)


def _started(model: nn.Module) -> nn.Module:
    """Training, with an adapter that is not zero."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def test_backward_inside_autocast(attach: Attach) -> None:
    """The recomputation has the forward's autocast, and no casts that the pass without gradients left in its cache."""
    inputs = inputs_of(FLUX, "cpu")

    def gradients(handle: tread.Attachment) -> dict[str, Tensor]:
        model = handle.model.bfloat16() if handle.offloaded is None else handle.model
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        handle.set_step(0)
        with torch.autocast("cpu", torch.bfloat16):
            FLUX.call(model, inputs).float().square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(attach(adapted(FLUX), ROUTES))
    model = adapted(FLUX).bfloat16()
    found = gradients(attach(model, ROUTES).offload(DEPTH))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layers", [2, pytest.param(DEPTH, marks=pytest.mark.contract)])
@pytest.mark.parametrize("checkpointing", [True, pytest.param(None, marks=pytest.mark.contract)])
def test_compiled_layers(checkpointing: bool | None, layers: int, attach: Attach, poisoned: None) -> None:
    """Each length has code of its own also where some layers are offloaded and the others checkpointed."""
    plain, model, told = adapted(FLUX), adapted(FLUX), list[str]()
    expected = train(FLUX, plain, attach(plain, ROUTES))
    handle = attach(model, ROUTES).offload(layers)
    handle.compile(checkpointing=checkpointing, shapes=2, say=told.append, **TRACED)
    for one, other in zip(train(FLUX, model, handle), expected, strict=True):
        assert_same(one, other)
    assert handle.fast is not None
    assert not handle.fast.failed
    assert not any("saw more than" in line for line in told), told


def test_validation_between_steps(attach: Attach, poisoned: None) -> None:
    plain, model, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    handles = [attach(plain, ROUTES), attach(model, ROUTES).offload(DEPTH)]
    for number, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
        with mode():
            drawn = [FLUX.call(one.eval(), inputs) for one in (plain, model)]
        assert torch.equal(*drawn)
        plain.train()
        model.train()
        assert_equal([step(FLUX, model, handles[1], inputs, number)], [step(FLUX, plain, handles[0], inputs, number)])


def test_two_forwards_before_one_backward(attach: Attach, poisoned: None) -> None:
    inputs = inputs_of(FLUX, "cpu")

    def gradients(handle: tread.Attachment) -> dict[str, Tensor]:
        handle.set_step(0)
        losses = [FLUX.call(handle.model, inputs).square().mean() for _ in range(2)]
        (losses[0] + 2 * losses[1]).backward()
        return {name: p.grad for name, p in handle.model.named_parameters() if p.grad is not None}

    expected = gradients(attach(adapted(FLUX), ROUTES))
    found = gradients(attach(adapted(FLUX), ROUTES).offload(DEPTH))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_routes(poisoned: None) -> None:
    """`Offload` alone is what a dense model gets."""
    plain, model, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    offload = Offload(model, layers_of(model), DEPTH, say=lambda _: None)
    model.enable_gradient_checkpointing(unless_offloaded(recomputing(True)))
    runs = count_runs(model)
    made = []
    for one in (plain, model):
        FLUX.call(one, inputs).square().mean().backward()
        made.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert len(runs) == 2 * DEPTH
    offload.remove()
