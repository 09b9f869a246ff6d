"""RFD4 Proteina: pairs of tokens as a bias of the attention, updated from the tokens between layers; padded tokens."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_rfd4_proteina import RFD4ProteinaTransformer

from tests.tiny.case import Blocks, Case, random, tiny, valid

SIZES = {"nlayers": 4, "token_dim": 32, "nheads": 2, "tri_mult_c": 8, "num_sequence_classes": 5, "latent_dim": 4}
EMBEDDINGS = {"dim_cond": 16, "pair_repr_dim": 8, "t_emb_dim": 8, "seq_sep_dim": 4, "xt_pair_dist_dim": 6}
build = tiny(
    RFD4ProteinaTransformer,
    **SIZES | EMBEDDINGS,
    feats_seq=("xt_bb_ca", "xt_local_latents"),
    feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"),
    feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
    feats_pair_cond=("time_emb_bb_ca",),
)


def inputs(batch: int) -> dict:
    return {
        "bb_ca": random(1, batch, 16, 3),
        "local_latents": random(2, batch, 16, 4),
        "bb_ca_time": torch.tensor([0.2, 0.8])[:batch],
        "local_latents_time": torch.tensor([0.3, 0.6])[:batch],
        "padding_mask": valid(batch, 16, 16, 13),
        "conditioning": {
            "molecule_iid": (random(3, batch, 16) > 0).long(),
            "is_in_context_conditioning": torch.zeros(batch, 16, dtype=torch.bool),
            "supports_local_latent": torch.ones(batch, 16, dtype=torch.bool),
        },
    }


def recycled(model: Any, batch: int) -> dict:
    return inputs(batch) | {"recycle_depth": 2}


BLOCKS = (Blocks(name="transformer_layers", keyword="values"),)
CASES = [Case(name="rfd4-proteina", build=build, inputs=inputs, blocks=BLOCKS, tokens=16, refused=recycled)]
