"""RFD4 Proteina: pairs of tokens as a bias of the attention, updated from the tokens between layers; padded tokens."""

import torch
from diffusers.models.transformers.transformer_rfd4_proteina import RFD4ProteinaTransformer

from tests.tiny.case import Blocks, Case, random


def build() -> RFD4ProteinaTransformer:
    return RFD4ProteinaTransformer(
        nlayers=4,
        token_dim=32,
        nheads=2,
        dim_cond=16,
        pair_repr_dim=8,
        latent_dim=4,
        t_emb_dim=8,
        seq_sep_dim=4,
        xt_pair_dist_dim=6,
        feats_seq=("xt_bb_ca", "xt_local_latents"),
        feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"),
        feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
        feats_pair_cond=("time_emb_bb_ca",),
        tri_mult_c=8,
        num_sequence_classes=5,
    )


def inputs(batch: int) -> dict:
    real = torch.ones(2, 16, dtype=torch.bool)
    real[1, -3:] = False
    return {
        "bb_ca": random(1, batch, 16, 3),
        "local_latents": random(2, batch, 16, 4),
        "bb_ca_time": torch.tensor([0.2, 0.8])[:batch],
        "local_latents_time": torch.tensor([0.3, 0.6])[:batch],
        "padding_mask": real[:batch],
        "conditioning": {
            "molecule_iid": (random(3, batch, 16) > 0).long(),
            "is_in_context_conditioning": torch.zeros(batch, 16, dtype=torch.bool),
            "supports_local_latent": torch.ones(batch, 16, dtype=torch.bool),
        },
    }


CASES = [
    Case(
        name="rfd4-proteina",
        build=build,
        inputs=inputs,
        blocks=(Blocks(name="transformer_layers", keyword="values"),),
        tokens=16,
        refused=lambda model, batch: inputs(batch) | {"recycle_depth": 2},
    ),
]
