"""What `attach` promises beside the contract: the handle, wrappers, errors, and a model of one's own."""

import copy
import json
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from case import Case
from cases import CASES
from diffusers.models.transformers import transformer_flux
from peft import LoraConfig, get_peft_model
from selected import route
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tread
from tread.attach.families import REFUSED

pytestmark = pytest.mark.filterwarnings("ignore")

BY_NAME = {case.name: case for case in CASES}
FLUX, KONTEXT = BY_NAME["flux"], BY_NAME["flux-kontext"]
ROUTES = {"routes": [route(1, -2)]}
Attach = Callable[..., tread.Attachment]


def rotary_function() -> Any:
    """What FLUX's layers look up to rotate."""
    return vars(transformer_flux)["apply_rotary_emb"]


@pytest.fixture
def attach() -> Iterator[Attach]:
    """`tread.attach`, taken back at the end: rotary functions are shared by all models of a process."""
    handles: list[tread.Attachment] = []

    def record(*args: Any, **kwargs: Any) -> tread.Attachment:
        handles.append(tread.attach(*args, **kwargs))
        return handles[-1]

    yield record
    for handle in handles:
        handle.detach()


def routed(case: Case, model: nn.Module, handle: tread.Attachment, step: int = 0) -> torch.Tensor:
    handle.set_step(step)
    return case.call(model, case.inputs(2)).detach()


@pytest.fixture
def expected() -> torch.Tensor:
    """FLUX routed at step 0."""
    model = FLUX.model()
    with tread.attach(model, ROUTES) as handle:
        return routed(FLUX, model, handle)


def test_a_second_attach_replaces_the_first(attach: Attach):
    model = FLUX.model()
    first = attach(model, ROUTES)
    second = attach(model, {"routes": [route(0, -1, 0.75)]})
    FLUX.call(model, FLUX.inputs(2))
    assert first.selections == []
    assert second.selections[0].shape == (2, 4)
    first.detach()  # nothing of the second's goes with it
    FLUX.call(model, FLUX.inputs(2))
    assert second.selections[0].shape == (2, 4)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 1 + FLUX.depth


def test_the_handle_is_a_context_manager_that_detaches_on_errors_too():
    model = FLUX.model()
    with pytest.raises(RuntimeError, match="mine"), tread.attach(model, ROUTES):
        raise RuntimeError("mine")
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: ROUTES,
        lambda folder: json.dumps(ROUTES),
        lambda folder: folder / "plan.json",
        lambda folder: "lora",
    ],
    ids=["mapping", "JSON", "file", "preset"],
)
def test_every_form_of_a_config(form: Callable[[Path], Any], tmp_path: Path):
    (tmp_path / "plan.json").write_text(json.dumps({"tread_config": ROUTES}))
    model = build_flux(layers=4, single=6)
    with tread.attach(model, form(tmp_path)) as handle:
        model(**FLUX.inputs(2))
        assert handle.plan.routes[0].end_layer_idx > 0, "resolved against the depth"
        assert len(handle.selections) == 1


def build_flux(layers: int, single: int) -> Any:
    config = dict(FLUX.build().config) | {"num_layers": layers, "num_single_layers": single}
    model: Any = transformer_flux.FluxTransformer2DModel.from_config(config)
    return model.train()


def test_the_seed_decides_and_replaces_the_plans(attach: Attach):
    model, other = FLUX.model(), FLUX.model()
    ours = attach(model, {**ROUTES, "seed": 1}, seed=7)
    theirs = attach(other, {**ROUTES, "seed": 7})
    assert routed(FLUX, model, ours).equal(routed(FLUX, other, theirs))
    assert not routed(FLUX, model, attach(model, ROUTES, seed=8)).equal(routed(FLUX, other, theirs))


def test_an_unknown_class_names_the_nearest_family_and_the_how_to(attach: Attach):
    class FluxTransformer3DModel(nn.Module):
        pass

    with pytest.raises(tread.ConfigError, match="there is no family for FluxTransformer3DModel") as error:
        attach(FluxTransformer3DModel(), ROUTES)
    assert "Did you mean 'FluxTransformer2DModel'?" in str(error.value)
    assert "docs/families.md says how to declare one with tread.Family." in str(error.value)
    assert (Path(__file__).parents[2] / "docs" / "families.md").is_file()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_class_says_why(attach: Attach, name: str):
    model = type(name, (nn.Module,), {})()
    with pytest.raises(tread.ConfigError) as error:
        attach(model, ROUTES)
    assert str(error.value) == f"{name} cannot be routed: {REFUSED[name]}"


def test_a_subclass_is_found_through_the_mro(expected: torch.Tensor):
    class Mine(transformer_flux.FluxTransformer2DModel):
        pass

    model = FLUX.model()
    model.__class__ = Mine
    with tread.attach(model, ROUTES) as handle:
        assert routed(FLUX, model, handle).equal(expected)


def test_mistakes_in_a_plan_are_refused_and_leave_nothing_behind(attach: Attach):
    model = FLUX.model()
    with pytest.raises(tread.ConfigError, match="outside a model of 5 layers"):
        attach(model, {"routes": [route(1, 9)]})
    with pytest.raises(tread.ConfigError, match="TREAD training requires you to configure the routes"):
        attach(model, {})
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not hasattr(rotary_function(), "stock")


def test_a_failed_second_attach_keeps_the_first(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    with pytest.raises(tread.ConfigError):
        attach(model, {"routes": [route(1, 9)]})
    assert routed(FLUX, model, handle).equal(expected)


def test_state_dict_goes_on_where_it_stopped(attach: Attach):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    handle.set_step(5)
    FLUX.call(model, FLUX.inputs(2))
    state = handle.state_dict()
    assert state == {"step": 5, "micro_step": 1}
    FLUX.call(model, FLUX.inputs(2))
    went_on = handle.selections[0]
    again = attach(model, ROUTES)
    again.load_state_dict(json.loads(json.dumps(state)))
    FLUX.call(model, FLUX.inputs(2))
    assert again.selections[0].equal(went_on)


def test_a_loop_that_never_says_the_step_draws_anew_each_time(attach: Attach):
    model = FLUX.model()
    handle, drawn = attach(model, ROUTES), []
    for _ in range(3):
        FLUX.call(model, FLUX.inputs(2))
        drawn.append(handle.selections[0])
    assert not drawn[0].equal(drawn[1])
    assert not drawn[1].equal(drawn[2])


def test_the_documented_line_for_accumulated_gradients(attach: Attach):
    """docs/attach.md: each micro-batch of an optimizer step selects anew, and the next step starts over."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = FLUX.model()
    handle = attach(model, ROUTES)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    global_step, states, drawn = 0, [], []
    for _ in range(5):
        if accelerator.sync_gradients:
            handle.set_step(global_step)
        with accelerator.accumulate(model):
            states.append((handle.state_dict()["step"], handle.state_dict()["micro_step"]))
            accelerator.backward(FLUX.call(model, FLUX.inputs(2)).mean())
            drawn.append(handle.selections[0])
            optimizer.step()
        global_step += accelerator.sync_gradients
    assert states == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert not any(drawn[i].equal(drawn[j]) for i in range(5) for j in range(i))


def test_torchs_checkpoint_wrapper_is_refused(attach: Attach):
    model = FLUX.model()
    model.single_transformer_blocks[1] = checkpoint_wrapper(model.single_transformer_blocks[1])
    with pytest.raises(tread.ConfigError, match="layer 3 is inside torch's checkpoint_wrapper"):
        attach(model, ROUTES)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not hasattr(rotary_function(), "stock")


def test_checkpointing_turned_on_off_and_on_again_while_attached(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    for turn in (model.enable_gradient_checkpointing, model.disable_gradient_checkpointing) * 2:
        turn()
        assert routed(FLUX, model, handle).equal(expected)
    model.enable_gradient_checkpointing()
    stock = FLUX.model()
    stock.enable_gradient_checkpointing()
    handle.detach()
    assert type(model._gradient_checkpointing_func) is type(stock._gradient_checkpointing_func)


class Skipping(nn.Module):
    """Four layers, of which a forward may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return x


SKIPPING = tread.Family(models=("Skipping",), stacks=(tread.Stack(name="blocks", stream="input"),))


def by_hand(model: Skipping, x: torch.Tensor, ids: torch.Tensor, inside: tuple[int, ...], after: tuple[int, ...]):
    short = torch.stack([sample[rows] for sample, rows in zip(x, ids, strict=True)])
    for index in inside:
        short = model.blocks[index](short)
    x = torch.stack([sample.index_copy(0, rows, kept) for sample, rows, kept in zip(x, ids, short, strict=True)])
    for index in after:
        x = model.blocks[index](x)
    return x


def test_a_skipped_layer_that_ends_a_window():
    """FACTS 4: skip-layers shifts no route. The window closes before the next layer, or with the forward: an error."""
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(2, 6, 4)
    with tread.attach(model, {"routes": [route(0, 2)]}, family=SKIPPING) as handle:
        output = model(x, skip=(2,))
        torch.testing.assert_close(output, by_hand(model, x, handle.selections[0], (0, 1), (3,)))
        output = model(x, skip=(0,))
        torch.testing.assert_close(output, by_hand(model, x, handle.selections[0], (1, 2), (3,)))
        with pytest.raises(tread.ConfigError, match="the forward ended inside a window"):
            model(x, skip=(2, 3))
        torch.testing.assert_close(model(x), by_hand(model, x, handle.selections[0], (0, 1, 2), (3,)))


def test_an_error_inside_a_forward_leaves_the_next_one_right(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(model, ROUTES)

    def fail(*_: Any) -> None:
        raise RuntimeError("inside the window")

    hook = model.single_transformer_blocks[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="inside the window"), warnings.catch_warnings():
        warnings.simplefilter("error")
        FLUX.call(model, FLUX.inputs(2))
    hook.remove()
    assert not handle.state.routed, "the tensors of the failed forward are not held"
    assert routed(FLUX, model, handle).equal(expected)
    with handle.dense():
        assert FLUX.call(model, FLUX.inputs(2)).equal(FLUX.call(FLUX.model(), FLUX.inputs(2)))


def test_two_models_share_a_rotary_function_and_the_last_puts_it_back(attach: Attach, expected: torch.Tensor):
    stock = rotary_function()
    model, other = FLUX.model(), FLUX.model()
    first, second = attach(model, ROUTES), attach(other, ROUTES)
    assert rotary_function() is not stock
    first.detach()
    first.detach()  # a second time does nothing
    assert routed(FLUX, other, second).equal(expected)
    second.detach()
    assert rotary_function() is stock


def test_a_deep_copy_and_its_original_are_attached_apart(attach: Attach, expected: torch.Tensor):
    stock, function = FLUX.model(), rotary_function()
    model = FLUX.model()
    handle = attach(model, ROUTES)
    handle.set_step(0)
    twin = copy.deepcopy(model)
    assert FLUX.call(model, FLUX.inputs(2)).equal(expected)
    handle.detach()
    assert FLUX.call(model, FLUX.inputs(2)).equal(FLUX.call(stock, FLUX.inputs(2)))
    assert FLUX.call(twin, FLUX.inputs(2)).equal(expected), "it goes on by itself from where it was copied"
    again = attach(twin, ROUTES)
    assert routed(FLUX, twin, again).equal(expected)
    again.detach()
    assert FLUX.call(twin, FLUX.inputs(2)).equal(FLUX.call(stock, FLUX.inputs(2)))
    assert rotary_function() is function


def test_through_peft(attach: Attach, expected: torch.Tensor):
    """On the wrapper, before and after wrapping; the adapter starts at zero, so the numbers are the bare model's."""
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"])
    wrapped = get_peft_model(FLUX.model(), config)
    handle = attach(wrapped, ROUTES)
    torch.testing.assert_close(routed(FLUX, wrapped, handle), expected, rtol=1e-5, atol=1e-5)
    model = FLUX.model()
    handle = attach(model, ROUTES)
    wrapped = get_peft_model(model, config)
    torch.testing.assert_close(routed(FLUX, wrapped, handle), expected, rtol=1e-5, atol=1e-5)
    with handle.dense():
        assert not torch.allclose(FLUX.call(wrapped, FLUX.inputs(2)), expected, atol=1e-4)


def test_through_torch_compile(attach: Attach, expected: torch.Tensor):
    model = FLUX.model()
    handle = attach(torch.compile(model, backend="eager"), ROUTES)
    assert handle.model is model
    assert routed(FLUX, model, handle).equal(expected)


def test_the_models_own_methods_never_notice(tmp_path: Path):
    model = FLUX.model()
    with tread.attach(model, ROUTES):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert "_tread_attachment" not in model.state_dict()
        model.to(torch.float64).float()
        model.enable_gradient_checkpointing()
        model.disable_gradient_checkpointing()
        model.save_pretrained(tmp_path / "saved")
    loaded = transformer_flux.FluxTransformer2DModel.from_pretrained(tmp_path / "saved").train()
    assert FLUX.call(loaded, FLUX.inputs(2)).equal(FLUX.call(model, FLUX.inputs(2)))


def with_references(count: int) -> dict[str, Any]:
    """Kontext's 24 tokens, of which the last `count` belong to the reference image."""
    arguments = KONTEXT.inputs(2)
    ids = arguments["img_ids"].clone()
    ids[:, 0] = (torch.arange(24) >= 24 - count).float()
    return {**arguments, "img_ids": ids}


def test_reference_tokens_are_never_counted_wrong(attach: Attach):
    """Their number is read once per number of tokens; a forward that disagrees is an error, not a wrong selection."""
    model = KONTEXT.model()
    handle = attach(model, ROUTES)
    KONTEXT.call(model, with_references(8))
    assert handle.selections[0].shape[1] == 24 - 8
    with pytest.raises(RuntimeError, match=r"set handle\.references before each"):
        KONTEXT.call(model, with_references(12))
    handle.references = 12
    KONTEXT.call(model, with_references(12))
    assert handle.selections[0].shape[1] == 24 - 6
    handle.references = None
    with handle.dense():
        KONTEXT.call(model, with_references(12))
    with handle.force_keep(torch.zeros(2, 12, dtype=torch.bool)):
        KONTEXT.call(model, with_references(12))
        assert all(set(range(12, 24)) <= set(ids) for ids in handle.selections[0].tolist())
        with pytest.raises(RuntimeError, match="does not cover just the target's tokens"):
            KONTEXT.call(model, with_references(8))
    with (
        handle.force_keep(torch.zeros(2, 25, dtype=torch.bool)),
        pytest.raises(tread.ConfigError, match=r"^force_keep has shape \(2, 25\); this forward has 24 tokens\.$"),
    ):
        KONTEXT.call(model, with_references(12))


def test_a_force_mask_of_the_wrong_size_says_so(attach: Attach):
    model = BY_NAME["sd3"].model()
    handle = attach(model, {"routes": [route(0, -1)]})
    with (
        handle.force_keep(torch.ones(2, 5, dtype=torch.bool)),
        pytest.raises(tread.ConfigError, match="force_keep has"),
    ):
        BY_NAME["sd3"].call(model, BY_NAME["sd3"].inputs(2))


OWN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_model.py"))


@pytest.mark.parametrize("selector", ["random", "l1"])
def test_a_model_of_ones_own(selector: str):
    """The example's declaration: all forced equals dense, a batch equals its samples, detach leaves no trace."""
    torch.manual_seed(0)
    model = OWN["PixelTransformer"]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    images, time = torch.randn(2, *OWN["SHAPE"]), torch.rand(2)
    dense = model(images, time)
    config = {"routes": [route(1, -2)], "selector": selector}
    with tread.attach(model, config, family=OWN["FAMILY"]) as handle:
        output = model(images, time)
        ids = handle.selections[0]
        assert not torch.allclose(output, dense, atol=1e-4)
        for i in range(2):
            with handle.routed(selections=[ids[i : i + 1]]):
                torch.testing.assert_close(model(images[i : i + 1], time[i : i + 1])[0], output[i])
        with handle.force_keep(torch.ones(2, OWN["TOKENS"], dtype=torch.bool)):
            torch.testing.assert_close(model(images, time), dense)
            assert handle.selections[0].shape[1] == OWN["TOKENS"]
        assert model.eval()(images, time).equal(dense)
    assert model.train()(images, time).equal(dense)


def test_the_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    OWN["main"](steps=3)
    loop = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora_loop.py"))
    loop["main"](["--steps", "3", "--out", str(tmp_path)])
    assert (tmp_path / "pytorch_lora_weights.safetensors").is_file()
    said = capsys.readouterr().out
    assert "dense loss" in said
