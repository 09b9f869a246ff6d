"""What a visit brings beside the latents of its sample: offset noise, weights of the loss, the mirrored picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from tests.finetune.data.encoded import Encoder, encode, samples_in
from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_gradients, write_noise
from tests.tiny.pipelines import PipelineFolder
from tread.config.schema import parse
from tread.data.captioned.entries import DataConfig, data_configs
from tread.data.captioned.samples import collect
from tread.errors import ConfigError
from tread.finetune.data.cache import Cache, CachedSamples, Texts
from tread.finetune.data.picks import Pick
from tread.finetune.data.prepare import check_flips
from tread.finetune.loss import NOISE, OFFSET, Draws
from tread.finetune.task import Finetuning
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore")


class Exact(torch.nn.Module):
    """Stands for the transformer: it remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        self.given.append(hidden_states)
        return (torch.zeros_like(hidden_states),)


def task_of(pipeline_folder: PipelineFolder, folder: Path, **changes: Any) -> Finetuning:
    data = folder / "images"
    if not data.exists():
        write_gradients(data, masked=False)
    entry = {"instance_data_dir": str(data), "resolution": 64, **changes.pop("entry", {})}
    settings = {"tread_config": None, "cache_dir": str(folder / "cache"), **changes}
    return make_task(make_config(pipeline_folder("flux"), entry, **settings), folder)


def unpacked(tokens: Tensor) -> Tensor:
    """FLUX's tokens of 64 x 64 pixels as latents."""
    return torch.nn.functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (4, 4)), 2)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_noise_has_an_offset_for_each_channel(
    pipeline_folder: PipelineFolder, tmp_path: Path, share: float
) -> None:
    """Solved for the noise from what the model is given: x_t = (1 - t) x + t noise."""
    task = task_of(pipeline_folder, tmp_path, noise_offset=0.3, noise_offset_probability=share)
    seed, chosen = task.config.seed, []
    batches = task.batches(0)
    for step in range(4):
        batch, model = next(batches), Exact()
        loss = task.loss(model, batch)
        where, x = torch.tensor([2 * step, 2 * step + 1]), batch.tensors["mean"]
        plain = noise.per_sample_normal(seed, where, x.shape[1:], NOISE)
        time = task.target.times(noise.uniform(seed, int.from_bytes(b"time"), where), 16).view(2, 1, 1, 1)
        found = (unpacked(model.given[0]) - (1 - time) * x) / time
        has = noise.uniform(seed, OFFSET, where) < share
        offset = 0.3 * noise.per_sample_normal(seed, where, (x.shape[1],), OFFSET) * has[:, None]
        torch.testing.assert_close(found, plain + offset[:, :, None, None], rtol=0, atol=1e-4)
        torch.testing.assert_close(loss, (plain + offset[:, :, None, None] - x).square().mean(), rtol=1e-5, atol=0)
        chosen += has.tolist()
    assert any(chosen)
    assert all(chosen) == (share == 1)


def test_the_validation_loss_has_neither_weights_nor_an_offset(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    plain = task_of(pipeline_folder, tmp_path).validate()
    changes = {"loss_weighting": "sigma_sqrt", "noise_offset": 0.5, "entry": {"loss_weight": 3.0}}
    assert task_of(pipeline_folder, tmp_path, **changes).validate() == plain


def test_each_sample_s_loss_has_the_weight_of_its_entry(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """Regularisation images: a batch of both entries is the mean of weight times loss."""
    data = write_noise(tmp_path / "class", ((64, 64),) * 2)
    other = write_gradients(tmp_path / "subject", masked=False)
    entries: list[dict[str, Any]] = [
        {"instance_data_dir": str(data), "resolution": 64, "loss_weight": 0.25},
        {"instance_data_dir": str(other), "resolution": 64},
    ]
    settings = {"train_batch_size": 4, "tread_config": None, "cache_dir": str(tmp_path / "cache")}
    losses: list[float] = []
    alone = weights = torch.zeros(4)
    for weighted in (True, False):
        entries[0]["loss_weight"] = 0.25 if weighted else 1.0
        task = make_task(replace(make_config(pipeline_folder("flux"), data, **settings), data=tuple(entries)), tmp_path)
        batch = next(task.batches(0))
        assert ("loss_weight" in batch.tensors) == weighted
        losses.append(float(task.loss(task.model, batch)))
        if weighted:
            weights = batch.tensors["loss_weight"]
        else:
            span = task._ranges(16)[0]
            u = span.spread(noise.uniform(task.config.seed, int.from_bytes(b"time"), batch.tensors["position"]))
            draws = Draws(task.config.seed, batch.tensors["position"], u)
            alone = task.sample_losses(task.model, span, batch.tensors, draws, task.target)
    assert sorted(weights.tolist()) == [0.25, 0.25, 1, 1]
    assert losses[0] == pytest.approx(float((weights * alone).mean()), rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)


def test_mirrored_pictures_are_encoded_and_their_masks_follow(tmp_path: Path) -> None:
    """The encoder is not symmetric: latents of the mirrored picture are not the mirrored latents."""
    folder = write_gradients(tmp_path / "images", masked=True)

    class Slanted(Encoder):
        def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
            return {"mean": super().__call__(pixels * torch.linspace(0.5, 1, pixels.shape[-1]))["mean"]}

    cache = Cache(tmp_path / "cache")
    entries, skipped = encode(cache, folder, Slanted(), horizontal_flip=True)
    assert skipped == []
    texts = Texts(cache, "text")
    for entry in entries:
        cache.write("text", texts.key(entry.sample.captions[0]), {"codes": torch.zeros(1)})
    samples = CachedSamples(cache, entries, texts)
    for i in range(len(entries)):
        straight, mirrored = (samples[Pick(i, mirrored=side)][0] for side in (False, True))
        pixels = torch.linspace(0.5, 1, 64)
        assert not torch.allclose(mirrored["mean"], straight["mean"].flip(-1), atol=0.05)
        by_hand = straight["mean"] / pixels.view(8, 8).mean(1)
        torch.testing.assert_close(mirrored["mean"] / pixels.view(8, 8).mean(1), by_hand.flip(-1), rtol=0, atol=0.02)
        assert torch.equal(mirrored["weight"], straight["weight"].flip(-1))
    again, _ = encode(cache, folder, Encoder(most=0), horizontal_flip=True)
    assert again == entries, "everything is in the cache"
    plain, _ = encode(cache, folder, Encoder(most=0))
    assert [entry.latents for entry in plain] == [entry.latents for entry in entries], "one cache for both settings"
    assert all(entry.mirrored is None for entry in plain)


def test_half_of_the_visits_are_mirrored_and_validation_never(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    write_noise(tmp_path / "images", ((64, 64),) * 2)
    task = task_of(pipeline_folder, tmp_path, entry={"horizontal_flip": True}, max_train_steps=40)
    mirrored = task.train_set.entries[0].mirrored
    assert mirrored is not None
    keys = {entry.latents: False for entry in task.train_set.entries}
    keys |= {entry.mirrored.latents: True for entry in task.train_set.entries if entry.mirrored}
    known = {key: task.data.train.cache.load("latents", key)["mean"].float() for key in keys}
    seen = []
    for batch in task.batches(0):
        for row in batch.tensors["mean"]:
            seen += [keys[key] for key, mean in known.items() if torch.equal(mean, row)]
    assert len(seen) == 80
    assert abs(sum(seen) - 40) < 4 * 20**0.5
    plain = task_of(pipeline_folder, tmp_path).validate()
    assert task.validate() == plain


def write_text_masks(folder: Path) -> Path:
    write_gradients(folder, masked=False)
    for number in range(2):
        mask = Image.new("L", (256, 256))
        ImageDraw.Draw(mask).text((20, 100), "OPEN 24 H", fill=255, font_size=40)
        mask.save(folder / f"{number}_mask.png")
    return folder


def test_masks_that_look_like_text_are_not_mirrored_unless_asked(tmp_path: Path) -> None:
    folder = write_text_masks(tmp_path / "images")
    with pytest.raises(ConfigError, match=r"'images' is true, but the mask \S+0_mask.png looks like text.*'always'"):
        check_flips(*samples_in(folder, horizontal_flip=True))
    check_flips(*samples_in(folder, horizontal_flip="always"))
    check_flips(*samples_in(folder))
    check_flips(*samples_in(write_gradients(tmp_path / "figures", masked=True), horizontal_flip=True))


def test_eval_samples_are_not_mirrored(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path / "images", masked=False)
    entries, _ = encode(Cache(tmp_path / "cache"), folder, Encoder(), horizontal_flip=True, dataset_type="eval")
    assert all(entry.mirrored is None for entry in entries)


def test_variants_are_encoded_once_and_drawn_by_position(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """Each visit has the text of one of its caption's variants, the same whatever the number of processes."""
    entry = {"shuffle_tags": True, "tag_separator": " ", "caption_variants": 3, "caption_suffix": "in red light"}
    task = task_of(pipeline_folder, tmp_path, entry=entry, max_train_steps=20)
    (config,) = (parse(DataConfig, one) for one in data_configs(task.config.data))
    captions = [sample.captions for sample in collect([config], video=False, progress=False).samples]
    assert [len(some) for some in captions] == [3, 3]
    texts = {caption: task.data.texts[caption]["embeds"] for some in captions for caption in some}
    drawn = set()
    for batch in task.batches(0):
        for row in batch.tensors["text.embeds"]:
            drawn |= {caption for caption, text in texts.items() if torch.equal(text, row)}
    assert drawn == set(texts)
    assert len(list((tmp_path / "cache" / "text").rglob("*.safetensors"))) == len(texts) + 1, "and the empty one"
