"""The families of stock models, one file each, and the classes that cannot be routed, with the reason.

A file declares data and small functions of a forward's arguments. It imports torch, `tread.attach.family` and other
families; never the model's library.
"""

from tread.attach.families.ace_step import ACE_STEP
from tread.attach.families.allegro import ALLEGRO
from tread.attach.families.anyflow import ANYFLOW
from tread.attach.families.auraflow import AURAFLOW
from tread.attach.families.bria import BRIA, BRIA_FIBO
from tread.attach.families.bria_fibo2 import BRIA_FIBO2
from tread.attach.families.chroma import CHROMA
from tread.attach.families.cogvideox import COGVIDEOX, CONSISID
from tread.attach.families.cogview3 import COGVIEW3
from tread.attach.families.cogview4 import COGVIEW4
from tread.attach.families.cosmos import COSMOS
from tread.attach.families.cosmos3 import COSMOS3
from tread.attach.families.dit import DIT
from tread.attach.families.dit_sit import DIT_SIT, DIT_SIT_REPA
from tread.attach.families.easyanimate import EASYANIMATE
from tread.attach.families.ernie_image import ERNIE_IMAGE
from tread.attach.families.flux import FLUX
from tread.attach.families.flux2 import FLUX2
from tread.attach.families.flux3 import FLUX3
from tread.attach.families.flux_bfl import FLUX_BFL, FLUX_BFL_CONTROLLED, FLUX_BFL_CONTROLLED_BOTH
from tread.attach.families.glm_image import GLM_IMAGE
from tread.attach.families.helios import HELIOS
from tread.attach.families.hidream_image import HIDREAM_IMAGE
from tread.attach.families.hunyuan_dit import HUNYUAN_DIT
from tread.attach.families.hunyuan_image import HUNYUAN_IMAGE
from tread.attach.families.hunyuan_video import HUNYUAN_VIDEO
from tread.attach.families.hunyuan_video15 import HUNYUAN_VIDEO15
from tread.attach.families.hunyuan_video_framepack import HUNYUAN_VIDEO_FRAMEPACK
from tread.attach.families.ideogram4 import IDEOGRAM4
from tread.attach.families.joyimage import JOYIMAGE_EDIT, JOYIMAGE_EDIT_PLUS
from tread.attach.families.kandinsky5 import KANDINSKY5
from tread.attach.families.kandinsky6 import KANDINSKY6
from tread.attach.families.krea2 import KREA2
from tread.attach.families.longcat_audio import LONGCAT_AUDIO
from tread.attach.families.longcat_image import LONGCAT_IMAGE
from tread.attach.families.ltx import LTX
from tread.attach.families.ltx2 import LTX2
from tread.attach.families.lumina2 import LUMINA2
from tread.attach.families.lumina_next import LUMINA_NEXT
from tread.attach.families.minimax_h3 import MINIMAX_H3
from tread.attach.families.minimax_music3 import MINIMAX_MUSIC3
from tread.attach.families.mochi import MOCHI
from tread.attach.families.motif_video import MOTIF_VIDEO
from tread.attach.families.nucleusmoe_image import NUCLEUSMOE_IMAGE
from tread.attach.families.omnigen import OMNIGEN
from tread.attach.families.ovis_image import OVIS_IMAGE
from tread.attach.families.pixart import PIXART
from tread.attach.families.prx import PRX
from tread.attach.families.qwenimage import QWEN_IMAGE
from tread.attach.families.qwenimage21 import QWEN_IMAGE21
from tread.attach.families.rfd4_proteina import RFD4_PROTEINA
from tread.attach.families.sana_wm_refiner import SANA_WM_REFINER
from tread.attach.families.sd3 import SD3
from tread.attach.families.skyreels_v2 import SKYREELS_V2
from tread.attach.families.stable_audio import STABLE_AUDIO
from tread.attach.families.stable_audio3 import STABLE_AUDIO3
from tread.attach.families.t5_film import T5_FILM
from tread.attach.families.transformer_2d import TRANSFORMER_2D
from tread.attach.families.wan import WAN, WAN_VACE
from tread.attach.families.wan_animate import WAN_ANIMATE
from tread.attach.families.wan_model import WAN_MODEL
from tread.attach.families.z_image import Z_IMAGE
from tread.attach.family import Family

FAMILIES: tuple[Family, ...] = (
    ACE_STEP,
    ALLEGRO,
    ANYFLOW,
    AURAFLOW,
    BRIA,
    BRIA_FIBO,
    BRIA_FIBO2,
    CHROMA,
    COGVIDEOX,
    COGVIEW3,
    COGVIEW4,
    CONSISID,
    COSMOS,
    COSMOS3,
    DIT,
    EASYANIMATE,
    ERNIE_IMAGE,
    FLUX,
    FLUX2,
    FLUX3,
    GLM_IMAGE,
    HELIOS,
    HIDREAM_IMAGE,
    HUNYUAN_DIT,
    HUNYUAN_IMAGE,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO15,
    HUNYUAN_VIDEO_FRAMEPACK,
    IDEOGRAM4,
    JOYIMAGE_EDIT,
    JOYIMAGE_EDIT_PLUS,
    KANDINSKY5,
    KANDINSKY6,
    KREA2,
    LONGCAT_AUDIO,
    LONGCAT_IMAGE,
    LTX,
    LTX2,
    LUMINA2,
    LUMINA_NEXT,
    MINIMAX_H3,
    MINIMAX_MUSIC3,
    MOCHI,
    MOTIF_VIDEO,
    NUCLEUSMOE_IMAGE,
    OMNIGEN,
    OVIS_IMAGE,
    PIXART,
    PRX,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    RFD4_PROTEINA,
    SANA_WM_REFINER,
    SD3,
    SKYREELS_V2,
    STABLE_AUDIO,
    STABLE_AUDIO3,
    T5_FILM,
    TRANSFORMER_2D,
    WAN,
    WAN_ANIMATE,
    WAN_VACE,
    Z_IMAGE,
)

ELSEWHERE: tuple[Family, ...] = (
    FLUX_BFL_CONTROLLED_BOTH,
    FLUX_BFL_CONTROLLED,
    FLUX_BFL,
    DIT_SIT_REPA,
    DIT_SIT,
    WAN_MODEL,
)
"""Families of models outside diffusers. Several may name one class; the first that fits the model is taken."""

REFUSED: dict[str, str] = {
    "AnyFlowFARTransformer3DModel": (
        "its attention is a block mask over whole chunks of frames, built for the full stream in blocks of 128 tokens."
    ),
    "DualTransformer2DModel": (
        "it runs two transformers side by side on a U-Net's feature map and mixes what they return, so its layers do "
        "not follow one another on one stream."
    ),
    "Kandinsky6SRTransformer3DModel": (
        "its attention is always sparse: it groups the stream into blocks of 64 tokens, squares of the grid, and "
        "attends by block."
    ),
    "LatteTransformer3DModel": (
        "its layers attend within frames and through time by turns; a selection leaves every frame another length."
    ),
    "MiniMaxMusic3RVQDepthDecoder": ("it is no denoiser: it predicts the codes of one audio frame one after another."),
    "PriorTransformer": ("it denoises one embedding, not a stream of tokens: nothing in its sequence can be dropped."),
    "SanaTransformer2DModel": (
        "its feed-forward convolves over the grid of tokens, so each layer needs every token in place."
    ),
    "SanaVideoTransformer3DModel": (
        "its feed-forward convolves over the grid of tokens and through time, so each layer needs every token in place."
    ),
    "SanaWMTransformer3DModel": (
        "its feed-forward convolves over the grid of tokens and its attention is a recurrence over whole frames."
    ),
    "TransformerTemporalModel": (
        "it is a part of a U-Net whose sequences are the few frames at one pixel, not the tokens of a sample."
    ),
    "WanAnimate2Transformer3DModel": (
        "its layers rotate the stream and pack it for a block mask by its grid of frames, rows and columns."
    ),
}
"""Class name -> the reason why it cannot be routed."""
