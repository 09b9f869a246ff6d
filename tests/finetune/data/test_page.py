"""`tread data CONFIG --html PAGE`: what it prints, and samples, captions and masks on its page, in a browser too."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser import PHONE, Browser
from tests.finetune.data.test_visits import write_text_masks
from tests.tiny.pictures import write_clips, write_gradients, write_noise
from tests.tiny.pipelines import TINY, PipelineFolder
from tread.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]
EVIL = "<img src=x onerror=\"document.title='hit'\"> a cat"


def write_config(folder: Path, place: str, data: Any, name: str = "flux", **changes: Any) -> Path:
    config = {"model_family": TINY[name].family, "pretrained_model_name_or_path": place, "data": data}
    (folder / "c.json").write_text(json.dumps(config | {"train_batch_size": 2} | changes))
    return folder / "c.json"


def page_of(config: Path, *arguments: str) -> str:
    main(["data", str(config), "--html", str(config.with_name("page.html")), *arguments])
    return config.with_name("page.html").read_text(encoding="utf-8")


def pictures(page: str) -> list[np.ndarray]:
    found = re.findall(r'<img src="data:image/webp;base64,([^"]+)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB"), dtype=int) for one in found]


@pytest.fixture
def config(pipeline_folder: PipelineFolder, tmp_path: Path) -> Path:
    """Squares with masks, squares and wide pictures without; one broken file."""
    masked, plain = write_gradients(tmp_path / "masked", masked=True), write_noise(tmp_path / "plain")
    (plain / "broken.png").write_text("no image")
    (plain / "broken.txt").write_text("broken")
    (plain / "1.txt").write_text(EVIL)
    entries = [
        {"instance_data_dir": str(masked), "repeats": 3, "horizontal_flip": True, "caption_suffix": "in oil"},
        {"instance_data_dir": str(plain), "loss_weight": 0.5, "shuffle_tags": True, "tag_separator": " "},
    ]
    return write_config(tmp_path, str(pipeline_folder("flux")), entries, resolution=64, trigger_word="ohwx")


def test_it_prints_buckets_entries_and_what_is_left_out(config: Path, capsys: Capture) -> None:
    main(["data", str(config), "seed=1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "8 samples in 2 buckets; an epoch is 6 batches of 2 in one process",
        "  64x64  6 samples, 10 visits an epoch",
        "  96x48  2 samples",
        "masked: 2 samples; 3 visits each; trigger word 'ohwx'; 2 with a mask; half of the visits mirrored",
        "plain: 6 samples; 16 captions each; trigger word 'ohwx'; loss weight 0.5",
    ]
    assert lines[5] == "1 file left out:"
    assert lines[6].startswith("  broken.png: cannot read ")


def test_where_the_rest_of_what_is_left_out_is_listed(config: Path, capsys: Capture) -> None:
    for i in range(6):
        (config.parent / "plain" / f"broken{i}.png").write_text("no image")
        (config.parent / "plain" / f"broken{i}.txt").write_text("broken")
    main(["data", str(config)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[5] == "7 files left out:"
    assert lines[11] == "  and 2 more, which --html PAGE lists"


def test_settings_may_stand_after_options(config: Path, capsys: Capture) -> None:
    assert "trigger word &#x27;sks&#x27;" in page_of(config, "trigger_word=sks")
    with pytest.raises(SystemExit) as end:
        main(["finetune", str(config), "--check", "lora_rank=3"])
    assert end.value.code == 0
    assert capsys.readouterr().out.endswith("it runs\n")


def test_the_page_shows_the_crops_that_would_be_encoded(config: Path, tmp_path: Path) -> None:
    page = page_of(config)
    assert re.findall(r"<h2>([^<]+)</h2>", page) == ["Entries", "64 x 64", "96 x 48", "Left out"]
    assert page.count('class="sample"') == 8
    assert "ohwx, picture 0 in oil" in page
    assert "15 more captions, the first 8" in page
    assert "<img src=x" not in page
    assert "&lt;img" in page
    found = pictures(page)
    assert len(found) == 10, "two of them masks"
    straight = np.asarray(Image.open(tmp_path / "masked" / "0.png").convert("RGB"), dtype=int)
    assert np.abs(found[0] - straight).mean() < 4, "as WebP stores it"
    white = np.asarray(Image.open(tmp_path / "masked" / "0_mask.png"), dtype=float)[..., None] / 255
    faded = straight * (0.2 + 0.8 * white) + 128 * 0.8 * (1 - white)
    assert np.abs(found[1] - faded).mean() < 4
    assert "16% of it under the mask" in page  # 21 of 64 columns at half of the weight


def test_of_many_samples_some_are_shown(config: Path) -> None:
    page = page_of(config, "--most", "4")
    assert page.count('class="sample"') == 3 + 2
    assert "6 samples, 10 visits an epoch; 3 of them are shown." in page


def test_clips_are_shown_by_four_frames(pipeline_folder: PipelineFolder, tmp_path: Path, capsys: Capture) -> None:
    clips = write_clips(tmp_path / "clips")
    entry = {"instance_data_dir": str(clips), "resolution": 64, "video": {"num_frames": 9, "frame_rate": 8}}
    page = page_of(write_config(tmp_path, str(pipeline_folder("wan")), entry, "wan"))
    assert "64 x 64, 5 frames" in page  # 16 frames of 60 ms are 8 at that rate, and Wan takes 1 + a multiple of 4
    assert [one.shape for one in pictures(page)] == [(128, 128, 3)] * 2
    assert "read at 8.0 frames per second" in capsys.readouterr().out


def test_what_a_run_refuses_is_a_note(pipeline_folder: PipelineFolder, tmp_path: Path, capsys: Capture) -> None:
    entry = {"instance_data_dir": str(write_text_masks(tmp_path / "signs")), "horizontal_flip": True, "resolution": 64}
    page = page_of(write_config(tmp_path, str(pipeline_folder("flux")), entry))
    assert "A run refuses this: horizontal_flip of data entry" in page
    assert "looks like text" in capsys.readouterr().out
    main(["data", str(write_config(tmp_path, "somebody/not-here", entry))])
    assert "The model somebody/not-here is not on this disk: buckets are for sides that are multiples of 16." in (
        capsys.readouterr().out
    )


def test_missing_sound_is_a_note(pipeline_folder: PipelineFolder, tmp_path: Path, capsys: Capture) -> None:
    entry = {"instance_data_dir": str(write_clips(tmp_path / "mute")), "resolution": 64, "video": {"num_frames": 9}}
    main(["data", str(write_config(tmp_path, str(pipeline_folder("ltxvideo2")), entry, "ltxvideo2", sound="train"))])
    assert "A run refuses this: sound is 'train', but 2 of 2 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "no/such/page.html"], "tread data: cannot write no/such/page.html (No such file"),
        (["--most", "0"], "--most must be at least 1"),
        (["data=nowhere"], "tread data: instance_data_dir of data entry 'nowhere' is 'nowhere', which is no folder."),
    ],
)
def test_bad_arguments_are_one_sentence(config: Path, arguments: list[str], words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", str(config), *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (PHONE, True)])
def test_it_fits_every_screen(browser: Browser, config: Path, width: int, dark: bool) -> None:
    page_of(config)
    browser.open(config.with_name("page.html"), width=width, dark=dark)
    assert (browser.errors(), browser.resources(), browser.overflow()) == ([], [], 0)
    assert browser.run("return document.title") == "The data of c.json - tread data"
    sizes = (
        "return [...document.images].map(i => i.complete && i.naturalWidth > 0 && i.getBoundingClientRect().width > 20)"
    )
    assert browser.run(sizes) == [True] * 10
    with Image.open(browser.screenshot(config.with_name("shot.png"))) as shot:
        (corner,) = shot.convert("L").crop((2, 2, 3, 3)).tobytes()
    assert corner < 64 if dark else corner == 255


def test_captions_open_without_scripts(browser: Browser, config: Path) -> None:
    page_of(config)
    browser.open(config.with_name("page.html"), scripts=False)
    browser.click("details summary")
    assert browser.run("return document.querySelector('details').open")
