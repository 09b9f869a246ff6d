"""Pipelines whose files lack tensors are refused before anything is encoded; whole ones of every family are not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.tiny.pipelines import TINY
from tread.cli import main
from tread.errors import ConfigError
from tread.finetune.model.source import Source

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", TINY)
def test_every_part_of_a_whole_pipeline_passes(pipeline_folder: Folder, name: str) -> None:
    source = Source(str(pipeline_folder(name)))
    source.check(*source.parts, "a_part_that_is_not_there")


def test_a_processor_that_cannot_be_loaded_is_said(pipeline_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(pipeline_folder("qwen_image-edit"), tmp_path / "model")
    for file in (folder / "processor").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"^cannot load processor of \S+: "):
        Source(str(folder)).check("processor")


@pytest.fixture
def copied(pipeline_folder: Folder, tmp_path: Path) -> Path:
    """A FLUX to break."""
    return shutil.copytree(pipeline_folder("flux"), tmp_path / "model")


def empty(folder: Path) -> Path:
    """Take the tensors out of a part's file."""
    (file,) = folder.glob("*.safetensors")
    save_file({}, file, metadata={"format": "pt"})
    return file


def finetune(model: Path, data: Path, *settings: str) -> list[str]:
    """The arguments of the command."""
    tiny = ["max_train_steps=1", "mixed_precision=no", "report_to=none", "validation_num_inference_steps=1"]
    config = model.parent / "c.json"
    config.write_text(f'{{"model_family": "flux", "pretrained_model_name_or_path": "{model}", "data": "{data}"}}')
    folders = [f"output_dir={model.parent / 'run'}", f"cache_dir={model.parent / 'cache'}"]
    return ["finetune", str(config), *tiny, *folders, *settings]


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "vae", "transformer"])
def test_a_part_without_tensors_is_refused_before_anything_is_encoded(
    copied: Path, pictures: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = empty(copied / part)
    with pytest.raises(SystemExit) as end:
        main(finetune(copied, pictures, "resolution=64"))
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"tread finetune: {part} of {copied} is not whole: {file} lacks " in said
    assert "which would be random. Get that part of the model again." in said
    assert not list((copied.parent / "cache").rglob("*.safetensors")), "nothing was encoded"


def test_a_tokenizer_without_its_vocabulary_is_refused(copied: Path, pictures: Path, capsys: Any) -> None:
    (copied / "tokenizer_2" / "tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        main(finetune(copied, pictures, "resolution=64"))
    assert f"tokenizer_2 of {copied} has no vocabulary: a T5Tokenizer needs" in capsys.readouterr().err


def test_an_expert_that_only_previews_draw_with_is_checked_too(
    pipeline_folder: Folder, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(pipeline_folder("wan-a14b"), tmp_path / "model")
    empty(model / "transformer_2")
    settings = ["model_family=wan", "experts=high", "resolution=64"]
    with pytest.raises(SystemExit):
        main(finetune(model, pictures, *settings, "validation_prompt=a cat"))
    assert f"transformer_2 of {model} is not whole" in capsys.readouterr().err
