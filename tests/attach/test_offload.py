"""`handle.offload()`: the same bits as without it, whatever is on the model; nothing is left behind.

On a CPU the slots are memory of their own too, so a layer that read a slot too late or too early would compute with
another layer's weights.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from peft import LoKrConfig, LoraConfig
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tread
from tests.attach.attached import BY_NAME, FLUX, ROUTES, Attach
from tests.attach.test_fast import LORA, TRACED, adapted, assert_same, inputs_of, step
from tests.tiny.case import Case
from tread.attach.registry import layers_of
from tread.errors import ConfigError
from tread.finetune.model.quantize import quantize
from tread.kernels.checkpointing import recomputing
from tread.kernels.offload import offload as offloading
from tread.kernels.offload.call import is_offloaded, unless_offloaded
from tread.kernels.offload.offload import Offload
from tread.kernels.offload.ring import SLOTS, Slot
from tread.routing import recompute

pytestmark = pytest.mark.filterwarnings("ignore")
DEPTH = len(layers_of(FLUX.model()))
STEPS = 3


@pytest.fixture(autouse=True)
def fresh(attach: Attach) -> Iterator[None]:
    """Everything is detached, and then nothing is compiled any more."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is NaN from the moment that its layer is done with it, and has to be fetched again."""
    release = Slot.release

    def poison(slot: Slot) -> None:
        release(slot)
        slot.block.fill_(255)
        slot.holds = None

    monkeypatch.setattr(Slot, "release", poison)


def train(case: Case, model: nn.Module, handle: tread.Attachment) -> list[Any]:
    """Predictions and gradients of a few steps, with draws from torch's own generator."""
    torch.manual_seed(5)
    inputs = inputs_of(case, "cpu")
    return [step(case, model, handle, inputs, number) for number in range(STEPS)]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Bit for bit, with a gradient for every parameter that had one."""
    for (prediction, gradients), (other, others) in zip(found, expected, strict=True):
        assert torch.equal(prediction, other)
        assert gradients.keys() == others.keys()
        assert gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name


def compared(case: Case, make: Callable[[], Any], attach: Attach, layers: int | None = None) -> tread.Attachment:
    """Train a model as it is and with layers offloaded; returns the handle of the second."""
    plain = make()
    expected = train(case, plain, attach(plain, ROUTES))
    model = make()
    handle = attach(model, ROUTES)
    count = len(layers_of(model)) if layers is None else layers
    assert handle.offload(count, say=lambda _: None) is handle
    assert sum(is_offloaded(layer) for layer in layers_of(model)) == count
    assert_equal(train(case, model, handle), expected)
    return handle


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
    handle = attach(model, ROUTES).offload(layers).compile(checkpointing=checkpointing, say=told.append, **TRACED)
    for one, other in zip(train(FLUX, model, handle), expected, strict=True):
        assert_same(one, other)
    assert handle.fast is not None
    assert not handle.fast.failed
    assert not any("saw more than" in line for line in told), told


def count_runs(model: nn.Module) -> list[nn.Module]:
    """The layers that run from now on, in order."""
    runs: list[nn.Module] = []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda layer, args, output: runs.append(layer))
    return runs


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_fetches_each_layer_twice_less_what_the_slots_hold(checkpointed: bool, attach: Attach) -> None:
    """Backward begins with the last layers of forward, and the next forward with the first ones."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES).offload(DEPTH)
    assert handle.offloaded is not None
    ring, counts, runs = handle.offloaded.ring, [], count_runs(model)
    for number in range(4):
        before = ring.fetches
        step(FLUX, model, handle, inputs, number)
        counts.append(ring.fetches - before)
    assert counts[1:] == [2 * (DEPTH - SLOTS)] * 3
    assert len(runs) == 4 * 2 * DEPTH, "once in forward and once in backward, checkpointed or not"
    with torch.no_grad():
        before = ring.fetches
        FLUX.call(model, inputs)
    assert ring.fetches - before <= DEPTH


def test_layers_are_fetched_ahead_from_the_second_step_on(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's turn comes its copy has been asked for already."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    handle = attach(model, ROUTES).offload(DEPTH)
    assert handle.offloaded is not None
    ring, late = handle.offloaded.ring, []
    visit = ring.visit

    def watched(how: Any, host: Any) -> Any:
        late.append(ring._held(host) is None)
        return visit(how, host)

    monkeypatch.setattr(ring, "visit", watched)
    step(FLUX, model, handle, inputs, 0)
    assert any(late)
    late.clear()
    step(FLUX, model, handle, inputs, 1)
    assert not any(late)


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


def test_the_weights_are_as_they_were(attach: Attach, tmp_path: Path) -> None:
    """In `state_dict`, in saved files, in copies, and after `detach`, which leaves nothing of it."""
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock = {name: dict(vars(module)) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    handle = attach(model, ROUTES).offload(DEPTH)
    step(FLUX, model, handle, inputs)

    def assert_kept(found: dict[str, Tensor]) -> None:
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)

    assert_kept(model.state_dict())
    model.save_pretrained(tmp_path)
    assert_kept(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_kept(copied.state_dict())
        assert not any(is_offloaded(layer) for layer in layers_of(copied))
        copied.to(torch.float64)
    model.zero_grad(set_to_none=True)
    handle.detach()
    assert_kept(model.state_dict())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == stock
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(is_offloaded(layer) for layer in layers_of(model))


def test_detached_between_forward_and_backward(attach: Attach) -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    expected = step(FLUX, model, attach(model, ROUTES), inputs)[1]
    model.zero_grad()
    handle = attach(model, ROUTES).offload(DEPTH)
    handle.set_step(3)
    loss = FLUX.call(model, inputs).float().square().mean()
    handle.detach()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert handle not in recompute._handles


def test_moving_the_model_leaves_offloaded_weights_alone(attach: Attach) -> None:
    model = adapted(FLUX)
    attach(model, ROUTES).offload(2)
    held = model.transformer_blocks[0].attn.to_q.base_layer.weight
    start = held.data_ptr()
    model.to("cpu").to(torch.device("cpu"))
    assert held.data_ptr() == start
    with pytest.raises(ConfigError, match="keep their dtype"):
        model.to(torch.float64)


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


def test_ddp_leaves_offloaded_weights_alone(tmp_path: Path) -> None:
    """It requires its parameters on one device, and synchronises them."""
    plain, model, inputs = adapted(FLUX), adapted(FLUX), inputs_of(FLUX, "cpu")
    Offload(model, layers_of(model), DEPTH, say=lambda _: None)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        held = {id(parameter) for parameter in wrapped._module_parameters}
        layers = [parameter for layer in layers_of(model) for parameter in layer.parameters()]
        assert all((id(parameter) in held) == parameter.requires_grad for parameter in layers)
        for one in (plain, wrapped):
            FLUX.call(one, inputs).square().mean().backward()
    finally:
        distributed.destroy_process_group()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


def test_auto_leaves_a_cpu_alone(attach: Attach) -> None:
    model = adapted(FLUX)
    told: list[str] = []
    attach(model, ROUTES).offload("auto", say=told.append)
    assert not any(is_offloaded(layer) for layer in layers_of(model))
    assert told == ["0 of 5 layers offloaded: 0.00 GiB in host memory, 0.00 GiB of slots on cpu."]


@pytest.mark.parametrize(("room", "stay"), [(0.0, 5), (2.5, 3), (9.0, 0)])
def test_auto_brings_back_what_the_first_step_left_room_for(
    room: float, stay: int, attach: Attach, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a GPU are given here: `room` is what its fullest moment left, in layers."""
    plain, model = adapted(FLUX), adapted(FLUX)
    expected = train(FLUX, plain, attach(plain, ROUTES))
    monkeypatch.setattr(offloading, "would_be_free", lambda model, device: 0)
    handle = attach(model, ROUTES).offload("auto")
    assert handle.offloaded is not None
    largest = max(call.host.size for call in handle.offloaded.calls if call.host is not None)
    monkeypatch.setattr(offloading, "peak_left", lambda device, margin: room * largest)
    blocks = {ref(call.host.block) for call in handle.offloaded.calls if call.host is not None}
    recomputed = count_runs(model)
    assert_equal(train(FLUX, model, handle), expected)
    offloaded = sum(is_offloaded(layer) for layer in layers_of(model))
    assert offloaded <= stay
    assert (offloaded > 0) == (stay > 0)
    assert sum(block() is not None for block in blocks) == offloaded
    # a layer that came back is computed again as before, or a step would take more memory than the first one showed
    assert len(recomputed) == 2 * STEPS * DEPTH


def test_sharded_layers_are_refused(attach: Attach, tmp_path: Path) -> None:
    model = adapted(FLUX)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model.transformer_blocks[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="sharded by FSDP"):
            attach(model, ROUTES).offload(1)
    finally:
        distributed.destroy_process_group()


class Strange(nn.Module):
    """A linear with a trained scale that is kept elsewhere, as lycoris keeps its adapters."""

    def __init__(self, linear: Any, scale: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.others = linear, [scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.others[0]


def test_what_cannot_be_offloaded(attach: Attach) -> None:
    model, inputs = adapted(FLUX), inputs_of(FLUX, "cpu")
    handle = attach(model, ROUTES)
    with pytest.raises(ConfigError, match="offload is 6, but the model has 5 layers"):
        handle.offload(6)
    with pytest.raises(ConfigError, match="all weights of the layers are trained"):
        attach(FLUX.model(), ROUTES).offload(1)
    handle.compile(**TRACED)
    with pytest.raises(ConfigError, match=r"comes before handle.compile"):
        handle.offload(1)
    handle = attach(model, ROUTES).offload(DEPTH)
    layers_of(model)[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="were unfrozen"):
        step(FLUX, model, handle, inputs)
    handle.detach()
    strange: Any = adapted(FLUX)
    attention = strange.transformer_blocks[0].attn
    attention.to_q = Strange(attention.to_q, nn.Parameter(torch.ones(())))
    handle = attach(strange, ROUTES).offload(DEPTH)
    with pytest.raises(ConfigError, match="neither its argument nor its parameter"):
        step(FLUX, strange, handle, inputs)


def test_weights_of_other_libraries_are_refused(attach: Attach) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = adapted(FLUX)
    quantization.quantize_(model.transformer_blocks[0].ff, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ConfigError, match="cannot be offloaded: quantize the base to"):
        attach(model, ROUTES).offload(DEPTH)
