"""Missing tensors are named and refused, with the stock classes themselves; what their loaders tolerate is not."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny.autoencoders import tiny_autoencoder
from tests.tiny.text_encoders import clip_text, t5_text
from tests.tiny.transformers import flux
from tread.data.stock import check_tokenizer, check_weights
from tread.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
State = dict[str, Tensor]


PARTS: dict[str, Callable[[], Any]] = {
    "clip": clip_text,
    "t5": t5_text,
    "vae": partial(tiny_autoencoder, channels=4),
    "transformer": flux,
}


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The class of a part and the folder it is saved in, `PIPELINE/part`."""
    model = PARTS[request.param]()
    model.save_pretrained(tmp_path / "part")
    return type(model), tmp_path / "part"


def weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def rewrite(folder: Path, change: Callable[[State], State]) -> None:
    save_file(change(load_file(weights(folder))), weights(folder), metadata={"format": "pt"})


def check(part: tuple[Any, Path], *, quantized: bool = False, **where: Any) -> None:
    cls, folder = part
    check_weights(cls, str(folder.parent), folder.name, quantized=quantized, **where)


def refused(part: tuple[Any, Path], **where: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(part, **where)
    return str(error.value)


def test_what_is_whole_is_not_refused(part: tuple[Any, Path]) -> None:
    check(part)


def test_a_file_without_tensors_is_refused(part: tuple[Any, Path]) -> None:
    cls, folder = part
    names = sorted(load_file(weights(folder)))
    rewrite(folder, lambda state: {})
    text = refused(part)
    count = re.escape(f"part of {folder.parent} is not whole: {weights(folder)} lacks ")
    assert re.match(rf"{count}\d+ tensors \(.* and \d+ more\) of {cls.__name__}, which would be random\. Get ", text)
    assert ", ".join(names[:3]) in text


def test_one_tensor_that_is_missing_is_named(part: tuple[Any, Path]) -> None:
    cls, folder = part
    gone = sorted(load_file(weights(folder)))[5]
    rewrite(folder, lambda state: {name: tensor for name, tensor in state.items() if name != gone})
    assert refused(part) == (
        f"part of {folder.parent} is not whole: {weights(folder)} lacks 1 tensor ({gone}) of {cls.__name__}, which "
        "would be random. Get that part of the model again."
    )


def test_a_shard_that_lacks_tensors_is_named(part: tuple[Any, Path]) -> None:
    cls, folder = part
    whole = weights(folder)
    model = cls.from_pretrained(folder)
    whole.unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    check(part)
    (index,) = folder.glob("*.index.json")
    gone, shard = sorted(json.loads(index.read_text())["weight_map"].items())[5]
    state = load_file(folder / shard)
    save_file({name: state[name] for name in state.keys() - {gone}}, folder / shard, metadata={"format": "pt"})
    assert f"{folder / shard} lacks 1 tensor ({gone}) of" in refused(part)
    (folder / shard).unlink()
    assert shard in refused(part)


def test_a_cut_file_is_named(part: tuple[Any, Path]) -> None:
    _, folder = part
    os.truncate(weights(folder), weights(folder).stat().st_size - 10)
    text = refused(part)
    assert text.startswith(f"part of {folder.parent} cannot be loaded: ")
    assert text.endswith(f"{weights(folder).name} is cut or damaged: get it again.")


def test_another_shape_is_refused(part: tuple[Any, Path]) -> None:
    _, folder = part
    name = sorted(load_file(weights(folder)))[-1]
    rewrite(folder, lambda state: state | {name: torch.zeros(3, 5)})
    text = refused(part)
    assert name in text
    assert "3, 5" in text


@pytest.mark.parametrize("part", ["clip", "t5", "transformer"], indirect=True)
def test_a_config_of_fewer_layers_is_refused(part: tuple[Any, Path]) -> None:
    cls, folder = part
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_hidden_layers", "num_layers"):
        if key in config:
            config[key] = 1
    (folder / "config.json").write_text(json.dumps(config))
    text = refused(part)
    assert "does not fit its config" in text
    assert f"in layers that a {cls.__name__} of this config has not. Restore its config.json" in text


def test_what_stock_loaders_tolerate_is_not_refused(part: tuple[Any, Path]) -> None:
    """Tied weights under either name or both, a saved buffer, tensors of a head that the class leaves out."""
    cls, folder = part
    rewrite(
        folder, lambda state: state | {"text_projection.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2)}
    )
    left_out = rf"holds 2 tensors \(lm_head\.weight, text_projection\.weight\) that a {cls.__name__} of its config"
    with pytest.warns(UserWarning, match=left_out):
        check(part)
    if cls.__name__ == "T5EncoderModel":
        rewrite(folder, lambda state: state | {"encoder.embed_tokens.weight": state["shared.weight"].clone()})
        check(part)
        rewrite(folder, lambda state: {name: state[name] for name in state.keys() - {"shared.weight"}})
        check(part)
        rewrite(folder, lambda state: {name: state[name] for name in state.keys() - {"encoder.embed_tokens.weight"}})
        assert "lacks 2 tensors (encoder.embed_tokens.weight, shared.weight) of" in refused(part)
    if cls.__name__ == "CLIPTextModel":
        positions = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
        rewrite(folder, lambda state: {f"text_model.{name}": tensor for name, tensor in state.items()} | positions)
        check(part)


def test_a_part_need_not_have_the_variant(part: tuple[Any, Path]) -> None:
    cls, folder = part
    check(part, variant="fp16")
    cls.from_pretrained(folder).save_pretrained(folder, variant="fp16")
    check(part, variant="fp16")
    (file,) = folder.glob("*.fp16.safetensors")
    save_file({}, file, metadata={"format": "pt"})
    assert "is not whole" in refused(part, variant="fp16")
    check(part)


def test_a_quantized_text_encoder(tmp_path: Path) -> None:
    """Its scales are tensors of the file that are none of the model's."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig, T5EncoderModel

    t5_text(hidden=64).save_pretrained(tmp_path / "plain")
    for name, config in {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }.items():
        model = T5EncoderModel.from_pretrained(tmp_path / "plain", quantization_config=config, device_map="cpu")
        folder = tmp_path / name
        model.save_pretrained(folder)
        assert len(load_file(weights(folder))) > len(load_file(weights(tmp_path / "plain")))
        check((T5EncoderModel, folder), quantized=True)
        kept = "encoder.final_layer_norm.weight"
        rewrite(folder, lambda state, kept=kept: {name: state[name] for name in state.keys() - {kept}})
        assert f"lacks 1 tensor ({kept}) of" in refused((T5EncoderModel, folder), quantized=True)


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    assert len(CLIPTokenizer.from_pretrained(folder)) < 10, "transformers makes one that knows no word"
    with pytest.raises(ConfigError) as error:
        check_tokenizer(CLIPTokenizer, str(tmp_path), "tokenizer")
    assert str(error.value) == (
        f"tokenizer of {tmp_path} has no vocabulary: a CLIPTokenizer needs tokenizer.json or tokenizer.model or "
        "merges.txt with vocab.json. Get that part of the model again."
    )
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no vocabulary"):
        check_tokenizer(CLIPTokenizer, str(tmp_path), "tokenizer")
    (folder / "merges.txt").write_text("")
    check_tokenizer(CLIPTokenizer, str(tmp_path), "tokenizer")
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    (folder / "tokenizer.json").write_text("{}")
    check_tokenizer(CLIPTokenizer, str(tmp_path), "tokenizer")
