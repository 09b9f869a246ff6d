"""Tables and Hugging Face datasets: image folders, Parquet with bytes, and what `save_to_disk` leaves."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tread.data.captioned.buckets import Bucket, Crop
from tread.data.captioned.entries import DataConfig, data_configs
from tread.data.captioned.pixels import read_pixels
from tread.data.captioned.samples import Collected, collect
from tread.data.captioned.tables import read_table
from tread.errors import ConfigError, DataError

datasets: Any = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def pixels(colour: str) -> Image.Image:
    return Image.new("RGB", (6, 4), colour)


def gather(place: Path | str, **changes: Any) -> Collected:
    (entry,) = data_configs(str(place))
    return collect([DataConfig(**{**entry, **changes})], video=False, say=lambda text: None, progress=False)


def first_pixel(collected: Collected, index: int) -> list[int]:
    sample = collected.samples[index]
    return read_pixels(sample.media, Crop(Bucket(6, 4), 0.0, 0.0, 1.0, 1.0))[0, 0, 0].tolist()


def made(colours: list[str], **columns: list[Any]) -> Any:
    features = {"image": datasets.Image(), **{name: datasets.Value("string") for name in columns}}
    return datasets.Dataset.from_dict(
        {"image": [pixels(colour) for colour in colours], **columns}, features=datasets.Features(features)
    )


def test_a_saved_dataset_is_read_by_rows(tmp_path: Path) -> None:
    made(["red", "lime", "blue"], caption=["one", "", "three"]).save_to_disk(tmp_path / "d")
    found = gather(tmp_path / "d")
    assert [(s.captions, s.size) for s in found.samples] == [(("one",), (6, 4)), (("three",), (6, 4))]
    assert first_pixel(found, 0) == [255, 0, 0]
    assert first_pixel(found, 1) == [0, 0, 255]
    assert [(Path(name).name, reason) for name, reason in found.skipped] == [
        ("image[1]", "it has no caption in the table")
    ]


def test_parquet_with_bytes_and_columns_of_its_own(tmp_path: Path) -> None:
    table = made(["red", "blue"], Beschreibung=["eins", "zwei"]).rename_column("image", "Bild")
    (tmp_path / "d").mkdir()
    table.to_parquet(tmp_path / "d" / "train.parquet")
    found = gather(tmp_path / "d", image_column="Bild", caption_column="Beschreibung")
    assert [s.captions for s in found.samples] == [("eins",), ("zwei",)]
    assert first_pixel(found, 1) == [0, 0, 255]
    with pytest.raises(
        ConfigError, match=r"no column of files in \S+/d, which has Bild, Beschreibung; name it in image"
    ):
        gather(tmp_path / "d")
    with pytest.raises(
        ConfigError, match=r"image_column is 'Foto', but \S+/d has the columns Bild, Beschreibung; name"
    ):
        gather(tmp_path / "d", image_column="Foto")
    with pytest.raises(ConfigError, match=r"no column of captions in \S+/d"):
        gather(tmp_path / "d", image_column="Bild")


def test_an_image_folder_with_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "d" / "train"
    folder.mkdir(parents=True)
    for colour in ("red", "blue"):
        pixels(colour).save(folder / f"{colour}.png")
    (folder / "metadata.csv").write_text("file_name,text\nblue.png,the sea\nred.png,a rose\n")
    found = gather(tmp_path / "d", type="huggingface", dataset_name=str(tmp_path / "d"))
    assert {s.captions[0]: Path(str(s.media)) for s in found.samples} == {
        "a rose": folder / "red.png",
        "the sea": folder / "blue.png",
    }


def test_splits_and_places_that_are_not_there(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": made(["red"], text=["a"]), "test": made(["blue"], text=["b"])})
    both.save_to_disk(tmp_path / "d")
    assert [s.captions for s in gather(tmp_path / "d", split="test").samples] == [("b",)]
    with pytest.raises(ConfigError, match=r"split is 'val'; '\S+/d' has train, test"):
        gather(tmp_path / "d", split="val")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"dataset_name '\S+/empty' cannot be loaded \(.+\): give a folder or the id"):
        gather(tmp_path, type="huggingface", dataset_name=str(tmp_path / "empty"))


def test_a_parquet_table_of_file_names(tmp_path: Path) -> None:
    pixels("red").save(tmp_path / "a.png")
    datasets.Dataset.from_dict({"file": ["a.png"], "caption": ["a rose"]}).to_parquet(tmp_path / "t.parquet")
    assert [s.captions for s in gather(tmp_path / "t.parquet").samples] == [("a rose",)]
    (tmp_path / "broken.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"table \S+broken\.parquet cannot be read"):
        read_table(tmp_path / "broken.parquet")


def test_broken_tables_say_where(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"file": "a"}\n\n{"file": \n')
    with pytest.raises(DataError, match=r"line 3 of \S+t\.jsonl is not valid JSON \(.*\): correct it"):
        read_table(path)
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"line 1 of \S+t\.jsonl is not a JSON object"):
        read_table(path)
    (tmp_path / "t.csv").write_bytes("file,caption\na.png,café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"table \S+t\.csv cannot be read .*save it again as UTF-8"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("file;caption\na.png;a cat\n")
    with pytest.raises(DataError, match=r"t\.csv has the header 'file;caption': separate its columns by commas"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("file,caption\na.png,a cat,\nb.png,a cat, on a wall\n")
    with pytest.raises(DataError, match=r"line 3 of \S+t\.csv has more cells than the header's 2: put a caption that "):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text('file,caption\na.png,a cat,\nb.png,"a cat, on a wall"\n')
    assert [row["caption"] for row in read_table(tmp_path / "t.csv")] == ["a cat", "a cat, on a wall"]
    with pytest.raises(ConfigError, match=r"metadata_file '\S+none\.csv' does not exist"):
        read_table(tmp_path / "none.csv")


def test_a_broken_cell_is_left_out(tmp_path: Path) -> None:
    stream = io.BytesIO()
    pixels("red").save(stream, "png")
    rows = {"image": [{"bytes": stream.getvalue(), "path": None}, {"bytes": b"no image", "path": None}, None]}
    table = datasets.Dataset.from_dict({**rows, "text": ["a", "b", "c"]})
    table = table.cast_column("image", datasets.Image(decode=False))
    table.save_to_disk(tmp_path / "d")
    found = gather(tmp_path / "d")
    assert [s.captions for s in found.samples] == [("a",)]
    assert [reason.split("(")[0] for _, reason in found.skipped] == [
        f"cannot read {tmp_path / 'd'}/image[1] ",
        "column image is empty",
    ]
