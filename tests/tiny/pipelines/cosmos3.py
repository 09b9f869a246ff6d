"""Cosmos 3 of text: a video, and one image by the smaller layers of Edge; without sound and guardrail."""

import importlib
from functools import partial
from typing import Any

from tests.tiny.autoencoders import WAN_NEW_CHANNELS, wan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.weights import randomised

EDGE: dict[str, Any] = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}


def build(*, system: bool = True, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    tokenizer = qwen_tokenizer()
    sizes = {"num_hidden_layers": 4, "latent_channel": WAN_NEW_CHANNELS, "patch_latent_dim": 4 * WAN_NEW_CHANNELS}
    make = tiny(diffusers.Cosmos3OmniTransformer, **sizes, rope_axes_dim=[4, 2, 2], vocab_size=len(tokenizer), **config)
    return diffusers.Cosmos3OmniPipeline(
        transformer=randomised(make()),
        text_tokenizer=tokenizer,
        vae=wan_autoencoder(new=True),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        enable_safety_checker=False,
        default_use_system_prompt=system,
    )


cosmos = partial(
    Tiny,
    family="cosmos3",
    embedder="proj_in",
    one_prompt=True,
    one_length=True,
    one_sample=True,
    waits=("_meta_tensor = torch.tensor(",),
)
CASES = [
    cosmos(name="cosmos3", build=build, frames=5),
    cosmos(name="cosmos3-image", build=partial(build, system=False, **EDGE), size=(128, 96)),
]
