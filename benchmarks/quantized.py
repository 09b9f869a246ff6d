"""The FLUX rows with a base in 8 bits: the product's own ways, a trial that stores weights twice, and torchao's.

python -m benchmarks.quantized
python -m benchmarks.quantized --variants fp8-matmul fp8-forward
"""

from collections.abc import Sequence

from benchmarks.common.lora import Plan, Variant, run_script
from benchmarks.flux import SHAPES

ROWS = {True: "flux-8bit-checkpointed", False: "flux-8bit"}
VARIANTS = (
    Variant(name="fp8-matmul", base="fp8-matmul"),
    Variant(name="fp8-matmul-compiled", base="fp8-matmul", graphs=False),
    Variant(name="float8-two-copies", base="float8-two-copies"),
    Variant(name="fp8-forward", base="fp8-forward"),
    Variant(name="int8", base="int8"),
    Variant(name="torchao-float8-dynamic", base="torchao-float8-dynamic"),
    Variant(name="torchao-int8-dynamic", base="torchao-int8-dynamic"),
)
CHOSEN = ("fp8-matmul", "float8-two-copies", "fp8-forward", "int8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen variants."""
    plan = Plan(rows=ROWS, profiled="fp8-matmul-compiled")
    return run_script("quantized", __doc__, arguments, variants=VARIANTS, chosen=CHOSEN, shapes=SHAPES, plan=plan)


if __name__ == "__main__":
    raise SystemExit(main())
