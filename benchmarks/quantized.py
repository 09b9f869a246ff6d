"""The FLUX rows with a base in 8 bits: the product's own ways, a trial that stores weights twice, and torchao's.

python -m benchmarks.quantized
python -m benchmarks.quantized --variants fp8-both-ways fp8-torchao
"""

from collections.abc import Sequence

from benchmarks.flux import SHAPES
from benchmarks.lora import Plan, Variant, run_script

ROWS = {True: "flux-8bit-checkpointed", False: "flux-8bit"}
VARIANTS = (
    Variant(name="fp8-both-ways", base="fp8-both-ways"),
    Variant(name="fp8-both-ways-compiled", base="fp8-both-ways", graphs=False),
    Variant(name="float8-two-copies", base="float8-two-copies"),
    Variant(name="fp8-torchao", base="fp8-torchao"),
    Variant(name="int8-torchao", base="int8-torchao"),
    Variant(name="torchao-float8-dynamic", base="torchao-float8-dynamic"),
    Variant(name="torchao-int8-dynamic", base="torchao-int8-dynamic"),
)
CHOSEN = ("fp8-both-ways", "float8-two-copies", "fp8-torchao", "int8-torchao")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen variants."""
    plan = Plan(rows=ROWS, profiled="fp8-both-ways-compiled")
    return run_script("quantized", __doc__, arguments, variants=VARIANTS, chosen=CHOSEN, shapes=SHAPES, plan=plan)


if __name__ == "__main__":
    raise SystemExit(main())
