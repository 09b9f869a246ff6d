"""LTX-2: the prediction without and with sound, weights that stay as they are, latents, and what is refused."""

import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.finetune.tasks import make_config, make_task
from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tests.tiny.pictures import write_clips, write_sounding
from tests.tiny.pipelines.ltxvideo2 import AS_VIDEO, PLAIN
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.mel import log_mel
from tread.finetune.loss import LATENT, NOISE, SOUND, TIME
from tread.finetune.model.source import Source
from tread.finetune.preflight import look
from tread.finetune.run import finetune
from tread.routing import noise
from tread.training.metrics import read_metrics

Folder = Callable[[str], Path]
NEWER = [pytest.param(name, marks=pytest.mark.contract) for name in ("ltxvideo2-2.3", "ltxvideo2-2.5")]


@pytest.mark.parametrize("name", ["ltxvideo2", *NEWER])
def test_the_prediction_is_the_stock_model_s_without_sound(pipeline_folder: Folder, name: str) -> None:
    """Whatever sound the isolated model is given; with attention between the streams it would be another."""
    family, pipeline = opened(pipeline_folder(name), "ltxvideo2")
    pipeline.set_progress_bar_config(disable=True)
    model = pipeline.transformer
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "frame_rate": 24.0}
    with recorded(model) as calls:
        pipeline(PROMPTS[0], **size, **PLAIN, **AS_VIDEO, guidance_scale=1.0, output_type="latent")
    stock = calls[0]
    noisy = pipeline._unpack_latents(stock["hidden_states"], 2, 2, 3)
    with torch.no_grad():
        ours = family.predict(model, noisy, stock["timestep"] / 1000, text_of(family, pipeline, PROMPTS[:1]))
        ours = pipeline._pack_latents(ours)
        joint, _ = model(**stock, return_dict=False)
        for sound in (stock["audio_hidden_states"], torch.randn_like(stock["audio_hidden_states"])):
            apart = stock | {"audio_hidden_states": sound, "isolate_modalities": True}
            assert_close(ours, model(**apart, return_dict=False)[0])
    assert (ours - joint).abs().max() > 1e-3


def test_weights_of_sound_stay_as_they_are(pipeline_folder: Folder) -> None:
    """Neither the audio's stream nor the attention between both gets a gradient, and no adapter."""
    family, pipeline = opened(pipeline_folder("ltxvideo2"), "ltxvideo2")
    model = pipeline.transformer
    batch: Any = {"mean": drawn(1, 8, 2, 2, 3)} | text_of(family, pipeline, PROMPTS[:1])
    family.predict(model, batch["mean"], torch.tensor([0.7]), batch).square().mean().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    sound = {name for name, _ in model.named_parameters() if "audio" in name or "av_cross" in name or "a2v" in name}
    assert moved
    assert not moved & sound
    assert {name for name, _ in model.named_parameters()} - moved == sound
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = [name for name in linears if name.endswith(tuple(f".{target}" for target in family.lora_targets))]
    assert len(adapted) == 4 * 8
    assert not set(adapted) & {name.removesuffix(".weight") for name in sound}


@torch.no_grad()
def test_latents_decode_in_the_stock_pipeline(pipeline_folder: Folder) -> None:
    """By its own denormalisation; and the first latent frame is that of the first frame alone."""
    family, pipeline = opened(pipeline_folder("ltxvideo2-first"), "ltxvideo2")
    clip = torch.randint(256, (1, 3, 17, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    latents = family.encode_pixels(pipeline, clip)["mean"]
    assert latents.shape == (1, 8, 3, 2, 3)
    vae = pipeline.vae
    stock = pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    assert_close(stock, vae.encode(clip).latent_dist.mode())
    assert_close(family.encode_pixels(pipeline, clip[:, :, :1])["mean"], latents[:, :, :1])
    batch: Any = {"mean": latents}
    weight = family.weight(batch)
    assert weight is not None
    assert weight[0, 0].flatten(1).tolist() == [[0] * 6, [1] * 6, [1] * 6]


def test_the_frame_rate_moves_frames_in_time(pipeline_folder: Folder) -> None:
    source = Source(str(pipeline_folder("ltxvideo2")))
    pipeline = source.pipeline(*source.parts)
    ends = []
    for rate in (24, 12):
        family = open_family("ltxvideo2", source, frame_rate=rate)
        batch: Any = {"mean": drawn(2, 8, 3, 2, 3)} | text_of(family, pipeline, PROMPTS)
        with torch.no_grad(), recorded(pipeline.transformer) as calls:
            family.predict(pipeline.transformer, batch["mean"], torch.tensor([0.7, 0.7]), batch)
        stock = pipeline.transformer.rope.prepare_video_coords(2, 3, 2, 3, torch.device("cpu"), fps=rate)
        assert_close(calls[0]["video_coords"], stock)
        ends.append(stock[0, 0, -1, 1].item())
    assert ends == [pytest.approx(17 / 24), pytest.approx(17 / 12)]


def test_what_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    source = Source(str(pipeline_folder("ltxvideo2")))
    with pytest.raises(ConfigError, match=r"tokenizer_max_length is 100, but .* set it to a multiple of 8, or leave"):
        open_family("ltxvideo2", source, 100)
    with pytest.raises(ConfigError, match="is a LTX2Pipeline: set model_family to 'ltxvideo2'"):
        open_family("ltxvideo", source)
    few = changed(
        pipeline_folder("ltxvideo2"), tmp_path / "m", "scheduler/scheduler_config.json", stochastic_sampling=True
    )
    with pytest.raises(ConfigError, match=r"is a distilled LTX-Video .*set pretrained_model_name_or_path to a dev"):
        open_family("ltxvideo2", Source(str(few)))


def test_the_connectors_are_checked_like_any_part(pipeline_folder: Folder) -> None:
    """Their class belongs to the stock pipeline's module, not to diffusers' own names."""
    source = Source(str(pipeline_folder("ltxvideo2")))
    assert type(source.check("connectors")["connectors"]).__name__ == "LTX2TextConnectors"


@pytest.mark.parametrize("name", ["ltxvideo2", *NEWER])
def test_sound_is_drawn_as_by_the_stock_pipeline(pipeline_folder: Folder, name: str) -> None:
    """Every tensor of a call with both streams, and both predictions."""
    source = Source(str(pipeline_folder(name)))
    family, pipeline = open_family("ltxvideo2", source, sound=True), source.pipeline(*source.parts)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "frame_rate": 24.0}
    with recorded(pipeline.transformer) as calls:
        pipeline(PROMPTS, **size, **PLAIN, **AS_VIDEO, guidance_scale=1.0, output_type="latent")
    stock = calls[0]
    noisy = pipeline._unpack_latents(stock["hidden_states"], 2, 2, 3)
    with torch.no_grad(), recorded(pipeline.transformer) as ours:
        seen, heard = family.predict_with_sound(
            pipeline.transformer,
            noisy,
            stock["audio_hidden_states"],
            stock["timestep"] / 1000,
            text_of(family, pipeline, PROMPTS),
        )
        expected = pipeline.transformer(**stock, return_dict=False)
    assert_close(ours[0].pop("audio_timestep"), stock["timestep"])  # which the model takes for it
    assert ours[0].keys() == stock.keys()
    for argument, value in ours[0].items():
        assert_close(value, stock[argument], msg=argument)
    assert_close(pipeline._pack_latents(seen), expected[0])
    assert_close(heard, expected[1])


@pytest.mark.parametrize("frames", [9, 17])
@torch.no_grad()
def test_latents_of_sound_decode_in_the_stock_pipeline(pipeline_folder: Folder, frames: int) -> None:
    """As many as the pipeline draws for a clip of that length; its own denormalisation gives the autoencoder's."""
    source = Source(str(pipeline_folder("ltxvideo2")))
    family, pipeline = open_family("ltxvideo2", source, sound=True), source.pipeline(*source.parts)
    vae = pipeline.audio_vae
    vae.latents_mean.copy_(torch.linspace(-1, 1, 4))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 4))
    waveform = 0.3 * drawn(2, 2, round(frames / 24 * 16000))
    latents = family.encode_sound(pipeline, waveform)
    length = round(frames / 24 * 25)
    assert latents["sound.mean"].shape == latents["sound.std"].shape == (2, length, 4)
    mel = log_mel(waveform, rate=16000, hop=160, bands=8)[:, :, : 4 * length - 3]
    moments = vae.encode(mel).latent_dist
    mean = pipeline._denormalize_audio_latents(latents["sound.mean"], vae.latents_mean, vae.latents_std)
    assert_close(pipeline._unpack_audio_latents(mean, length, num_mel_bins=2), moments.mean)
    std = latents["sound.std"] * vae.latents_std
    assert_close(pipeline._unpack_audio_latents(std, length, num_mel_bins=2), moments.std)


def test_a_spectrogram_by_hand() -> None:
    """One frame by numpy's transform, and bands by Slaney's formula: linear up to 1 kHz, then logarithmic."""
    sound = np.random.default_rng(0).normal(size=4096)
    found = log_mel(torch.tensor(sound)[None, None], rate=16000, hop=160, bands=8)
    assert found.shape == (1, 1, 26, 8)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    at = 13 * 160
    spectrum = np.abs(np.fft.rfft(sound[at - 512 : at + 512] * window))  # (513,)
    top = 15 + np.log(8000 / 1000) / (np.log(6.4) / 27)
    edges = np.array(
        [m * 200 / 3 if m < 15 else 1000 * np.exp((m - 15) * np.log(6.4) / 27) for m in np.linspace(0, top, 10)]
    )
    pitch = np.linspace(0, 8000, 513)
    for band, (low, middle, high) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        rise, fall = (pitch - low) / (middle - low), (high - pitch) / (high - middle)
        weights = np.clip(np.minimum(rise, fall), 0, None) * 2 / (high - low)
        assert found[0, 0, 13, band].item() == pytest.approx(np.log(max(weights @ spectrum, 1e-5)), abs=1e-3)
    assert log_mel(torch.zeros(1, 1, 1600), rate=16000, hop=160, bands=8).unique().item() == pytest.approx(np.log(1e-5))


def test_the_loss_with_sound_is_that_of_the_stock_transformer(pipeline_folder: Folder, tmp_path: Path) -> None:
    """The errors of picture and sound at one time, each with noise of its own, added."""
    task = make_task(sounding(pipeline_folder, tmp_path, train_batch_size=2, tread_config=None), tmp_path)
    batch = next(task.batches(1))
    found = task.loss(task.model, batch)
    tensors, where, seed = batch.tensors, torch.tensor([2, 3]), task.config.seed
    time = task.target.times(noise.uniform(seed, TIME, where), 2 * 2 * 2)
    at = {"mean": time.view(2, 1, 1, 1, 1), "sound.mean": time.view(2, 1, 1)}
    x, normal = {}, {}
    for name, words in (("mean", ()), ("sound.mean", (SOUND,))):
        shape = tensors[name].shape[1:]
        spread = tensors[name.replace("mean", "std")]
        x[name] = tensors[name] + spread * noise.per_sample_normal(seed, where, shape, LATENT, *words)
        normal[name] = noise.per_sample_normal(seed, where, shape, NOISE, *words)
    noisy = {name: (1 - at[name]) * x[name] + at[name] * normal[name] for name in x}
    model: Any = task.model
    seen, heard = model(
        hidden_states=noisy["mean"].flatten(2).transpose(1, 2),
        audio_hidden_states=noisy["sound.mean"],
        encoder_hidden_states=tensors["text.embeds"],
        audio_encoder_hidden_states=tensors["text.audio"],
        timestep=1000 * time,
        sigma=1000 * time,
        encoder_attention_mask=tensors["text.mask"],
        audio_encoder_attention_mask=tensors["text.mask"],
        **{"num_frames": 2, "height": 2, "width": 2, "fps": 24.0, "audio_num_frames": 9, "use_cross_timestep": True},
        return_dict=False,
    )
    assert x["sound.mean"].shape == (2, 9, 4)
    target = {name: normal[name] - x[name] for name in x}
    of_picture = (seen - target["mean"].flatten(2).transpose(1, 2)).square().mean()
    assert_close(found, of_picture + (heard - target["sound.mean"]).square().mean(), rtol=1e-5, atol=1e-6)


def sounding(pipeline_folder: Folder, tmp_path: Path, **changes: Any) -> Any:
    """A config that trains sound on two clips."""
    place = tmp_path / "clips"
    data = {"instance_data_dir": str(place if place.exists() else write_sounding(place)), "resolution": 64}
    data |= {"video": {"num_frames": 9}}
    folders = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    given = {"model_family": "ltxvideo2", "tokenizer_max_length": 32, "sound": "train", "report_to": "none"}
    return make_config(pipeline_folder("ltxvideo2"), data, **folders, **given, **changes)


@pytest.mark.filterwarnings("ignore")
def test_sound_is_trained_previewed_and_goes_on_exactly(pipeline_folder: Folder, tmp_path: Path) -> None:
    """Routed; adapters of both streams move, and a resumed run is the straight one."""
    settings = {"learning_rate": 0.02, "max_train_steps": 4, "eval_steps_interval": 4, "num_eval_images": 2}
    prompt = {"validation_prompt": "two dogs", "validation_num_inference_steps": 1, "validation_guidance": 1.0}
    straight = finetune(sounding(pipeline_folder, tmp_path, **settings, **prompt, validation_on_startup=True))
    losses = [line["val_loss"] for line in read_metrics(straight) if "val_loss" in line]
    assert losses[-1] < losses[0]
    weights = load_file(straight / "pytorch_lora_weights.safetensors")
    moved = {name.split(".")[3] for name, value in weights.items() if "lora_B" in name and value.abs().max() > 0}
    assert moved == {"attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"}
    pipeline = Source(str(pipeline_folder("ltxvideo2"))).pipeline("transformer")
    pipeline.load_lora_weights(straight)  # by stock code
    loaded = {name.replace(".default_0", ""): value for name, value in pipeline.transformer.state_dict().items()}
    assert all(torch.equal(loaded[name.removeprefix("transformer.")], value) for name, value in weights.items())
    with wave.open(str(straight / "previews" / "step-00000004-0.wav")) as heard:
        assert heard.getnchannels() == 2
        assert heard.getnframes() > 0
    for steps in (2, 4):
        changes = settings | {"max_train_steps": steps, "resume_from_checkpoint": "latest"}
        changes |= {"output_dir": str(tmp_path / "resumed")}
        resumed = finetune(replace(sounding(pipeline_folder, tmp_path), **changes))
    again = load_file(resumed / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in weights.items())


def test_sound_that_cannot_be_trained_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    config = sounding(pipeline_folder, tmp_path)
    with pytest.raises(ConfigError, match=r"sound is 'train', but a LTXPipeline draws no sound .* set it to 'keep'"):
        open_family("ltxvideo", Source(str(pipeline_folder("ltxvideo"))), sound=True)
    slow = write_sounding(tmp_path / "slow", rate=10)
    data = {"instance_data_dir": str(slow), "resolution": 64, "video": {"num_frames": 9}}
    with pytest.raises(ConfigError, match=r"0\.mkv is read at 10 frames per second, but framerate is 24, .*to 24, or"):
        finetune(replace(config, data=data))
    mute = write_clips(tmp_path / "mute")
    with pytest.raises(ConfigError, match=r"sound is 'train', but 2 of 2 samples, the first \S+gif, have no sound"):
        finetune(replace(config, data=data | {"instance_data_dir": str(mute)}))
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing was encoded"
    assert "no sound" in look(replace(config, data=data | {"instance_data_dir": str(mute)})).problems[0]
