"""JoyImage-Edit: a video, several images, a table for text; Edit Plus: images of other sizes in each sample, a mask."""

from functools import partial

from diffusers.models.transformers.transformer_joyimage import JoyImageEditTransformer3DModel
from diffusers.models.transformers.transformer_joyimage_edit_plus import JoyImageEditPlusTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"rope_dim_list": [4, 6, 6], "patch_size": [1, 2, 2]}
build = tiny(JoyImageEditTransformer3DModel, **SIZES)


def video(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (TEXT, 16), (200.0, 800.0))


def images(batch: int) -> dict:
    """Two reference images, then the target, each of 2 x 4 patches."""
    return video(batch) | {"hidden_states": random(3, batch, 3, 4, 1, 4, 8)}


def patched(batch: int) -> dict:
    """The first sample has two reference images and no padding, the second one and three places of padding."""
    shapes = [[(1, 3, 5), (1, 2, 2), (2, 1, 2)], [(1, 2, 7), (1, 2, 3)]]
    return usual(batch, (23, 4, 1, 2, 2), (TEXT, 16), (200.0, 800.0)) | {"shape_list": shapes[:batch]}


def masked(batch: int) -> dict:
    return patched(batch) | {"encoder_hidden_states_mask": valid(batch, TEXT, 5, 3).long()}


BLOCKS = (Blocks(name="double_blocks", returns=0, image="first", keys="first"),)
case = partial(Case, build=build, blocks=BLOCKS)
plus = partial(case, build=tiny(JoyImageEditPlusTransformer3DModel, **SIZES), tokens=23, references=9)
CASES = [
    case(name="joyimage-edit", inputs=images, tokens=24, references=16),
    case(name="joyimage-edit-video", build=partial(build, rope_type="mrope"), inputs=video, tokens=18),
    plus(name="joyimage-edit-plus", inputs=patched),
    plus(name="joyimage-edit-plus-masked", inputs=masked),
]
