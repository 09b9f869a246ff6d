"""PRX: captions that are cleaned and padded on either side, both autoencoders, and adapters without a stock loader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import PROMPTS, drawn, opened, save_lora
from tread.data.stock import check_weights
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.prx import PRX
from tread.finetune.model.source import Source
from tread.finetune.result.card import example, loading_lines

Folder = Callable[[str], Path]


@pytest.fixture
def prx(pipeline_folder: Folder) -> tuple[PRX, Any]:
    return opened(pipeline_folder("prx"), "prx")


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_of_either_side_is_cut_off(prx: tuple[PRX, Any], side: str) -> None:
    family, pipeline = prx
    pipeline.tokenizer.padding_side = side
    texts = family.encode_text(pipeline, [*PROMPTS, ""])
    lengths = [len(ids) for ids in pipeline.tokenizer([*PROMPTS, ""]).input_ids]
    assert [len(text["embeds"]) for text in texts] == lengths
    embeds, mask, *_ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    assert embeds.shape[1] == 256
    noisy, time = drawn(2, 16, 4, 6), torch.tensor([0.3, 0.8])
    expected = pipeline.transformer(noisy, time, embeds, mask).sample
    batch = {f"text.{name}": value for name, value in family.collate_text(texts[:2]).items()}
    assert_close(family.predict(pipeline.transformer, noisy, time, batch), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_captions_are_cleaned_as_the_pipeline_cleans_them(prx: tuple[PRX, Any]) -> None:
    family, pipeline = prx
    plain, dirty = family.encode_text(pipeline, ["a photo of two dogs", "  A  photo of <b>two</b> dogs &amp "])
    cleaned = pipeline.text_preprocessor.clean_text("  A  photo of <b>two</b> dogs &amp ")
    (expected,) = family.encode_text(pipeline, [cleaned])
    assert_close(dirty["embeds"], expected["embeds"])
    assert plain["embeds"].shape != dirty["embeds"].shape


def test_as_many_tokens_are_read_as_the_tokenizer_says(prx: tuple[PRX, Any], tmp_path: Path) -> None:
    family, _ = prx
    assert family.text_length == 256
    copy = shutil.copytree(family.source.name_or_path, tmp_path / "model")
    config = copy / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 40}))
    assert open_family("prx", Source(str(copy))).text_length == 40
    assert open_family("prx", Source(str(copy)), 20).text_length == 20


def test_a_deep_autoencoder_s_latents_are_tokens(pipeline_folder: Folder) -> None:
    family, pipeline = opened(pipeline_folder("prx-dc"), "prx")
    assert (family.factor, family.patch, family.multiple) == (32, (1, 1, 1), 32)
    pixels = drawn(1, 3, 1, 64, 96).clamp(-1, 1)
    encoded = family.encode_pixels(pipeline, pixels)
    assert encoded.keys() == {"mean"}
    with torch.no_grad():
        assert_close(encoded["mean"], pipeline.vae.encode(pixels[:, :, 0]).latent * 2.0)


def test_an_adapter_is_a_peft_folder(prx: tuple[PRX, Any], tmp_path: Path) -> None:
    """Though the pipeline has `load_lora_weights`: that of a UNet."""
    family, pipeline = prx
    assert hasattr(pipeline, "load_lora_weights")
    save_lora(family, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert loading_lines("PRXPipeline", "standard") == ["PeftModel.from_pretrained(pipeline.transformer, folder)"]


def test_the_card_imports_the_text_encoder_before_diffusers(prx: tuple[PRX, Any]) -> None:
    """Else transformers has lost the class that diffusers adds to it, and the pipeline does not load."""
    config = make_config(Path(prx[0].source.name_or_path), "data", model_family="prx")
    torch_line, encoder_line, diffusers_line = example(prx[0], ["transformer"], config, {}).splitlines()[:3]
    assert torch_line == "import torch"
    assert encoder_line.startswith("import transformers.models.t5gemma.modeling_t5gemma")
    assert diffusers_line.startswith("from diffusers import PRXPipeline")


def test_what_cannot_be_tuned_is_refused(prx: tuple[PRX, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.prx import pipeline_prx

    copy = shutil.copytree(prx[0].source.name_or_path, tmp_path / "prx-512-distilled")
    distilled = open_family("prx", Source(str(copy)))
    assert distilled.distilled
    assert (distilled.steps, distilled.guidance) == (8, 1.0)
    file = copy / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    config["encoder"]["hidden_size"] = 24
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text_encoder of .* width 24, but the transformer reads 16"):
        open_family("prx", Source(str(copy)))
    monkeypatch.delattr(pipeline_prx, "ftfy")
    with pytest.raises(ConfigError, match="cleans captions with ftfy, which is not installed: pip install ftfy"):
        open_family("prx", prx[0].source)


def test_the_text_encoder_is_checked_by_its_own_config(prx: tuple[PRX, Any], tmp_path: Path) -> None:
    """Its class reads the config of a whole T5Gemma, from no subfolder; a file without tensors is seen."""
    from safetensors.torch import save_file

    family, _ = prx
    model: Any = family.source.check("text_encoder")["text_encoder"]
    assert model.embed_tokens.weight.shape[1] == 16
    copy = shutil.copytree(family.source.name_or_path, tmp_path / "model")
    save_file({}, copy / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"text_encoder of .* is not whole"):
        check_weights(type(model), str(copy), "text_encoder", quantized=False)
