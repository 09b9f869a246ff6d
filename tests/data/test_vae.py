"""Autoencoders: the same numbers as diffusers' own, found in every place one may lie."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tests.tiny.autoencoders import tiny_autoencoder
from tread.data.vae import load_vae
from tread.errors import ConfigError


def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_encode_and_decode_are_diffusers_own(tiny_vae: str) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae, reference = load_vae(tiny_vae, device="cpu"), AutoencoderKL.from_pretrained(tiny_vae)
    assert (vae.has_moments, vae.factor, vae.name) == (True, 2, "sd")
    moments = vae.encode(pixels())
    with torch.no_grad():
        expected = reference.encode(pixels()).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        assert_close(moments, torch.cat([expected.mean, reference.encode(pixels())[0].parameters[:, 4:]], 1))
        assert_close(vae.decode(expected.mean), reference.decode(expected.mean).sample)  # pyright: ignore[reportAttributeAccessIssue]
    assert moments.shape == (2, 8, 4, 4)


def test_a_tiny_autoencoder_has_no_moments(tmp_path: Path) -> None:
    tiny_autoencoder(channels=4, stages=2).save_pretrained(tmp_path / "tiny")
    vae = load_vae(tmp_path / "tiny", device="cpu")
    assert (vae.has_moments, vae.factor, vae.name) == (False, 2, "none")
    latents = vae.encode(pixels())
    assert latents.shape == (2, 4, 4, 4)
    assert vae.decode(latents).shape == (2, 3, 8, 8)


def test_a_vae_that_lacks_tensors_is_refused(tmp_path: Path, tiny_vae: str) -> None:
    """It would load, and encode differently every time."""
    shutil.copytree(tiny_vae, tmp_path / "pipeline" / "vae")
    (file,) = (tmp_path / "pipeline" / "vae").glob("*.safetensors")
    state = load_file(file)
    save_file({name: state[name] for name in state if "conv_in" not in name}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        load_vae(tmp_path / "pipeline")
    assert str(error.value) == (
        f"the VAE {tmp_path}/pipeline is not whole: {file} lacks 4 tensors (decoder.conv_in.bias, "
        "decoder.conv_in.weight, encoder.conv_in.bias and 1 more) of AutoencoderKL, which would be random. Get that "
        "part of the model again."
    )


def test_a_pipelines_vae_is_found_in_its_subfolder(tmp_path: Path, tiny_vae: str) -> None:
    shutil.copytree(tiny_vae, tmp_path / "pipeline" / "vae")
    assert torch.equal(load_vae(tmp_path / "pipeline").encode(pixels()), load_vae(tiny_vae).encode(pixels()))


def test_precision_is_the_vaes_and_the_answer_float32(tiny_vae: str) -> None:
    exact, rough = load_vae(tiny_vae).encode(pixels()), load_vae(tiny_vae, dtype="bfloat16").encode(pixels())
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0.1, atol=0.1)


def test_what_is_no_vae_is_refused(tmp_path: Path, tiny_vae: str) -> None:
    with pytest.raises(ConfigError, match=r"no autoencoder at .*/missing: give a folder that has config\.json"):
        load_vae(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no autoencoder at .*/empty"):
        load_vae(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"dtype is 'float8'\. .*Choose one of: float32, bfloat16, float16"):
        load_vae(tiny_vae, dtype="float8")  # pyright: ignore[reportArgumentType]
    (Path(tiny_vae) / "diffusion_pytorch_model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match=r"the weights of .*/vae do not load \(.+\): get or save the VAE again$"):
        load_vae(tiny_vae)
    config = Path(tiny_vae) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "VQModel"}))
    with pytest.raises(ConfigError, match=r"is a VQModel; the VAE must be an AutoencoderKL or an AutoencoderTiny"):
        load_vae(tiny_vae)


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models.autoencoders.autoencoder_kl", None)
    with pytest.raises(ImportError, match=r"needs diffusers: pip install 'tread-diffusion\[diffusers\]'"):
        load_vae("anywhere")
