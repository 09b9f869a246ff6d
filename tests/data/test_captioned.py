"""From entries to samples: what is found, what it is paired with, and what is left out and why."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tread.data.captioned.entries import DataConfig, VideoConfig
from tread.data.captioned.finding import Skipped
from tread.data.captioned.samples import Collected, Sample, collect, tell_skipped
from tread.errors import ConfigError, DataError


def picture(path: Path, size: tuple[int, int] = (8, 6), caption: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)
    return path


def gather(*configs: DataConfig, video: bool = False) -> tuple[Collected, list[str]]:
    said: list[str] = []
    return collect(configs, video=video, say=said.append, progress=False), said


def at(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(instance_data_dir=str(folder), **changes)


def names(samples: list[Sample]) -> list[str]:
    return [Path(str(sample.media)).name for sample in samples]


def test_a_folder_with_text_files_needs_no_settings(tmp_path: Path) -> None:
    picture(tmp_path / "b.png", (8, 6), "a  red\nwall\n")
    picture(tmp_path / "a" / "z.jpg", (4, 4), "\ufeffanother")
    picture(tmp_path / ".thumbs" / "b.png")
    (tmp_path / "notes.pdf").touch()
    found, said = gather(at(tmp_path))
    assert [(s.media, s.captions, s.size) for s in found.samples] == [
        (tmp_path / "a" / "z.jpg", ("another",), (4, 4)),
        (tmp_path / "b.png", ("a red wall",), (8, 6)),
    ]
    assert (found.skipped, said) == ([], [])


def test_what_cannot_be_used_is_listed_with_its_reason(tmp_path: Path) -> None:
    picture(tmp_path / "good.png", (64, 64), "good")
    picture(tmp_path / "mute.png")
    picture(tmp_path / "blank.png", caption=" \n")
    picture(tmp_path / "small.png", (16, 64), "small")
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "broken.txt").write_text("broken")
    picture(tmp_path / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    (tmp_path / "clip.mp4").touch()
    (tmp_path / "clip.txt").write_text("a clip")
    (tmp_path / "phone.HEIC").touch()
    found, _ = gather(at(tmp_path, minimum_image_size=33))
    assert names(found.samples) == ["good.png"]
    reasons = {Path(name).name: reason for name, reason in found.skipped}
    assert reasons.pop("broken.png").startswith("cannot read ")
    assert reasons.pop("latin.png") == "its caption latin.txt is not UTF-8 text: save it again as UTF-8"
    assert reasons == {
        "mute.png": "it has no caption: there is no text in mute.txt",
        "blank.png": "it has no caption: there is no text in blank.txt",
        "small.png": "its 16x64 pixels are below minimum_image_size 33",
        "clip.mp4": "it is a clip, and the model trains on images",
        "phone.HEIC": "images of this format are not read: save it as .png or .jpg",
    }
    said: list[str] = []
    tell_skipped(found.skipped, tmp_path / "skipped.txt", said.append)
    assert said[0] == f"7 files left out, all listed in {tmp_path / 'skipped.txt'}:"
    assert len(said) == 6
    assert len((tmp_path / "skipped.txt").read_text().splitlines()) == 7
    tell_skipped([], tmp_path / "skipped.txt", said.append)
    assert not (tmp_path / "skipped.txt").exists()


def test_a_caption_with_half_a_character_is_left_out(tmp_path: Path) -> None:
    """JSON can say it, when text was cut in the middle of an emoji; tokenizers end with a traceback."""
    rows = [{"file_name": f"{name}.png", "text": text} for name, text in (("good", "a cat"), ("cut", "a cat \ud83d"))]
    for row in rows:
        picture(tmp_path / row["file_name"])
    (tmp_path / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found, _ = gather(at(tmp_path))
    assert names(found.samples) == ["good.png"]
    ((name, reason),) = found.skipped
    assert name.endswith("cut.png")
    assert reason == "its caption has a character that is not text, in 'a cat \\ud83d': remove it"


def test_a_name_that_is_not_utf8_is_listed_with_an_escape(tmp_path: Path) -> None:
    said: list[str] = []
    tell_skipped([Skipped(os.fsdecode(b"caf\xe9.png"), "it is broken")], tmp_path / "skipped.txt", said.append)
    assert (tmp_path / "skipped.txt").read_text() == "caf\\udce9.png\tit is broken\n"
    assert said[1] == "  caf\\udce9.png: it is broken"


def test_caption_strategies(tmp_path: Path) -> None:
    picture(tmp_path / "a_red_wall.png", caption="from the file")
    picture(tmp_path / "b.png")
    for changes, expected in (
        ({"caption_strategy": "filename"}, ["a red wall", "b"]),
        ({"caption_strategy": "instanceprompt", "instance_prompt": "sks"}, ["sks", "sks"]),
        ({"instance_prompt": "sks"}, ["from the file", "sks"]),
        ({"caption_strategy": "textfile"}, ["from the file"]),
    ):
        found, _ = gather(at(tmp_path, **changes))
        assert [caption for sample in found.samples for caption in sample.captions] == expected


def test_tables_of_every_kind(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        picture(tmp_path / "images" / f"{name}.png")
    csv = tmp_path / "t.csv"
    csv.write_text('file,caption\nimages/b.png,"one, two"\nimages/a.png,\nimages/none.png,x\n,y\n')
    found, _ = gather(DataConfig(type="csv", metadata_file=str(csv)))
    assert [(Path(str(s.media)).name, s.captions) for s in found.samples] == [("b.png", ("one, two",))]
    assert [(Path(name).name, reason) for name, reason in found.skipped] == [
        ("a.png", "it has no caption in the table"),
        ("none.png", "there is no such file"),
        ("t.csv row 4", "column file is empty"),
    ]
    lines = tmp_path / "t.jsonl"
    rows = [{"image": "c.png", "say": ["one", "two"]}, {"image": "a.png", "say": "three"}]
    lines.write_text("\n\n".join(json.dumps(row) for row in rows))
    found, _ = gather(at(tmp_path / "images", metadata_file=str(lines), caption_column="say"))
    assert [(Path(str(s.media)).name, s.captions) for s in found.samples] == [
        ("c.png", ("one", "two")),
        ("a.png", ("three",)),
    ]
    (tmp_path / "images" / "metadata.csv").write_text("file_name,text\nb.png,by convention\n")
    found, _ = gather(at(tmp_path / "images"))
    assert [sample.captions for sample in found.samples] == [("by convention",)]


def test_a_table_without_captions_leaves_them_to_text_files(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", caption="from the file")
    (tmp_path / "t.csv").write_text("file_name\na.png\n")
    found, _ = gather(DataConfig(metadata_file=str(tmp_path / "t.csv")))
    assert found.samples[0].captions == ("from the file",)
    with pytest.raises(ConfigError, match=r"no column of captions in \S+t\.csv, which has file_name; name it in capt"):
        gather(DataConfig(metadata_file=str(tmp_path / "t.csv"), caption_strategy="csv"))
    (tmp_path / "t.csv").write_text("file_name,text\n")
    with pytest.raises(DataError, match=r"t\.csv has no rows: write one for each sample, below a header line in CSV$"):
        gather(DataConfig(metadata_file=str(tmp_path / "t.csv")))


@pytest.mark.parametrize("ending", [".mask", "_mask", "-mask"])
def test_masks_beside_their_pictures_are_masks_and_no_samples(tmp_path: Path, ending: str) -> None:
    picture(tmp_path / "a.jpg", caption="a")
    mask = picture(tmp_path / f"a{ending}.png")
    picture(tmp_path / "b.jpg", caption="b")
    picture(tmp_path / f"alone{ending}.png", caption="its picture is missing: a sample like any other")
    found, said = gather(at(tmp_path))
    assert [sample.mask for sample in found.samples] == [mask, None, None]
    assert found.skipped == []  # not even as a picture without a caption
    assert said == [f"{tmp_path.name}: 1 of 3 samples have a mask; in the other 2 every pixel counts"]


def test_masks_of_a_folder_and_of_another_entry(tmp_path: Path) -> None:
    for name in ("x/a.jpg", "b.jpg"):
        picture(tmp_path / "images" / name, caption="p")
    mask = picture(tmp_path / "masks" / "x" / "a.png")
    found, said = gather(
        at(tmp_path / "images", conditioning_data_dir=str(tmp_path / "masks"), conditioning_type="segmentation")
    )
    assert [(s.mask, s.mask_kind) for s in found.samples] == [(None, "segmentation"), (mask, "segmentation")]
    assert said == ["images: 1 of 2 samples have a mask; in the other 1 every pixel counts"]
    other = at(tmp_path / "masks", id="m", dataset_type="conditioning", conditioning_type="mask")
    found, _ = gather(at(tmp_path / "images", conditioning_data="m"), other)
    assert [(s.mask, s.mask_kind) for s in found.samples] == [(None, "mask"), (mask, "mask")]
    with pytest.raises(ConfigError, match=r"conditioning_data of data entry 'images' is 'n'.* are: m\."):
        gather(at(tmp_path / "images", conditioning_data="n"), other)
    with pytest.raises(ConfigError, match=r"conditioning_data_dir names '\S+/none', which is no folder"):
        gather(at(tmp_path / "images", conditioning_data_dir=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"data has no entry to train on, only conditioning entries"):
        gather(other)


def test_a_subfolder_that_data_names_holds_no_samples_of_the_folder_around_it(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", caption="a")
    picture(tmp_path / "other" / "b.png", caption="b")
    mask = picture(tmp_path / "masks" / "a.png")
    picture(tmp_path / "held" / "c.png", caption="c")
    one = at(tmp_path, conditioning_data_dir=str(tmp_path / "masks"), instance_prompt="any")
    found, _ = gather(one, at(tmp_path / "other" / ".." / "held", dataset_type="eval"))
    assert [
        (sample.media.name, sample.mask, sample.held_out) for sample in found.samples if isinstance(sample.media, Path)
    ] == [
        ("a.png", mask, False),
        ("b.png", None, False),
        ("c.png", None, True),
    ]
    assert found.skipped == []
    twice, _ = gather(at(tmp_path / "held", id="1"), at(tmp_path / "held", id="2", resolution=512))
    assert names(twice.samples) == ["c.png", "c.png"]


def test_masks_that_fit_no_sample_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png", caption="a")
    picture(tmp_path / "masks" / "mask_a.png")
    message = (
        r"^none of the 1 samples of data entry .images. has a mask in .* is \S+/a\.png, the first mask \S+/mask_a\.png"
    )
    with pytest.raises(DataError, match=message):
        gather(at(tmp_path / "images", conditioning_data_dir=str(tmp_path / "masks")))
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps({"file_name": "images/a.png", "text": "a", "mask": "gone.png"}))
    with pytest.raises(DataError, match=r"a\.png: there is no file \S+/gone\.png$"):
        gather(DataConfig(metadata_file=str(table)))


def test_a_mask_of_another_shape_is_told(tmp_path: Path) -> None:
    """A mask made of the pixels of a photo that its EXIF tag rotates lies across it."""
    (tmp_path / "images").mkdir()
    tag = Image.Exif()
    tag[0x0112] = 6
    Image.new("RGB", (90, 60)).save(tmp_path / "images" / "turned.jpg", exif=tag)
    picture(tmp_path / "images" / "upright.jpg", (901, 601), "b")
    (tmp_path / "images" / "turned.txt").write_text("a")
    across = picture(tmp_path / "masks" / "turned.png", (90, 60))
    picture(tmp_path / "masks" / "upright.png", (57, 38))  # a sixteenth, rounded
    _, said = gather(at(tmp_path / "images", conditioning_data_dir=str(tmp_path / "masks")))
    assert said[1:] == [
        f"images: 1 mask of another shape than the image (the first is {across}, 90x60 for 60x90), stretched to it; "
        "a mask of a rotated photo must be rotated too"
    ]


def test_pairs_need_both_images(tmp_path: Path) -> None:
    picture(tmp_path / "after" / "a.jpg", (8, 8), "make it red")
    picture(tmp_path / "after" / "b.jpg", (8, 8), "make it blue")
    before = picture(tmp_path / "before" / "a.webp", (16, 4))
    found, _ = gather(
        at(tmp_path / "after", conditioning_data_dir=str(tmp_path / "before"), conditioning_type="reference")
    )
    assert [(s.references, s.reference_sizes, s.mask) for s in found.samples] == [((before,), ((16, 4),), None)]
    assert found.skipped == [Skipped(str(tmp_path / "after/b.jpg"), "it has no reference image of the same name")]
    table = tmp_path / "pairs.jsonl"
    row = {"file_name": "after/b.jpg", "text": "t", "reference": "before/a.webp", "mask": "after/a.jpg"}
    table.write_text(json.dumps(row))
    found, _ = gather(DataConfig(metadata_file=str(table)))
    assert (found.samples[0].references, found.samples[0].mask) == ((before,), tmp_path / "after/a.jpg")


def test_a_sample_has_a_reference_of_each_folder_that_knows_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "after" / f"{name}.png", (8, 8), "join them")
    one, two = (picture(tmp_path / folder / "a.png") for folder in ("people", "hats"))
    three = picture(tmp_path / "hats" / "b.png", (4, 4))
    folders = {"conditioning_data_dir": (str(tmp_path / "people"), str(tmp_path / "hats"))}
    entries = [
        at(tmp_path / place, id=place, dataset_type="conditioning", conditioning_type="reference")
        for place in ("people", "hats")
    ]
    for configs in (
        [at(tmp_path / "after", conditioning_type="reference", **folders)],
        [at(tmp_path / "after", conditioning_data=("people", "hats")), *entries],
    ):
        found, _ = gather(*configs)
        assert [sample.references for sample in found.samples] == [(one, two), (three,)]
        assert [sample.reference_sizes for sample in found.samples] == [((8, 6), (8, 6)), ((4, 4),)]


def test_a_table_lists_several_references(tmp_path: Path) -> None:
    picture(tmp_path / "x.png")
    one, two = picture(tmp_path / "1.png"), picture(tmp_path / "2.png")
    table = tmp_path / "t.jsonl"
    rows = [["1.png", "2.png"], "2.png", []]
    table.write_text("\n".join(json.dumps({"file": "x.png", "text": "t", "references": row}) for row in rows))
    found, _ = gather(DataConfig(metadata_file=str(table)))
    assert [sample.references for sample in found.samples] == [(one, two), (two,), ()]
    table = tmp_path / "t.csv"
    table.write_text("file,text,who,what\nx.png,t,2.png,1.png\nx.png,t,,1.png\n")
    found, _ = gather(DataConfig(metadata_file=str(table), reference_column=("who", "what")))
    assert [sample.references for sample in found.samples] == [(two, one), (one,)]
    with pytest.raises(ConfigError, match=r"reference_column is 'hat', but .* has the columns file, text, who, what"):
        gather(DataConfig(metadata_file=str(table), reference_column=("who", "hat")))


def test_clips_and_animations_are_for_video_models(
    tmp_path: Path, write_clip: Callable[[Path, np.ndarray], Path]
) -> None:
    picture(tmp_path / "still.png", caption="s")
    frames = [Image.new("RGB", (8, 8), (n * 40, 0, 0)) for n in range(5)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    write_clip(tmp_path / "clip.mkv", np.zeros((7, 16, 16, 3), dtype=np.uint8))
    for name in ("moving", "clip"):
        (tmp_path / f"{name}.txt").write_text(name)

    def frames_of(is_video_model: bool, /, **changes: Any) -> dict[str, int]:
        found, _ = gather(at(tmp_path, **changes), video=is_video_model)
        return {Path(str(s.media)).stem: s.frames for s in found.samples}

    assert frames_of(True) == {"clip": 7, "moving": 5, "still": 1}
    assert frames_of(False) == {"moving": 1, "still": 1}
    assert frames_of(True, dataset_type="image") == {"moving": 1, "still": 1}
    assert frames_of(True, dataset_type="video") == {"clip": 7, "moving": 5}
    assert frames_of(True, video=VideoConfig(min_frames=6)) == {"clip": 7, "still": 1}
    assert frames_of(True, video=VideoConfig(max_frames=6)) == {"moving": 5, "still": 1}
    with pytest.raises(ConfigError, match=r"is 'video', but the model trains on images"):
        gather(at(tmp_path, dataset_type="video"))


def test_samples_know_their_entry(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", caption="1")
    picture(tmp_path / "b" / "2.png", caption="2")
    found, _ = gather(at(tmp_path / "a", repeats=3), at(tmp_path / "b", dataset_type="eval"))
    assert [(s.dataset, s.repeats, s.held_out) for s in found.samples] == [(0, 3, False), (1, 1, True)]


def test_nothing_to_train_on_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"instance_data_dir of data entry 'none' is '\S+/none', which is no folder"):
        gather(at(tmp_path / "none"))
    with pytest.raises(DataError, match=r"nothing to train on in \S+ \(.*\): found no files at all; put images or cli"):
        gather(at(tmp_path))
    (tmp_path / "a.psd").touch()
    (tmp_path / "b.psd").touch()
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"found 2 \.psd, 1 \.txt; put images or clips with \.txt captions there"):
        gather(at(tmp_path))
    picture(tmp_path / "c.png")
    message = r"none is left of 1 file, the first because \S+c\.png: it has no caption: .*\. Write captions, or set "
    with pytest.raises(DataError, match=message):
        gather(at(tmp_path))


@pytest.mark.realdata
def test_emoji_with_their_table(real_data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(real_data / "emoji3d" / "emoji3d_256.zip") as archive:
        wanted = archive.namelist()[:20]
        archive.extractall(tmp_path, wanted)
    found, _ = gather(at(tmp_path, metadata_file=str(real_data / "emoji3d" / "captions.csv")))
    assert sorted(names(found.samples)) == sorted(wanted)
    assert {sample.size for sample in found.samples} == {(256, 256), (256, 264)}
    assert all(sample.captions[0] for sample in found.samples)
    assert {reason for _, reason in found.skipped} == {"there is no such file"}


def test_two_entries_with_one_id_are_refused() -> None:
    entries = [DataConfig(id="mine", instance_data_dir=place) for place in ("one", "two")]
    with pytest.raises(ConfigError, match=r"^2 data entries have the id 'mine'; give each its own\.$"):
        collect(entries, video=False)
