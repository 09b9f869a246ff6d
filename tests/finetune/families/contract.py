"""A case of the contract in `test_contract.py`: a tiny pipeline loaded whole, its family, and what both are given.

`Case` makes the inputs of a comparison (texts, batches, noise) and samples from the stock pipeline; `assert_same_call`
compares two calls of a transformer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS
from tests.tiny.pipelines.case import Tiny, to_image
from tread.finetune.family import Batch, Text, TuneFamily, reference_name
from tread.finetune.model.source import Source
from tread.finetune.target import FlowTarget, Target

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A tiny pipeline that is loaded whole, its family, and a sample (1, 3, F, H, W) of whole byte values."""

    tiny: Tiny
    source: Source
    family: TuneFamily
    pipeline: Any
    pixels: Tensor

    @property
    def target(self) -> Target:
        return self.family.target(shift=None, distance="l2")

    def time(self, t: Tensor) -> Tensor:
        """The time of `predict` and `target`, from a timestep of the stock scheduler."""
        return t / 1000 if isinstance(self.target, FlowTarget) else t

    def sample(self, pipeline: Any, *, steps: int = STEPS, output_type: str = "latent", **prompt: Any) -> Tensor:
        """What the stock pipeline draws from the noise of generator 0."""
        rows, columns = self.tiny.size
        arguments = {"height": rows, "width": columns, "num_inference_steps": steps, "output_type": output_type}
        arguments |= {"num_frames": self.tiny.frames} if self.family.video else {}
        arguments = {name: value for name, value in arguments.items() if name in self.family.call_parameters}
        arguments |= self.tiny.arguments(self.pixels) | prompt
        if self.tiny.image_per_prompt and isinstance(prompt.get("prompt"), list):
            arguments["image"] = [arguments["image"]] * len(prompt["prompt"])
        pipeline.set_progress_bar_config(disable=True)
        self.tiny.prepare(pipeline)
        return pipeline(**arguments, generator=torch.Generator().manual_seed(0), return_dict=False)[0]

    @property
    def prompts(self) -> list[str]:
        """Two prompts for a batch, of two lengths where the model can read them; one if it is one sample."""
        if self.tiny.one_sample:
            return PROMPTS[:1]
        return ["two dogs", "a photo"] if self.tiny.one_length else PROMPTS

    def texts(self, prompts: list[str]) -> list[Text]:
        """Prompts as they are cached, with the images that the text encoder sees."""
        if self.family.sees is None:
            return self.family.encode_text(self.pipeline, prompts)
        images = [to_image(image) for image in self.tiny.images(self.pixels) or [self.pixels]]
        return [self.family.encode_seen(self.pipeline, prompt, images) for prompt in prompts]

    def batch(self, prompts: list[str]) -> Batch:
        """What the loop hands to `predict` for these prompts, each with the case's pixels."""
        text = {f"text.{name}": value for name, value in self.family.collate_text(self.texts(prompts)).items()}
        encoded = self.family.encode_pixels(self.pipeline, self.pixels)
        for number, image in enumerate(self.tiny.images(self.pixels)):
            latents = self.family.encode_pixels(self.pipeline, image)
            encoded |= {f"{reference_name(number)}.{name}": value for name, value in latents.items()}
        latents = {name: value.repeat(len(prompts), *[1] * (value.ndim - 1)) for name, value in encoded.items()}
        return self.family.collated(text | latents)

    def noise(self, batch: Batch) -> Tensor:
        """As the pipeline draws it from generator 0."""
        return self.tiny.begins(self.tiny.noise(batch["mean"].shape), batch)

    def given(self, latents: Tensor, batch: Batch) -> Tensor:
        """The latents with what the family conditions on put in clean."""
        weight = self.family.weight(batch)
        return latents if weight is None else torch.where(weight == 0, batch["mean"], latents)

    def expert(self, time: float) -> Any:
        """The transformer for a time in (0, 1)."""
        return getattr(self.pipeline, next(part for part, low, _ in self.family.experts if time >= low))


def assert_same_call(ours: dict[str, Any], stock: dict[str, Any], tiny: Tiny) -> None:
    """Tensor by tensor; the padding that a text mask hides may differ."""
    ours, stock = ({name: value for name, value in call.items() if name not in tiny.unread} for call in (ours, stock))
    assert ours.keys() == stock.keys()
    if tiny.text is not None:
        for call in (ours, stock):
            if tiny.positions is not None:
                of_text, of_image = call[tiny.positions].tensor_split([call[tiny.text[0]].shape[1]])
                assert (of_text == 0).all()
                call[tiny.positions] = of_image
            for name, mask in zip(tiny.text[::2], tiny.text[1::2], strict=True):
                given = call.pop(mask).bool()
                call[name] = [text[row] for text, row in zip(call[name], given, strict=True)]
    if tiny.one_time:
        times = stock["timestep"].flatten(1)
        assert (times == times[:, :1]).all()
        stock["timestep"] = times[:, 0]
    if stock.get("timestep", torch.zeros(2)).shape == (1,):
        stock["timestep"] = stock["timestep"].expand_as(ours["timestep"])  # one time for the whole batch
    for name in ours:
        message = partial("{}: {}".format, name)
        # a stock timestep may be a whole number where ours is not
        atol = 1e-4 if tiny.edm else 1e-5  # its state is 80 times as large
        assert_close(ours[name], stock[name], rtol=1e-5, atol=atol, check_dtype="timestep" not in name, msg=message)


def rows_of(tokens: Tensor) -> Tensor:
    """The tokens of a sample, (1, S, D), however its embedder lays them out."""
    return tokens.flatten(2).transpose(1, 2) if tokens.ndim == 5 else tokens.view(1, -1, tokens.shape[-1])


def gradients(model: nn.Module, prediction: Tensor) -> set[str]:
    """The parameters that a loss of the prediction moves."""
    model.zero_grad()
    prediction.square().mean().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
