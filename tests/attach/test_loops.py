"""What loops other than tread's own do with an attached model: forget `train()`, use torch.func, run in threads."""

import threading
import warnings
from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig, TensorParallelConfig
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tread
from tests.attach.attached import FLUX, ROUTES, Attach, routed
from tests.attach.oracle import oracle
from tests.attach.selected import route
from tread.routing.risks import RiskWarning

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_model_in_eval_mode_is_told_that_it_trains_dense(attach: Attach):
    """`from_pretrained` returns it so; stock training goes well without `train()`, and routing would never begin."""
    model = FLUX.model().eval()
    attach(model, ROUTES)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        FLUX.call(model, FLUX.inputs(2))  # validation
    with pytest.warns(RiskWarning, match=r"eval mode.*model\.train\(\)"):
        FLUX.call(model, FLUX.inputs(2)).mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FLUX.call(model, FLUX.inputs(2))  # once is enough


@pytest.mark.parametrize("when", ["after a training step", "frozen"])
def test_eval_mode_is_no_mistake(when: str, attach: Attach):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    if when == "frozen":
        model.requires_grad_(False)
    else:
        routed(FLUX, model, handle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FLUX.call(model.eval(), FLUX.inputs(2))


def test_a_warning_names_the_users_line(attach: Attach):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attach(FLUX.model(), {"routes": [route(0, -1)]})
    assert told
    assert {warning.filename for warning in told} <= {__file__.replace("test_loops", "conftest"), __file__}


@pytest.mark.parametrize("inside", [torch.device("meta"), torch.inference_mode()], ids=["meta", "inference"])
def test_attached_where_new_tensors_are_special(inside: Any, attach: Attach, expected: Tensor):
    """Models are made on the meta device for FSDP; the handle's step is no part of the model."""
    model = FLUX.model()
    with inside:
        handle = attach(model, ROUTES)
    assert routed(FLUX, model, handle).equal(expected)


def test_forward_mode_gradients(attach: Attach):
    """The tangents of torch.func.jvp, as MeanFlow and continuous consistency models train on."""
    model, arguments = FLUX.model(), FLUX.inputs(2)
    x, direction = arguments["hidden_states"], torch.randn(2, 16, 8)
    handle = attach(model, {**ROUTES, "selector": "l1"})

    def predict(x: Tensor) -> Tensor:
        return FLUX.call(model, {**arguments, "hidden_states": x})

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no forward mode
        output, tangent, *_ = torch.func.jvp(predict, (x,), (direction,))
        kept = handle.kept  # usable outside the transform
        assert kept is not None
        assert handle.selections[0].data_ptr(), "the transform's own tensors have no storage to copy or save"
        assert handle.state_dict() == {"step": 0, "micro_step": 1}
        handle.set_step(0)
        assert predict(x).equal(output)
        handle.detach()
        with oracle(FLUX, model, [(1, FLUX.depth - 2, kept)]):
            expected = torch.func.jvp(predict, (x,), (direction,))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-6)
    output.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.transformer_blocks.parameters())


def test_functional_gradients(attach: Attach):
    model, arguments = FLUX.model(), FLUX.inputs(2)
    handle = attach(model, ROUTES)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (), arguments).sample.square().mean()

    found = torch.func.grad(loss)({name: one.detach() for name, one in model.named_parameters()})
    handle.set_step(0)
    FLUX.call(model, arguments).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_the_same_tokens_in_two_forwards(attach: Attach):
    """DPO, distillation, GRPO: the reference, without gradients, sees the tokens of the policy's forward."""
    model, reference = FLUX.model(), FLUX.model().requires_grad_(False)
    handle, other = attach(model, ROUTES), attach(reference, ROUTES)
    prediction = FLUX.call(model, FLUX.inputs(2))
    with torch.no_grad(), other.routed(selections=handle.selections):
        assert FLUX.call(reference, FLUX.inputs(2)).equal(prediction)
    with handle.dense():  # or a step of a schedule without routing: there are no selections
        prediction = FLUX.call(model, FLUX.inputs(2))
    with torch.no_grad(), other.routed(selections=handle.selections):
        assert FLUX.call(reference, FLUX.inputs(2)).equal(prediction)
    assert other.kept is None


def test_reroute_takes_every_form_of_a_config(attach: Attach):
    model = FLUX.model()
    handle = attach(model, ROUTES)
    handle.reroute({"routes": [route(1, -2, 0.25)]})
    FLUX.call(model, FLUX.inputs(2))
    assert handle.selections[0].shape == (2, 12)


def test_the_share_kept_is_that_of_the_last_forward_after_reroute_too(attach: Attach):
    model = FLUX.model()
    handle = attach(model, {"routes": [route(1, 1, 0.5), route(2, -2, 0.25)]})
    FLUX.call(model, FLUX.inputs(2))
    before = handle.kept_share
    handle.reroute({"routes": [route(1, -2, 0.25)]})
    assert handle.kept_share == before < 1


class Outer(nn.Module):
    """As trainers hold a model beside its text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = nn.ModuleDict({"transformer": FLUX.model()})


class Pipeline:
    transformer = None


def unet() -> nn.Module:
    return UNet2DConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (unet, r"no family for UNet2DConditionModel.*'down_blocks\.1\.attentions\.0'"),
        (Outer, r"no family for Outer.*denoiser\.transformer.*FluxTransformer2DModel.*attach"),
        (Pipeline, "Pipeline is no torch module.*its transformer"),
        (lambda: nn.DataParallel(FLUX.model()), "DataParallel.*DistributedDataParallel"),
    ],
)
def test_the_module_to_attach_is_named(given: Any, message: str, attach: Attach):
    with pytest.raises(tread.ConfigError, match=message):
        attach(given(), ROUTES)


def test_a_subclass_that_passes_its_arguments_on(attach: Attach, expected: Tensor):
    """Its own signature says nothing of names: those of the class it extends do."""
    stock: Any = type(FLUX.model())

    class Extended(stock):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = FLUX.model()
    model.__class__ = Extended
    handle = attach(model, ROUTES)
    handle.set_step(0)
    arguments = FLUX.inputs(2)
    assert model(arguments.pop("hidden_states"), **arguments).sample.equal(expected)


class Passing(nn.Module):
    """A wrapper of one's own around a layer; what it adds has no more to do with tokens than a layer has."""

    def __init__(self, block: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.block, self.scale = block, scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(self.scale * one for one in self.block(*args, **kwargs))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_wrappers_of_ones_own_around_layers(checkpointed: bool, attach: Attach, expected: Tensor):
    """Checkpointing passes the arguments by position, and the wrapper's signature has no names for them."""
    model = FLUX.model()
    for stack in (model.transformer_blocks, model.single_transformer_blocks):
        for i, block in enumerate(stack):
            stack[i] = Passing(block)
    if checkpointed:
        model.enable_gradient_checkpointing()
    handle = attach(model, ROUTES)
    assert routed(FLUX, model, handle).equal(expected)


def gradients_of_steps(model: nn.Module, handle: tread.Attachment) -> list[Tensor]:
    found = []
    for step in range(6):
        handle.set_step(step)
        model.zero_grad()
        FLUX.call(model, FLUX.inputs(2)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def test_two_threads_train_two_checkpointed_models(attach: Attach):
    """A checkpoint in one thread leaves the other thread's forward alone."""
    models = [FLUX.model() for _ in range(3)]
    for model in models:
        model.enable_gradient_checkpointing()
    handles = [attach(model, ROUTES) for model in models]
    expected = gradients_of_steps(models[0], handles[0])
    found: dict[int, list[Tensor]] = {}

    def train(i: int) -> None:
        found[i] = gradients_of_steps(models[i], handles[i])

    threads = [threading.Thread(target=train, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (1, 2):
        assert all(a.equal(b) for a, b in zip(found[i], expected, strict=True))


def test_a_checkpointed_forward_in_a_thread_that_was_not_known(attach: Attach):
    """Its tokens could not be found again in backward."""
    model, arguments = FLUX.model(), FLUX.inputs(2)
    handle = attach(model, ROUTES)
    failed: list[str] = []

    def train() -> None:
        try:
            checkpoint(FLUX.call, model, arguments, use_reentrant=False)
        except tread.ConfigError as error:
            failed.append(str(error))  # torch 2.11 leaves its hooks on while a traceback keeps the checkpoint's frame
        handle.set_step(0)
        checkpoint(FLUX.call, model, arguments, use_reentrant=False).square().mean().backward()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "handle.set_step(step) in this thread first" in failed[0]
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    handle.set_step(0)
    FLUX.call(model, arguments).square().mean().backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_in_another_thread(reentrant: bool, attach: Attach):
    """Autograd has a thread for each GPU: what is checkpointed inside the recomputation is found there too."""
    model, arguments = FLUX.model(), FLUX.inputs(2)
    handle = attach(model, ROUTES)
    FLUX.call(model, arguments).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.enable_gradient_checkpointing()
    handle.set_step(0)
    x = arguments.pop("hidden_states").requires_grad_()
    output = checkpoint(lambda x: FLUX.call(model, {**arguments, "hidden_states": x}), x, use_reentrant=reentrant)
    thread = threading.Thread(target=output.square().mean().backward)
    thread.start()
    thread.join()
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_ranks_that_share_samples_are_told(attach: Attach):
    """diffusers' `enable_parallelism`, which needs GPUs: each rank would drop other tokens of the same sample."""
    model, arguments = FLUX.model(), FLUX.inputs(2)
    handle = attach(model, ROUTES)
    model._parallel_config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
    with pytest.raises(tread.ConfigError, match=r"tensor parallelism.*handle\.routed\(samples="):
        FLUX.call(model, arguments)
    with handle.routed(samples=torch.arange(2)):
        FLUX.call(model, arguments)
    model._parallel_config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=2))
    with handle.routed(samples=torch.arange(2)), pytest.raises(tread.ConfigError, match="context parallelism"):
        FLUX.call(model, arguments)
    with handle.dense():
        FLUX.call(model, arguments)
