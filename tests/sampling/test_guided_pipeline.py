"""`guide` on stock FLUX and SD3 pipelines: the formula at every forward, and no trace afterwards."""

import runpy
import struct
from typing import Any, cast

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tread
from tests.programs import ROOT
from tread.errors import ConfigError
from tread.routing import noise
from tread.sampling.guidance import guide

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "guidance.py"))
ROUTES = EXAMPLE["ROUTES"]


@pytest.fixture(params=["tiny_flux", "tiny_sd3"])
def pipeline(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = EXAMPLE[request.param]()
    made.set_progress_bar_config(disable=True)
    for parameter in made.transformer.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def draw(pipeline: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipeline(**EXAMPLE["prompt_of"](pipeline), generator=generator, output_type="latent").images


def arguments_of_a_forward(pipeline: Any) -> dict[str, Any]:
    """What the pipeline calls its transformer with."""
    seen: list[dict[str, Any]] = []
    hook = pipeline.transformer.register_forward_pre_hook(lambda _, __, kw: seen.append(kw), with_kwargs=True)
    draw(pipeline)
    hook.remove()
    return seen[0]


def by_hand(model: nn.Module, handle: tread.Attachment, kwargs: dict[str, Any], ratio: float) -> Tensor:
    """A branch: its selections are a hash of seed 0 and the bits of the timestep."""
    level = float(kwargs["timestep"].flatten()[0])
    word = int.from_bytes(struct.pack("<f", level), "little")
    with handle.routed(ratio, step=int(noise.bits(0, word)), samples=torch.tensor([0])):
        return model(**kwargs)[0]


def test_every_forward_follows_the_formula(pipeline: Any) -> None:
    """The same pipeline, with the formula in place of the transformer's answers."""
    model, busy = pipeline.transformer, [False]
    with tread.attach(model, ROUTES) as handle:
        with guide(model, handle, scale=2.0, strong_ratio=0.25, weak_ratio=0.75):
            guided = draw(pipeline)
            assert draw(pipeline).equal(guided), "a call repeats exactly"
            assert handle.state_dict() == {"step": 0, "micro_step": 0}

        def formula(_: nn.Module, __: object, kwargs: dict[str, Any], answer: Any) -> Any:
            if busy[0]:
                return None
            busy[0] = True
            strong, weak = (by_hand(model, handle, kwargs, ratio) for ratio in (0.25, 0.75))
            busy[0] = False
            return (2.0 * strong - weak,)

        hook = model.register_forward_hook(formula, with_kwargs=True)
        expected = draw(pipeline)
        hook.remove()
        torch.testing.assert_close(guided, expected, rtol=1e-4, atol=1e-4)
        assert (guided - draw(pipeline)).abs().max() > 1e-2


def test_without_guidance_the_pipeline_is_stock(pipeline: Any) -> None:
    stock = draw(pipeline)
    model = pipeline.transformer
    with tread.attach(model, ROUTES) as handle:
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
        with guide(model, handle, scale=1.0):
            assert draw(pipeline).equal(stock)
        with guide(model, handle, scale=3.0, weak_ratio=0.0):
            torch.testing.assert_close(draw(pipeline), stock)
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
        assert draw(pipeline).equal(stock)


def test_outside_the_interval_there_is_one_forward(pipeline: Any) -> None:
    model = pipeline.transformer
    full = 1000.0 if "SD3" in type(model).__name__ else 1.0
    count = [0]
    with tread.attach(model, ROUTES) as handle:
        with guide(model, handle, scale=2.0, interval=(0.3 * full, 0.8 * full)):
            model.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
            draw(pipeline)
        guided, count[0] = count[0], 0
        draw(pipeline)
    assert count[0] == 4
    times = pipeline.scheduler.timesteps / 1000
    inside = int(((times > 0.3) & (times <= 0.8)).sum())
    assert 0 < inside < 4
    assert guided == 4 + inside


def test_a_forward_reads_its_timestep_once(pipeline: Any) -> None:
    """Before its branches: reading waits for what the device was asked for so far."""
    model, kwargs = pipeline.transformer, arguments_of_a_forward(pipeline)
    order: list[str] = []

    class Reads(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.__float__:
                order.append("read")
            return func(*args, **(kwargs or {}))

    with tread.attach(model, ROUTES) as handle, guide(model, handle, scale=2.0), Reads():
        hook = model.register_forward_hook(lambda *_: order.append("branch"))
        model(**kwargs)
        hook.remove()
    assert order == ["read", "branch", "branch"]


def test_outputs_keep_their_kind(pipeline: Any) -> None:
    model = pipeline.transformer
    kwargs = arguments_of_a_forward(pipeline) | {"return_dict": True}
    with torch.no_grad(), tread.attach(model, ROUTES) as handle, guide(model, handle, scale=2.0):
        output = model(**kwargs)
        assert type(output).__name__ == "Transformer2DModelOutput"
        assert output.sample.equal(model(**(kwargs | {"return_dict": False}))[0])


def test_a_forward_that_fails_leaves_the_handle_as_it_was(pipeline: Any) -> None:
    model = pipeline.transformer
    with tread.attach(model, ROUTES) as handle:
        hook = model.transformer_blocks[2].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError), guide(model, handle, scale=2.0, strong_ratio=0.5):
            draw(pipeline)
        hook.remove()
        assert not handle.is_on(training=False)


def test_a_negative_prompt_drops_what_the_prompt_drops() -> None:
    """Two equal prompts: there is nothing for the pipeline's own guidance to enlarge."""
    pipeline = EXAMPLE["tiny_sd3"]()
    for parameter in pipeline.transformer.parameters():
        nn.init.normal_(parameter, std=0.1)
    kwargs = arguments_of_a_forward(pipeline)
    kwargs |= {
        name: value[:1].repeat(2, *[1] * (value.ndim - 1)) for name, value in kwargs.items() if torch.is_tensor(value)
    }
    model = pipeline.transformer
    with torch.no_grad(), tread.attach(model, ROUTES) as handle:
        with guide(model, handle, scale=2.0, strong_ratio=0.5, weak_ratio=0.75):
            negative, positive = model(**kwargs)[0]
        assert handle.selections[0][0].equal(handle.selections[0][1])
    torch.testing.assert_close(negative, positive)


@pytest.mark.parametrize("pipeline", ["tiny_flux", pytest.param("tiny_sd3", marks=pytest.mark.contract)], indirect=True)
def test_a_compiled_transformer_is_guided(pipeline: Any) -> None:
    model = pipeline.transformer
    with tread.attach(model, ROUTES) as handle:
        with guide(model, handle, scale=2.0):
            expected = draw(pipeline)
        pipeline.transformer = cast(nn.Module, torch.compile(model, backend="eager"))
        with guide(pipeline.transformer, handle, scale=2.0):
            torch.testing.assert_close(draw(pipeline), expected)


def test_the_level_of_timesteps_per_token_is_that_of_the_noisy_ones() -> None:
    """Wan 2.2 from an image: the first frame is given, so its tokens are at 0."""
    tiny: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 16}
    model = WanTransformer3DModel(in_channels=4, out_channels=4, num_layers=3, ffn_dim=32, **tiny)
    timestep = torch.tensor([0.0] * 6 + [700.0] * 12)[None]  # 3 frames of 2 x 3 tokens
    seen: list[float] = []

    def ratio(level: float) -> float:
        seen.append(level)
        return 0.5

    routes = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 1}]}
    with torch.no_grad(), tread.attach(model, routes) as handle, guide(model, handle, scale=2.0, weak_ratio=ratio):
        model(torch.randn(1, 4, 3, 4, 6), timestep, torch.randn(1, 5, 16))
    assert seen == [700.0]


def refused(model: Any, handle: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error, guide(model, handle, scale=2.0, **settings):
        pass
    return str(error.value)


def test_what_is_refused() -> None:
    pipeline, other = EXAMPLE["tiny_sd3"](), EXAMPLE["tiny_sd3"]()
    model = pipeline.transformer
    handle = tread.attach(model, ROUTES)
    assert refused(model, handle, weak_ratio=1) == "weak_ratio is 1; allowed is 0 <= value < 1."
    assert "the weak branch must drop at least as much" in refused(model, handle, strong_ratio=0.8, weak_ratio=0.2)
    assert "give guide the network, such as pipeline.transformer" in refused(pipeline, handle)
    for foreign in (None, tread.attach(other.transformer, ROUTES)):
        assert "give guide what tread.attach(model, ...) returned" in refused(model, foreign)
    own = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    pixels = own["PixelTransformer"]()
    assert "has no argument 'timestep'" in refused(pixels, tread.attach(pixels, ROUTES, family=own["FAMILY"]))
    handle.detach()
    assert refused(model, handle) == "this handle was detached, so its model runs dense: attach the model again."


@pytest.mark.filterwarnings("error::tread.routing.risks.RiskWarning")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]([])
    said = capsys.readouterr().out
    assert "FluxPipeline: guidance moves pixels by 0.0" in said
    assert "StableDiffusion3Pipeline: guidance moves pixels by 0.0" in said
