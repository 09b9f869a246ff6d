"""Every form holds the same images, and any range of them can be read."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tread.errors import DataError
from tread.evaluate.images import ArrayImages, arrays_of, has_images, open_images, write_batch

PIXELS = np.random.default_rng(0).integers(0, 256, size=(7, 5, 6, 3), dtype=np.uint8)


def write_folder(folder: Path) -> Path:
    for i, image in enumerate(PIXELS):
        file = folder / f"class{i // 4}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    Image.new("RGB", (50, 50)).save(folder / "grid.png")
    (folder / ".hidden.png").write_bytes(b"no image")
    return folder


def write_tar(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for name in ("./grid.png", "./._0.png"):
            tar.addfile(tarfile.TarInfo(name))
        for i, image in enumerate(PIXELS):
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG")
            for name, data in ((f"{i}.png", file.getvalue()), (f"{i}.cls", b"3")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def place(form: str, folder: Path) -> Path:
    if form == "folder":
        return write_folder(folder / "images")
    if form in ("tar", "tars"):
        (folder / "tars").mkdir()
        return write_tar(folder / "tars" / "0.tar") if form == "tar" else write_tar(folder / "tars" / "0.tar").parent
    if form == "ours":
        write_batch(folder / "a.npz", ArrayImages(PIXELS), {"mu": np.zeros(3)}, batch_size=3)
    else:
        {"npz": np.savez, "compressed": np.savez_compressed}[form](folder / "a.npz", PIXELS, np.arange(7))
    return folder / "a.npz"


@pytest.mark.parametrize("form", ["folder", "tar", "tars", "npz", "compressed", "ours"])
def test_every_form_reads_any_range(form: str, tmp_path: Path) -> None:
    source = open_images(place(form, tmp_path))
    assert len(source) == 7
    for first, stop in ((0, 7), (2, 5), (6, 9)):
        assert (np.stack(source.read(first, stop)) == PIXELS[first:stop]).all()


def test_a_compressed_batch_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_images(place("compressed", tmp_path))

    def again(*_: object) -> None:
        raise AssertionError("the file was opened again, and would be unpacked from its beginning")

    monkeypatch.setattr(zipfile.ZipFile, "open", again)
    assert all((source.read(i, i + 1)[0] == PIXELS[i]).all() for i in (0, 3, 6, 2))


def test_a_batch_file_opens_in_numpy_with_its_arrays(tmp_path: Path) -> None:
    path = place("ours", tmp_path)
    with np.load(path) as file:
        assert sorted(file.files) == ["arr_0", "mu"]
        assert (file["arr_0"] == PIXELS).all()
    assert list(arrays_of(path)) == ["mu"]
    assert has_images(path)
    np.savez(path, mu=np.zeros(3))
    assert not has_images(path)


def test_grey_arrays_become_rgb() -> None:
    image = ArrayImages(PIXELS[..., :1]).read(1, 2)[0]
    assert (image == PIXELS[1, ..., :1]).all()
    assert image.shape == (5, 6, 3)


def test_identity_follows_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    before = open_images(folder).identity()
    assert open_images(folder).identity() == before
    Image.new("RGB", (9, 9)).save(folder / "class0" / "0.png")
    assert open_images(folder).identity() != before


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is nothing at .*nowhere"):
        open_images(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no images .* and no tars in"):
        open_images(tmp_path)
    np.savez(tmp_path / "f.npz", np.zeros((2, 5, 5, 3)))
    with pytest.raises(DataError, match=r"arr_0 in .* is float64 of shape \(2, 5, 5, 3\); it must hold images"):
        open_images(tmp_path / "f.npz")
    np.savez(tmp_path / "s.npz", mu=np.zeros(3))
    with pytest.raises(DataError, match=r"s\.npz holds no images: they must be there as arr_0, uint8 \(N, H, W, 3\)"):
        open_images(tmp_path / "s.npz")
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(DataError, match=r"neither a folder, a \.tar nor an \.npz: .* unpack a compressed tar$"):
        open_images(tmp_path / "a.tar.gz")
    folder = write_folder(tmp_path / "a")
    Image.new("RGB", (9, 8)).save(folder / "class1" / "9.png")
    with pytest.raises(
        DataError, match="image 7 has 9 x 8 pixels and the first 6 x 5; a batch file holds images of one size"
    ):
        write_batch(tmp_path / "b.npz", open_images(folder), {})
    assert not (tmp_path / "b.npz").exists()
    (folder / "class0" / "0.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"cannot read .*0\.png"):
        open_images(folder).read(0, 1)


def test_images_without_pixels_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "flat.npz", arr_0=np.zeros((2, 0, 5, 3), np.uint8))
    with pytest.raises(DataError, match=r"arr_0 in .* is uint8 of shape \(2, 0, 5, 3\); it must hold images"):
        open_images(tmp_path / "flat.npz")


def test_links_are_followed_and_names_may_be_no_text(tmp_path: Path) -> None:
    disk = write_folder(tmp_path / "disk")
    os.replace(disk / "class1" / "6.png", os.fsencode(disk) + b"/class1/6\xe9.png")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "all").symlink_to(disk)
    source = open_images(tmp_path / "samples")
    assert (np.stack(source.read(0, 7)) == PIXELS).all()
    assert source.identity() == open_images(tmp_path / "samples").identity()
    (disk / "8.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(DataError, match=r"cannot read .*8\.png"):
        open_images(tmp_path / "samples").identity()


def test_a_file_that_is_no_npz_is_not_to_be_unpickled(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("junk")
    with pytest.raises(DataError, match=r"cannot read .*a\.npz \(File is not a zip file\)"):
        arrays_of(tmp_path / "a.npz")
