"""Every family against its stock pipeline: texts, calls, sampling, latents, tokens, prompts, routes, adapters, waits.

Each test runs over every tiny pipeline of `tests/tiny/pipelines`.
"""

import copy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from peft import PeftModel
from torch import Tensor, nn
from torch.testing import assert_close

import tread
from tests.finetune.families.contract import STEPS, Case, assert_same_call, gradients, rows_of
from tests.finetune.trained import PROMPTS, recorded, save_lora
from tests.finetune.waits import seen_waits
from tests.tiny.pipelines import EVERY, TINY
from tread.attach.registry import family_of
from tread.finetune.families import open_family
from tread.finetune.model.lora_files import LORA_FILES, has_lora_loader
from tread.finetune.model.source import Source
from tread.finetune.target import EpsilonTarget, VelocityTarget
from tread.kernels.experts import compute_all_experts

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")


@pytest.fixture(scope="module")
def load(pipeline_folder: Callable[[str], Path]) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def find(name: str) -> Case:
        if name not in cases:
            tiny = TINY[name]
            source = Source(str(pipeline_folder(name)))
            shape = (1, 3, tiny.frames, *tiny.size)
            pixels = torch.randint(256, shape, generator=torch.Generator().manual_seed(1)) / 127.5 - 1
            family = open_family(tiny.family, source)
            cases[name] = Case(tiny, source, family, source.pipeline(*source.parts), pixels)
        return cases[name]

    return find


@pytest.fixture(params=list(TINY))
def case(request: pytest.FixtureRequest, load: Callable[[str], Case]) -> Case:
    return load(request.param)


@pytest.mark.parametrize("prompts", [PROMPTS, ["a photo of " * 400]], ids=["two lengths", "too long"])
def test_sampling_by_predict_is_the_stock_pipeline(
    case: Case, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of two lengths or truncated, each call of the transformer, the velocity's sign and the result."""
    family, stock_scheduler = case.family, case.pipeline.scheduler
    scheduler: Any = type(stock_scheduler).from_config(stock_scheduler.config)
    set_timesteps = stock_scheduler.set_timesteps

    @wraps(set_timesteps)
    def set_both(*args: Any, **kwargs: Any) -> None:
        scheduler.set_timesteps(*args, **kwargs)
        set_timesteps(*args, **kwargs)

    monkeypatch.setattr(stock_scheduler, "set_timesteps", set_both)
    guidance: Any = family.guide(case.pipeline, family.unguided)
    if not case.tiny.truncates and prompts != PROMPTS:
        with pytest.raises(ValueError, match="do not match"):
            case.sample(case.pipeline, prompt=prompts)
        return
    prompts = prompts[:1] if case.tiny.one_prompt else prompts
    with recorded(*(getattr(case.pipeline, part) for part, _, _ in family.experts)) as stock:
        expected = case.sample(case.pipeline, prompt=list(prompts), **guidance)  # Z-Image's writes into it
    assert len(stock) == STEPS
    batch = case.batch(prompts)
    if case.tiny.edm:
        scheduler.sigmas = stock_scheduler.sigmas  # whose last one the pipeline has replaced
    latents = case.noise(batch) * (scheduler.config.sigma_max if case.tiny.edm else 1)
    for i, (t, stock_call) in enumerate(zip(scheduler.timesteps, stock, strict=True)):
        model = case.expert(float(t) / 1000)
        sigma = scheduler.sigmas[i] if case.tiny.edm else None
        told = 1000 * scheduler.sigmas[i] if case.tiny.whole_steps else t
        time = (case.time(told) if sigma is None else sigma / (sigma + 1)).expand(len(latents))
        state = case.given(latents if sigma is None else latents / (sigma + 1), batch)
        with torch.no_grad(), recorded(model) as ours:
            prediction = family.predict(model, state, time, batch)
        assert_same_call(ours[0], stock_call, case.tiny)
        if sigma is not None:  # the noise of the stepped state, from x by the velocity
            prediction = (latents - case.given(state - time[0] * prediction, batch)) / sigma
        latents = scheduler.step(prediction[:, : latents.shape[1]], t, latents, return_dict=False)[0]
    latents = case.tiny.pack(case.pipeline, latents if case.tiny.edm else case.given(latents, batch))
    assert_close(latents, expected, rtol=1e-4, atol=2e-4 if case.tiny.edm else 1e-4)


def test_the_perfect_prediction_leads_the_stock_sampler_to_the_data(case: Case) -> None:
    """On the straight path that `mix` draws: the target's sign and the scale of time are the sampler's."""
    target, scheduler = case.target, copy.deepcopy(case.pipeline.scheduler)
    if case.tiny.edm:
        pytest.skip("not on the flow's path: sampling by predict compares each step")
    scheduler.set_timesteps(4, **({"mu": 0.7} if scheduler.config.get("use_dynamic_shifting") else {}))
    x, noise = torch.randn(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    latents = target.mix(x, noise, case.time(scheduler.timesteps[:1]))
    for t in scheduler.timesteps:
        # whole timesteps are up to one away from the level that the sampler steps at
        assert_close(latents, target.mix(x, noise, case.time(t.reshape(1))), rtol=0, atol=5e-3)
        perfect = noise - x
        if isinstance(target, EpsilonTarget):
            perfect = noise
        if isinstance(target, VelocityTarget):
            kept = scheduler.alphas_cumprod[t]
            perfect = kept.sqrt() * noise - (1 - kept).sqrt() * x
        if not isinstance(target, EpsilonTarget):  # whose variance is not perfect
            assert target.error(perfect, x, noise, case.time(t.reshape(1))).max() < 1e-10
        latents = scheduler.step(perfect, t, latents, return_dict=False)[0]
    assert_close(latents, x, rtol=0, atol=1e-2)


def test_latents_decode_in_the_stock_pipeline(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline's own denormalisation gives the image that the autoencoder gives alone."""
    if not case.tiny.decodes:
        return
    encoded = case.family.encode_pixels(case.pipeline, case.pixels)
    rows, columns = case.tiny.size
    assert encoded["mean"].ndim == 4 + case.family.video
    assert encoded["mean"].shape[-2:] == (rows // case.family.factor, columns // case.family.factor)
    vae = case.pipeline.vae
    with torch.no_grad():
        images = type(vae).__name__ in ("AutoencoderDC", "AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny")
        output = vae.encode(case.pixels.squeeze(2) if images else case.pixels)
        latents = output.latent_dist.mode() if hasattr(output, "latent_dist") else output[0]
        expected = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)  # (1, 3, H, W) or (1, 3, F, H, W)
    packed = (case.tiny.stepped or case.tiny.pack)(case.pipeline, encoded["mean"])
    stepped = SchedulerOutput(prev_sample=packed)  # read as a tuple or by name
    monkeypatch.setattr(case.pipeline.scheduler, "step", lambda *args, **kwargs: stepped)
    image = case.sample(case.pipeline, prompt=PROMPTS[0], output_type="pt")
    if expected.ndim == 5:
        expected = expected.transpose(1, 2)  # (1, F, 3, H, W)
    atol = 1 / 255 + 1e-4 if hasattr(case.pipeline, "safety_checker") else 1e-4  # a guardrail is shown bytes
    assert_close(image, expected.reshape(image.shape), rtol=1e-4, atol=atol)


def test_a_latent_pixel_forces_the_token_that_it_moves(case: Case) -> None:
    family, batch, model = case.family, case.batch(PROMPTS[:1]), case.expert(0.9)
    latents, time = case.noise(batch), case.time(torch.tensor([900.0]))
    seen: list[Tensor] = []
    hook = model.get_submodule(case.tiny.embedder).register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        family.predict(model, latents, time, batch)
        for place in torch.randperm(latents[:, :1].numel(), generator=torch.Generator().manual_seed(3))[:4]:
            at = torch.zeros(latents[:, :1].numel())
            at[place] = 1
            at = at.view_as(latents[:, :1])
            family.predict(model, latents + at, time, batch)
            before, after = (rows_of(seen[i]) for i in (0, -1))  # (B, S, D)
            moved = (before != after).any(-1)[:, case.tiny.text_before :][:, : family.tokens(latents)]
            weight = family.weight(batch)
            if weight is not None and weight.flatten()[place] == 0:
                assert not moved.any()  # the model is given the clean latent there
            else:
                assert moved.sum() == 1
                assert torch.equal(family.patch.any_in_token(at.bool()), moved)
    hook.remove()


def test_prompts_that_are_encoded_already_draw_the_same(case: Case) -> None:
    """At the default guidance, by a pipeline without text encoders."""
    family = case.family
    guidance: Any = family.guide(case.pipeline, family.guidance)
    prompts = [PROMPTS[0], case.tiny.negative]
    takes_negative = "negative_prompt" in family.call_parameters
    away = {"negative_prompt": prompts[1]} if takes_negative else {}
    expected = case.sample(case.pipeline, prompt=prompts[0], **away, **guidance)
    text, negative = case.texts(prompts)
    given = {part: getattr(case.pipeline, part) for part in case.source.parts if part not in family.text_parts}
    bare = case.source.pipeline(given=given)
    assert all(getattr(bare, part) is None for part in family.text_parts)
    family.complete(bare)
    found = case.sample(bare, **family.prompt_arguments(text, negative), **guidance)
    # padding that a mask hides changes the order of sums; DPM-Solver divides what PixArt predicts by 0.006
    assert_close(found, expected, rtol=2e-4, atol=1e-5 * max(1, expected.std().item()))


@torch.no_grad()
def test_texts_in_a_batch_are_read_as_if_alone(case: Case) -> None:
    """Two lengths: the shorter one's padding, where there is any, changes nothing."""
    if case.tiny.one_sample:
        pytest.skip("a batch is one sample")
    family, batch, model = case.family, case.batch(case.prompts), case.expert(0.9)
    if case.tiny.text is not None:
        assert len({len(text["embeds"]) for text in case.texts(PROMPTS)}) == 2
    noisy, time = case.given(case.noise(batch), batch), case.time(torch.tensor([900.0, 950.0]))
    together = family.predict(model, noisy, time, batch)
    for i, prompt in enumerate(case.prompts):
        alone = family.predict(model, noisy[i : i + 1], time[i : i + 1], case.batch([prompt]))
        assert_close(alone, together[i : i + 1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1])


def test_routing(case: Case) -> None:
    """A routed prediction drops tokens, its gradients reach what dense ones reach, and all tokens forced is dense."""
    family, batch = case.family, case.batch(case.prompts)
    latents = case.given(case.noise(batch), batch)
    count, tokens = len(case.prompts), family.tokens(latents)
    references = round(tokens * case.tiny.beside)
    for part, low, high in family.experts:
        model = copy.deepcopy(getattr(case.pipeline, part)).train()
        time = case.time(torch.full((count,), 500 * (low + high)).round())
        dense = family.predict(model, latents, time, batch)
        reached = gradients(model, dense)
        route = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}
        handle = tread.attach(model, {"routes": [route]})
        routed = family.predict(model, latents, time, batch)
        free = tokens - tokens // latents.shape[2] if case.tiny.pinned else tokens
        assert handle.selections[0].shape == (count, references + tokens - free // 2)
        assert not torch.allclose(routed, dense, atol=1e-4)
        assert gradients(model, routed) == reached
        with handle.force_keep(torch.ones(count, tokens, dtype=torch.bool)):
            forced = family.predict(model, latents, time, batch)
        assert handle.selections[0].shape == (count, references + tokens)
        assert_close(forced, dense, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_lora_loads_in_the_stock_pipeline(case: Case, tmp_path: Path) -> None:
    """By the pipeline's own loader, the second expert's by its own file name; through peft where there is no loader."""
    family, batch = case.family, case.batch(case.prompts)
    fresh: Any = case.source.pipeline(
        *(part for part, _, _ in family.experts), *family.needed_parts, given=family.stand_ins()
    )
    times = {part: 500 * (low + high) for part, low, high in family.experts}

    def predict(part: str, model: Any) -> Tensor:
        time = case.time(torch.full((len(case.prompts),), times[part]).round())
        return family.predict(model.eval(), case.given(case.noise(batch), batch), time, batch)

    before = {part: predict(part, getattr(fresh, part)) for part in times}
    adapted = save_lora(family, tmp_path)
    if has_lora_loader(case.source.pipeline_name):
        fresh.load_lora_weights(tmp_path)
    else:
        fresh.transformer = PeftModel.from_pretrained(fresh.transformer, tmp_path)
    if len(adapted) == 2:
        fresh.load_lora_weights(tmp_path, weight_name=LORA_FILES["transformer_2"], load_into_transformer_2=True)
    for part, model in adapted.items():
        after = predict(part, getattr(fresh, part))
        assert_close(after, predict(part, model))
        assert (after - before[part]).abs().max() > 1e-3


@pytest.mark.parametrize("case", EVERY, indirect=True)
def test_only_the_stock_model_makes_a_step_wait_for_the_device(case: Case) -> None:
    """Once the first step of a bucket is done, which may copy what is kept from then on."""
    if case.tiny.reads_values:
        pytest.skip(case.tiny.reads_values)
    family, target, batch = case.family, case.target, case.batch(case.prompts)
    for part, _, _ in family.experts:
        model = copy.deepcopy(getattr(case.pipeline, part)).train().to("meta")
        compute_all_experts([model])  # as `compile` does
        handle = tread.attach(
            model, {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}], "schedule": None}
        )
        # else they are counted on the device, once per size
        handle.references = family.reference_tokens(batch)
        tensors = {name: value.to("meta") for name, value in batch.items()}
        x, noise = tensors["mean"], torch.randn_like(tensors["mean"])
        u = torch.rand(len(x), device="meta")
        seen: list[list[str]] = []
        for step in range(2):
            handle.set_step(step)
            with seen_waits() as found:
                time = target.times(u, family.tokens(x))
                prediction = family.predict(model, target.mix(x, noise, time), time, tensors)
                target.error(prediction, x, noise, time).mean().backward()
            seen.append(found)
        waits = seen[-1]
        assert [line for line in waits if not any(stock in line for stock in case.tiny.waits)] == []
        assert all(any(stock in line for line in waits) for stock in case.tiny.waits)
        assert handle.kept_share < 1


def test_lora_targets_are_linears_of_every_layer(case: Case) -> None:
    for part, _, _ in case.family.experts:
        model = getattr(case.pipeline, part)
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for target in case.family.lora_targets:
            assert any(name.endswith(f".{target}") for name in linears), target
        for stack in family_of(model).stacks:
            for layer in range(len(model.get_submodule(stack.name))):
                inside = [name for name in linears if name.startswith(f"{stack.name}.{layer}.")]
                assert any(name.endswith(tuple(f".{t}" for t in case.family.lora_targets)) for name in inside)
