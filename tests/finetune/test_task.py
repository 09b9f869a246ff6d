"""The loss against the stock transformer called by hand, masks and the tokens they force, and memory advice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_gradients
from tests.tiny.pipelines import PipelineFolder
from tread.attach.registry import layers_of
from tread.finetune.job import FinetuneJob
from tread.finetune.loss import LATENT, NOISE, TIME
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.compiling import CompiledLayer
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model", ["flux", "flux-kl"])
def test_the_loss_is_that_of_the_stock_transformer(
    pipeline_folder: PipelineFolder, tmp_path: Path, masked: bool, model: str
) -> None:
    """Dense; noise, time and the latent drawn from its moments are recomputed from the sample's positions."""
    data = write_gradients(tmp_path / "images", masked=masked)
    config = make_config(pipeline_folder(model), data, tread_config=None)
    task = make_task(config, tmp_path)
    step = 3
    batches = task.batches(step)
    batch = next(batches)
    found = task.loss(task.model, batch)

    where = torch.tensor([2 * step, 2 * step + 1])
    x = batch.tensors["mean"]
    if "std" in batch.tensors:
        x = x + batch.tensors["std"] * noise.per_sample_normal(config.seed, where, x.shape[1:], LATENT)
    assert ("std" in batch.tensors) == (model == "flux-kl")
    drawn = noise.per_sample_normal(config.seed, where, x.shape[1:], NOISE)
    time = task.target.times(noise.uniform(config.seed, TIME, where), 16)
    mix = time.view(2, 1, 1, 1)
    noisy = (1 - mix) * x + mix * drawn

    def packed(latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)

    rows = torch.arange(noisy.shape[-1] // 2)
    stock = task.model(
        hidden_states=packed(noisy),
        encoder_hidden_states=batch.tensors["text.embeds"],
        pooled_projections=batch.tensors["text.pooled"],
        timestep=time,
        img_ids=torch.cartesian_prod(torch.zeros(1, dtype=rows.dtype), rows, rows),
        txt_ids=rows.new_zeros(batch.tensors["text.embeds"].shape[1], 3),
        guidance=torch.ones(2),
        return_dict=False,
    )[0]
    error = (stock - packed(drawn - x)).square()
    if masked:
        weight = packed(batch.tensors["weight"].expand_as(x))
        expected = (error * weight).flatten(1).sum(1) / weight.flatten(1).sum(1)
    else:
        expected = error.flatten(1).mean(1)
    torch.testing.assert_close(found, expected.mean(), rtol=1e-5, atol=1e-6)


def test_masks_force_the_tokens_they_touch(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """The very weights of the loss: a token of 16 x 16 pixels is forced if any of its pixels is not black."""
    data = write_gradients(tmp_path / "images", masked=True)
    task = make_task(make_config(pipeline_folder("flux"), data), tmp_path)
    batch = next(task.batches(0))
    task.routing[0].set_step(0)
    task.loss(task.model, batch)
    touched = [{0, 1, 4, 5, 8, 9, 12, 13}, {10, 11, 14, 15}]  # of 4 x 4 tokens: two columns, one quarter
    weights = batch.tensors["weight"]
    order = [0 if weights[i, 0, 0, 0] > 0 else 1 for i in range(2)]
    handle = next(iter(task.handles.values()))
    assert handle is not None
    for kept, picture in zip(handle.selections[0].tolist(), order, strict=True):
        assert touched[picture] <= set(kept)
    assert batch.forced is not None
    assert [set(row.nonzero().flatten().tolist()) for row in batch.forced] == [touched[i] for i in order]


def test_a_sample_without_a_mask_is_routed_beside_masked_ones(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    data = write_gradients(tmp_path / "images", masked=True)
    (tmp_path / "images" / "1_mask.png").unlink()
    task = make_task(make_config(pipeline_folder("flux"), data), tmp_path)
    batch = next(task.batches(0))
    assert batch.forced is not None
    assert sorted(batch.forced.sum(1).tolist()) == [0, 8]


def test_a_loss_on_kept_tokens_alone(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """The dropped tokens' errors do not count: against the mean over kept tokens of the same forward."""
    data = write_gradients(tmp_path / "images", masked=False)
    task = make_task(make_config(pipeline_folder("flux"), data, routed_loss="kept"), tmp_path)
    errors: list[torch.Tensor] = []
    target = task.target

    class Recorded:
        times, mix = target.times, target.mix

        def error(self, *arguments: Any) -> torch.Tensor:
            errors.append(target.error(*arguments))
            return errors[-1]

    recorded: Any = Recorded()
    task.target = recorded
    task.routing[0].set_step(0)
    found = task.loss(task.model, next(task.batches(0)))
    (handle,) = task.handles.values()
    assert handle is not None
    tokens = torch.nn.functional.pixel_unshuffle(errors[0], 2).flatten(2).transpose(1, 2)  # (B, S, 4C)
    expected = torch.stack([row[kept].mean() for row, kept in zip(tokens, handle.selections[0], strict=True)]).mean()
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, errors[0].mean())


def test_memory_advice_names_what_is_not_done_yet(tmp_path: Path) -> None:
    lavish = make_config(tmp_path, "x", gradient_checkpointing=False, tread_config=None, use_ema=True)
    assert FinetuneJob.of(lavish).memory_advice == (
        "Any of these needs less: set gradient_checkpointing to true; set base_model_precision to 'int8'; set "
        "offload to 'auto'; set train_batch_size to 1 and raise gradient_accumulation_steps instead; set use_ema to "
        "false; route tokens (tread_config: lora); lower the resolution of the data."
    )
    frugal = make_config(tmp_path, "x", base_model_precision="nf4", train_batch_size=1)
    assert FinetuneJob.of(frugal).memory_advice == (
        "Any of these needs less: set offload to 'auto'; lower the resolution of the data."
    )
    graphed = make_config(tmp_path, "x", graphs=True)
    assert FinetuneJob.of(graphed).memory_advice.startswith("Any of these needs less: set graphs to false; ")
    full = make_config(tmp_path, "x", model_type="full", train_batch_size=1)
    assert "set model_type to 'lora'; set optimizer to 'adamw-8bit'" in FinetuneJob.of(full).memory_advice


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True, "selective", "dense"])
def test_layers_are_checkpointed_one_way(
    pipeline_folder: PipelineFolder, tmp_path: Path, checkpointed: Checkpointing, compiled: bool
) -> None:
    """Within compiled layers, or by the model around others; never both."""
    data = write_gradients(tmp_path / "images", masked=False)
    settings = {"gradient_checkpointing": checkpointed, "compile": compiled}
    task = make_task(make_config(pipeline_folder("flux"), data, **settings), tmp_path)
    model = task.models["transformer"]
    assert model.is_gradient_checkpointing is (bool(checkpointed) and not compiled)
    if compiled:
        (fast,) = task.make_fast()
        calls: list[Any] = [layer._compiled_call_impl for layer in layers_of(model)]
        assert {type(call) for call in calls} == {CompiledLayer}
        assert {call.checkpointed for call in calls} == {checkpointed}
        fast.remove()
