"""The loss of each sample by hand, on a network whose answer is known: clean frames, masks, dropped tokens, sound."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.finetune.trained import drawn, opened
from tests.tiny.pipelines import PipelineFolder
from tread.finetune.experts import Range
from tread.finetune.families.wan import Wan
from tread.finetune.family import Batch
from tread.finetune.loss import NOISE, SOUND, Draws, SampleLosses, forced_tokens
from tread.finetune.target import FlowTarget
from tread.routing import noise

pytest.importorskip("diffusers")

TARGET = FlowTarget()
SPAN = Range("transformer", 0.0, 1.0)
DRAWS = Draws(7, torch.tensor([5, 9]), torch.tensor([0.3, 0.8]))
TIME = TARGET.times(DRAWS.u, 1)


class Half(nn.Module):
    """Predicts half of its input."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        return (hidden_states / 2,)


@pytest.fixture(scope="module")
def wan(pipeline_folder: PipelineFolder) -> Wan:
    """A model that is given the first frame clean."""
    return opened(pipeline_folder("wan-ti2v-first"), "wan")[0]


@pytest.fixture
def batch(wan: Wan) -> Batch:
    """Three latent frames of 2 x 3 tokens, in two samples."""
    mean = drawn(2, 48, 3, 4, 6)
    return {"mean": mean, "text.embeds": torch.zeros(2, 512, 16), "position": DRAWS.positions}


def errors(x: Tensor, index: Tensor = DRAWS.positions, *words: int) -> Tensor:
    """The mean over channels of the squared error of `Half`, (B, F, H, W), where the first frame is drawn too."""
    normal = noise.per_sample_normal(DRAWS.seed, index, x.shape[1:], NOISE, *words)
    time = TIME.view(-1, *[1] * (x.ndim - 1))
    state = (1 - time) * x + time * normal
    return (state / 2 - (normal - x)).square().mean(1)


def losses(wan: Wan, batch: Batch, *, kept_only: bool = False, kept: Tensor | None = None) -> Tensor:
    return SampleLosses(wan, {"transformer": None}, kept_only)(Half(), SPAN, batch, DRAWS, TARGET, kept=kept)


def test_a_clean_frame_carries_no_loss_and_its_tokens_are_forced(wan: Wan, batch: Batch) -> None:
    assert_close(losses(wan, batch), errors(batch["mean"])[:, 1:].flatten(1).mean(1))
    forced = forced_tokens(wan, batch)
    assert forced is not None
    assert forced.tolist() == [[True] * 6 + [False] * 12] * 2


def test_a_mask_weighs_the_frames_that_are_drawn_and_adds_to_the_forced_tokens(wan: Wan, batch: Batch) -> None:
    weight = torch.zeros(2, 1, 3, 4, 6)
    weight[0, :, :, :2, :1] = 0.5  # within the first token of each frame
    weight[0, :, 2, 3, 5] = 1.0  # within the last token of all
    weight[1] = 1.0  # a sample without a mask
    batch["weight"] = weight
    error, later = errors(batch["mean"])[:, 1:], weight[:, 0, 1:]
    assert_close(losses(wan, batch), (error * later).flatten(1).sum(1) / later.flatten(1).sum(1))
    forced = forced_tokens(wan, batch)
    assert forced is not None
    clean = list(range(6))
    assert [row.nonzero().flatten().tolist() for row in forced] == [[*clean, 6, 12, 17], clean]


def test_tokens_that_were_dropped_carry_no_loss(wan: Wan, batch: Batch) -> None:
    """Two references' tokens come after the target's."""
    kept = torch.zeros(2, 20, dtype=torch.bool)
    kept[0, [0, 7, 17, 19]] = True
    kept[1, [0, 6, 18, 19]] = True
    error = errors(batch["mean"])  # (B, 3, 4, 6)
    expected = torch.stack(
        [
            torch.cat([error[0, 1, :2, 2:4], error[0, 2, 2:, 4:]]).mean(),  # token 7 is the second of frame 1
            error[1, 1, :2, :2].mean(),
        ]
    )
    assert_close(losses(wan, batch, kept_only=True, kept=kept), expected)
    assert losses(wan, batch, kept=kept).equal(losses(wan, batch)), "routed_loss: all"
    assert losses(wan, batch, kept_only=True, kept=torch.zeros_like(kept)).tolist() == [0, 0]


def test_the_loss_of_sound_is_added(wan: Wan, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the time of the picture, with noise of its own; its mean is over all its elements, whatever is dropped."""
    sound = drawn(2, 10, 4, seed=3)

    def both(call: Any, picture: Tensor, given: Tensor, time: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        assert time.equal(TIME)
        return picture / 2, given / 2

    alone = losses(wan, batch)
    monkeypatch.setattr(wan, "predict_with_sound", both, raising=False)
    batch |= {"sound.mean": sound, "sound.std": torch.zeros_like(sound)}
    expected = errors(sound, DRAWS.positions, SOUND).mean(1)
    assert_close(losses(wan, batch), alone + expected)
