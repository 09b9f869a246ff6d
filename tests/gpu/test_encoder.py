"""Text encoders whose weights are copied to the GPU layer by layer read captions as those on the GPU do."""

from pathlib import Path

import pytest
import torch

from tests.tiny.pipelines import FIRST, TINY
from tread.finetune.data import encoder
from tread.finetune.data.encoder import Encoder
from tread.finetune.families import open_family
from tread.finetune.model.source import Source

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", FIRST)
def test_captions_are_those_of_encoders_on_the_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TINY[name](tmp_path)
    family = open_family(TINY[name].family, Source(str(tmp_path)))
    if family.sees is not None:
        pytest.skip("the text encoder sees images too")
    found = []
    for free in (float("inf"), 0.0):
        monkeypatch.setattr(encoder, "free_bytes", lambda _, free=free: free)
        parts = (*family.text_parts, *family.needed_parts)
        text = Encoder(
            lambda parts=parts: family.source.pipeline(*parts, given=family.stand_ins()),
            lambda: None,
            torch.device("cuda"),
        )
        with torch.no_grad():
            found += family.encode_text(text.pipeline, ["a cat on a mat"])
    whole, copied = found
    assert whole.keys() == copied.keys()
    for key, value in whole.items():
        torch.testing.assert_close(copied[key].cpu(), value.cpu(), rtol=0, atol=0)
