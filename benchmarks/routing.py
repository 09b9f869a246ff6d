"""Routing's own share of a routed step (selection, gathers, restore, rope rows), and the waits of the host in one.

    python -m benchmarks.routing

`benchmarks.flux` and `benchmarks.dit` record both too, beside compiled layers without graphs; this script does nothing
else.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks import dit, flux
from benchmarks.common.lora import adapt, build, lora_steps
from benchmarks.common.profile import profile_routing
from benchmarks.common.record import Facts, Record, options


def of_flux(record: Record) -> Facts:
    """A compiled LoRA step of FLUX, not checkpointed: the shorter the step, the larger the share."""
    shape = flux.SHAPES["smoke" if record.smoke else "shallow" if record.warm else "full"]
    model = build(shape, record.device)
    adapt(model)
    variant = next(one for one in flux.VARIANTS if one.name == "compiled")
    with lora_steps(model, shape, variant, record.device, checkpointed=False) as steps:
        steps.warm_up()
        return profile_routing(steps)


def of_dit(record: Record, name: str) -> Facts:
    """A pretraining step with compiled blocks."""
    batch = 2 if record.smoke else 256
    depth = dit.SHALLOW if record.warm or record.smoke else None
    variant = next(one for one in dit.VARIANTS if one.name == "stream")
    with dit.dit_steps(name, variant, record.device, batch=batch, depth=depth) as steps:
        steps.warm_up()
        return profile_routing(steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile FLUX and DiT-XL/2."""
    record = Record("routing", options(__doc__).parse_args(arguments))
    record.measure("flux, compiled", partial(of_flux, record), row="routing")
    name = "tiny" if record.smoke else "XL/2"
    record.measure(f"dit {name}, stream", partial(of_dit, record, name), row="routing")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
