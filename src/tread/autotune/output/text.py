"""The tuner's messages about its measurements, for the terminal and the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tread.autotune.cost import routes_of
from tread.autotune.measure import ROUNDS
from tread.autotune.verify import FALLS_APART
from tread.words import counted, timed

ON_A_CPU = (
    "There is no GPU here: times and speed-ups are those of this CPU, and a GPU's will differ, most for small models. "
    "Loss gaps do not depend on the device. Tune again on the machine that trains."
)
GAP = (
    "A loss gap is the routed over the dense loss on fixed samples and noise, less 1, before any training. It chooses "
    "between plans of one speed; it does not say which speed gives the best images after hours. No cheap figure is "
    "known to do so: what long runs showed is in the rules."
)
BELOW = (
    "{below} of {every} windows have a lower loss routed than dense, as a model has that is hardly trained; they count "
    "as 0, and the order of small gaps means little: {advice}."
)
STARTED = "measure on more trained weights (--start-steps, or a resumed run)"
TRAINED = "train it further before its routes are chosen"
"""Advice about weights that are hardly trained, if the tuner trains them first and if it does not."""
_BUSY = (
    "something else may use this device. Do not trust these speed-ups; tune again, into another folder, when it is "
    "idle."
)
MISFIT = f"The fit misses the time of a plan by {{error:.0%}}: {_BUSY}"
UNLIKE = (
    "The chosen plan was timed at {timed:.2f} times the speed of dense steps, where the fit says {speedup:.2f}: "
    f"{_BUSY}"
)
SLOW = "left out, as timed beside dense they are less than {speedup:g} times as fast, where the fit says more: {plans}."
UNEQUAL = (
    "The verifying runs took {least:.0f} to {most:.0f} seconds, so their wall-clock is not equal: something else may "
    "have used this device, or compiling took a good part of them. Give --verify more minutes."
)
SUMMED = "The gap of several windows is predicted as the sum of theirs; that of finalists is measured as a whole."
FRESH = (
    "The weights are new, so the gaps are those after a dense start of {steps} steps; name a trained run with resume \
for others."
)
VERIFIED = (
    f"A verifying run rejects a plan whose dense validation loss ends more than {FALLS_APART:.0%} above that of dense "
    "training at equal wall-clock. It never promotes one: in our own runs the winner of 30 seconds lost after 430."
)


def named(key: str) -> str:
    """A plan as people write it.

    >>> named("2..8@0.5 10..12@0.25"), named("dense")
    ('0.5 over 2..8, 0.25 over 10..12', 'dense')
    """
    routes = routes_of(key)
    return ", ".join(f"{r.selection_ratio:g} over {r.start_layer_idx}..{r.end_layer_idx}" for r in routes) or "dense"


def unreached(goal: object, front: Sequence[Mapping[str, Any]], *, fastest: bool, misfit: bool = False) -> str:
    """The message for a goal that no plan reaches, with the best plan and the option that would accept it."""
    if not front and misfit:
        return (
            "no window within the rules saves time by these figures, which are not to be trusted: tune again, into "
            "another folder, when nothing else uses this device."
        )
    if not front:
        return "no window within the rules saves time on this machine: train dense."
    best = front[0] if fastest else front[-1]
    word = "fastest" if fastest else "gentlest"
    reached = math.floor(100 * best["speedup"]) / 100  # rounded down: a figure rounded up might not be reached either
    asked = f"--target-speedup {reached:g}" if fastest else f"--max-loss-gap {math.ceil(1e4 * best['gap']) / 1e4:g}"
    return (
        f"no plan within the rules reaches {goal}: the {word} there is, {named(best['plan'])}, has steps "
        f"{best['speedup']:.2f} times as fast as dense at a loss gap of {best['gap']:.2%}. "
        + (f"Ask for {asked}" if reached > 1 or not fastest else "Train dense")
        + "; all measurements are kept."
    )


def timing(plans: int, kept: Sequence[int], tokens: int, compiles: bool) -> str:
    """What is about to be timed, and how often layers are compiled for it.

    >>> timing(9, [3072, 2458], 4096, True)
    'timing 9 plans, 3 times each, after a first step that compiles layers for 3 lengths: 4096, 3072 and 2458 tokens'
    """
    said = f"timing {counted(plans, 'plan')}, {ROUNDS} times each"
    lengths = list(dict.fromkeys([tokens, *kept]))
    if not compiles:
        return said
    named = f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
    return f"{said}, after a first step that compiles layers for {counted(len(lengths), 'length')}: {named} tokens"


def summary(result: Mapping[str, Any]) -> str:
    """What came out, for the terminal."""
    cost = result["cost"]
    lines = [
        f"dense step {timed(result['dense_seconds'])}; the fit is within {cost['error']:.1%} of every timed plan",
        f"{counted(result['measured'], 'window')} measured at {counted(result['levels'], 'noise level')}, "
        f"{counted(len(result['front']), 'plan')} that no other beats",
        "",
        f"{'plan':<34} {'speed-up':>8} {'timed':>7} {'loss gap':>9} {'whole':>8}",
    ]
    for one in result["finalists"]:
        mark = " <- chosen" if one["plan"] == result.get("chosen") else " rejected" if one.get("rejected") else ""
        lines.append(
            f"{named(one['plan']):<34} {one['speedup']:>7.2f}x {_times(one['timed_speedup']):>7} {one['gap']:>9.2%} "
            f"{_percent(one['whole_gap']):>8}{mark}"
        )
    for name, one in result["verified"].items():
        lines.append(f"verified {named(name)}: {one['steps']:,} steps, {_outcome(one, name)}")
    notes = [f"note: {note}" for note in result["notes"] if note != ON_A_CPU]  # already printed at the start
    return "\n".join([*lines, "", *notes])


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _outcome(one: Mapping[str, Any], name: str) -> str:
    if one["val_loss"] is None:
        return "diverged"
    took = f"{one['seconds'] / 60:.2f} min where {one['expected_seconds'] / 60:.2f} were expected"
    against = f" ({one['against_dense']:+.2%})" if name != "dense" else ""
    return f"{took}, validation loss {one['val_loss']:.4f}{against}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
