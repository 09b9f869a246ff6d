"""Wan: experts and first frames."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

import tread
from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of, train_routed
from tests.tiny.pipelines.case import first_frame
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.samples import Sample
from tread.errors import ConfigError
from tread.finetune.data.hashes import identity
from tread.finetune.data.prepare import check_sizes
from tread.finetune.families import open_family
from tread.finetune.families.autoencoders import encode_videos
from tread.finetune.families.wan import Wan
from tread.finetune.model.source import Source

Open = Callable[[str], tuple[Wan, Any]]


@pytest.fixture
def wan(pipeline_folder: Callable[[str], Path]) -> Open:
    """The family and its whole pipeline."""
    return lambda name: opened(pipeline_folder(name), "wan")


@pytest.fixture(scope="module")
def clip() -> Tensor:
    """Nine frames of random pixels, (1, 3, 9, 64, 96) in [-1, 1]."""
    return torch.randint(256, (1, 3, 9, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1


def test_experts_share_the_times_at_the_boundary(
    wan: Open, pipeline_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    assert wan("wan")[0].experts == (("transformer", 0.0, 1.0),)
    assert wan("wan-a14b")[0].experts == (("transformer", 0.875, 1.0), ("transformer_2", 0.0, 0.875))
    alone = Source(
        str(changed(pipeline_folder("wan-a14b"), tmp_path / "m", "model_index.json", transformer=[None, None]))
    )
    assert open_family("wan", alone).experts == (("transformer_2", 0.0, 0.875),)
    assert open_family("wan", alone).patch == (1, 2, 2)


def test_training_lowers_the_dense_loss(wan: Open) -> None:
    """A few routed steps, each expert in its own range, on fixed noise."""
    family, pipeline = wan("wan-a14b")
    target = family.target(shift=None, distance="l2")
    latents, noise = drawn(1, 16, 4, 8, 12), drawn(1, 16, 4, 8, 12, seed=1)
    batch = {"mean": latents} | text_of(family, pipeline, PROMPTS[:1])
    for part, low, high in family.experts:
        model = getattr(pipeline, part).train()
        handle = tread.attach(model, {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]})
        time = torch.tensor([(low + high) / 2])

        def loss(model: Any = model, time: Tensor = time) -> Tensor:
            prediction = family.predict(model, target.mix(latents, noise, time), time, batch)
            return target.error(prediction, latents, noise, time).mean()

        before = train_routed(model, handle, loss, steps=8)
        assert handle.selections[0].shape == (1, 48)
        with handle.dense():
            assert loss().item() < 0.9 * before


def test_the_first_latent_frame_is_the_first_frame_alone(wan: Open, clip: Tensor) -> None:
    """What TI2V's pipeline encodes is what a video's latents begin with."""
    for name in ("wan", "wan-ti2v-first"):
        family, pipeline = wan(name)
        encoded = family.encode_pixels(pipeline, clip)
        assert encoded.keys() == {"mean", "std"}
        rows, columns = 64 // family.factor, 96 // family.factor
        assert encoded["mean"].shape[2:] == (3, rows, columns)
        assert_close(family.encode_pixels(pipeline, clip[:, :, :1])["mean"], encoded["mean"][:, :, :1])


def test_a_first_frame_is_given_with_what_clip_sees_in_it(wan: Open, clip: Tensor) -> None:
    family, pipeline = wan("wan-i2v")
    encoded = family.encode_pixels(pipeline, clip)
    assert_close(encoded["condition"][:, :, 0], encoded["mean"][:, :, 0])
    assert (encoded["condition"][:, :, 1:] - encoded["mean"][:, :, 1:]).abs().max() > 0.01
    image = Image.fromarray((clip[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy())
    with torch.no_grad():
        assert_close(encoded["image_embeds"][:, 0], pipeline.encode_image(image))
    assert "image_embeds" not in wan("wan-i2v-a14b")[0].encode_pixels(wan("wan-i2v-a14b")[1], clip)


def test_an_image_has_nothing_to_teach_an_image_to_video_model(wan: Open) -> None:
    video, image = (
        Sample(media=Path(name), size=(64, 64), captions=("a",), frames=n) for name, n in (("a.mp4", 9), ("b.png", 1))
    )
    configs = [DataConfig(instance_data_dir="data")]
    check_sizes(wan("wan-i2v")[0], [video], configs)
    check_sizes(wan("wan-ti2v-first")[0], [video, image], configs)
    with pytest.raises(ConfigError, match=r"1 of 2 samples, the first b.png, cannot train a WanIm.*the first frame is"):
        check_sizes(wan("wan-i2v")[0], [video, image], configs)


def test_a_first_frame_is_given_to_ti2v_and_to_no_other_text_to_video_model(
    pipeline_folder: Callable[[str], Path],
) -> None:
    family = open_family("wan", Source(str(pipeline_folder("wan-ti2v"))), first_frame=True)
    assert family.source.pipeline_name == "WanImageToVideoPipeline"
    assert family.weight({"mean": drawn(1, 48, 2, 4, 6)}) is not None
    assert type(family.source.pipeline("vae")).__name__ == "WanImageToVideoPipeline"
    with pytest.raises(ConfigError, match=r"draws from text alone.*leave first_frame out"):
        open_family("wan", Source(str(pipeline_folder("wan"))), first_frame=True)


def test_first_and_last_frames_are_given_with_what_clip_sees_in_both(wan: Open, clip: Tensor) -> None:
    family, pipeline = wan("wan-flf2v")
    assert family.takes_last_image
    assert not wan("wan-i2v")[0].takes_last_image
    batch = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    known = torch.cat([clip[:, :, :1], torch.zeros(1, 3, 7, 64, 96), clip[:, :, -1:]], dim=2)
    assert_close(batch["condition"], encode_videos(pipeline.vae, known)["mean"])
    noisy = drawn(*batch["mean"].shape)
    with torch.no_grad(), recorded(pipeline.transformer) as calls:
        family.predict(pipeline.transformer, noisy, torch.tensor([0.7]), batch)
        images = [first_frame(clip[:, :, at:])["image"] for at in (0, -1)]
        assert_close(calls[0]["encoder_hidden_states_image"], pipeline.encode_image(images))
    mask = calls[0]["hidden_states"][0, 16:20].flatten(2).amin(-1)  # (frames of a latent, f)
    assert mask.tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]]
    assert family.unfit(96, 64, 1) is not None
    first_alone = wan("wan-i2v")[0]
    keys = [identity(one.source, one.pixel_parts, *one.encoding) for one in (family, first_alone)]
    assert keys[0] != keys[1], "their encoders are the same, what is cached is not"


def test_a_clean_first_frame_has_no_weight_and_time_zero(wan: Open, clip: Tensor) -> None:
    family, pipeline = wan("wan-ti2v-first")
    batch = family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1])
    weight = family.weight(batch)
    assert weight is not None
    assert weight.flatten(3).amax(-1).tolist() == weight.flatten(3).amin(-1).tolist() == [[[0, 1, 1]]]
    tokens = family.tokens(batch["mean"])
    assert family.patch.any_in_token(weight == 0).nonzero()[:, 1].tolist() == list(range(tokens // 3))
    seen: list[Tensor] = []

    def fake(**arguments: Tensor) -> tuple[Tensor]:
        seen.append(arguments["timestep"])
        return (arguments["hidden_states"],)

    noisy, model, time = drawn(*batch["mean"].shape), fake, torch.tensor([0.7])
    inputs = family.predict(model, noisy, time, batch)  # pyright: ignore[reportArgumentType]
    assert torch.equal(inputs[:, :, 0], batch["mean"][:, :, 0])
    assert torch.equal(inputs[:, :, 1:], noisy[:, :, 1:])
    expected = torch.full((1, tokens), 700.0)
    expected[:, : tokens // 3] = 0
    assert_close(seen[0], expected)


def test_an_image_is_drawn_from_text_where_the_first_frame_would_be_given(wan: Open, clip: Tensor) -> None:
    family, pipeline = wan("wan-ti2v-first")
    batch = family.encode_pixels(pipeline, clip[:, :, :1])
    assert family.weight(batch) is None
    noisy, model = drawn(*batch["mean"].shape), lambda **arguments: (arguments["hidden_states"],)
    batch["text.embeds"] = torch.zeros(1, 512, 16)
    assert torch.equal(family.predict(model, noisy, torch.tensor([0.7]), batch), noisy)  # pyright: ignore[reportArgumentType]
