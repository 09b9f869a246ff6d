"""Guidance: wrappers that take a field and return a field.

- Both branches go through the network as one batch, conditional half first.
- A branch that the formula does not need is not run: scale 1, and any level outside the interval, cost one
  plain evaluation.
- Levels are Python floats, so the interval is decided on the host.
"""

import torch
from torch import Tensor

from tread.objectives.objective import Field, check_number
from tread.routing.errors import ConfigError


# Ho and Salimans 2022 (arXiv 2207.12598) Eq. 6, with scale = 1 + w; the interval is that of Kynkäänniemi et
# al. 2024 (arXiv 2404.07724)
def classifier_free(
    field: Field, *, scale: float, null_label: int | None, interval: tuple[float, float] | None = None
) -> Field:
    """uncond + scale * (cond - uncond): 1 is the conditional field alone, 0 the unconditional one.

    `interval` (lo, hi) limits guidance to levels with lo < level <= hi, in the objective's own unit (EDM:
    sigma, flow: t); elsewhere the conditional field runs alone. `null_label` is the label that stands for no
    class, None if the network has none.
    """
    check_number("guidance", scale)
    if interval is not None and not interval[0] < interval[1]:
        raise ConfigError(
            f"guidance interval is ({interval[0]}, {interval[1]}); its lower end must be below its upper end."
        )
    if scale == 1:
        return field
    if null_label is None:
        raise ConfigError(
            f"guidance is {scale}, but the model has no label for 'no class'; set guidance to 1, or train it "
            "with class dropout."
        )

    def guided(x: Tensor, level: float, labels: Tensor) -> Tensor:
        if interval is not None and not interval[0] < level <= interval[1]:
            return field(x, level, labels)
        null = torch.full_like(labels, null_label)
        if scale == 0:
            return field(x, level, null)
        both = field(torch.cat([x, x]), level, torch.cat([labels, null]))  # (2B, C, H, W)
        cond, uncond = both.chunk(2)  # (B, C, H, W) each
        return uncond + scale * (cond - uncond)

    return guided
