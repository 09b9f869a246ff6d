"""Z-Image: captions of different lengths, videos, ControlNet, and omni mode."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny

ROTATIONS = {"axes_dims": [4, 2, 2], "axes_lens": [256, 16, 16]}
build = tiny(ZImageTransformer2DModel, **ROTATIONS, dim=16, n_kv_heads=2, cap_feat_dim=10)


def inputs(batch: int) -> dict:
    return {
        "x": random(1, batch, 4, 1, 8, 10),  # 20 tokens and 12 of padding
        "t": torch.linspace(0.2, 0.8, 2)[:batch],
        "cap_feats": [random(2, 1, 5, 10)[0], random(3, 1, 40, 10)[0]][:batch],  # 32 and 64 tokens with padding
    }


def controlled(batch: int) -> dict:
    alike = [random(2, 1, 5, 10)[0], random(3, 1, 7, 10)[0]][:batch]
    return inputs(batch) | {"cap_feats": alike, "controlnet_block_samples": {1: random(4, batch, 64, 16)}}


def listed(batch: int) -> dict:
    """As the pipeline calls it; with several frames, a multiple of 32 tokens and so no padding."""
    return inputs(batch) | {"x": list(random(5, batch, 4, 2, 8, 8))}


def omni(batch: int) -> dict:
    """Each sample: captions around its images, one image to refer to, then the target of 20 tokens."""
    images = [[random(6, 1, 4, 1, 4, 6)[0], image] for image in random(1, batch, 4, 1, 8, 10)]
    captions = [random(7, 1, 5, 10)[0], random(8, 1, 40, 10)[0], random(9, 1, 4, 10)[0]]
    return {
        "x": images,
        "t": torch.linspace(0.2, 0.8, 2)[:batch],
        "cap_feats": [[captions[0], captions[2]], [captions[1], captions[2]]][:batch],
        "image_noise_mask": [[0, 1]] * batch,
        "siglip_feats": [[random(10, 1, 3, 4, 6)[0], None]] * batch,
    }


def omni_offsets(batch: int) -> list[int]:
    return [32 + 32 + 32, 64 + 32 + 32][:batch]  # captions, and the image to refer to, all with padding


case = partial(Case, build=build, blocks=(Blocks(name="layers", keyword="x", image="first", keys="first"),), tokens=20)
CASES = [
    case(name="z-image", inputs=inputs),
    case(name="z-image-controlnet", inputs=controlled),
    case(name="z-image-frames", inputs=listed, tokens=32),
    case(name="z-image-omni", build=partial(build, siglip_feat_dim=6), inputs=omni, offsets=omni_offsets),
]
