"""How wrong gradients are in every form of checkpointing, as a table: `python -m tests.attach.errors_of_forms`.

Each form runs with three lists of routes, with one forward and with two before the backward. A cell is the largest
error of a gradient, relative to its norm, over the three lists; what ends in an error is counted by its kind.
"""

import sys
import warnings
from collections import Counter

import tread
from tests.attach.forms import FORMS, WHOLE, WRAPPED
from tests.attach.recomputing import ROUTES, direct, gradients
from tests.tiny.toy import FAMILY, Toy

EXACT = 2e-6


def outcome(name: str, routes: str, forwards: int) -> float | str:
    """The error of a form, or the kind of error that it ends in."""
    model, reference = Toy(), Toy()
    if name == "checkpoint_sequential, reentrant":  # its closures capture tensors, and lose their gradients
        plain = reference.form
        reference.form = lambda blocks, given: plain(blocks, (given[0], *(one.detach() for one in given[1:])))
    config = {"routes": ROUTES[routes]}
    with tread.attach(reference, config, family=FAMILY) as handle:
        expected, _ = gradients(reference, handle, forwards=forwards, moves=True)
    model.form = FORMS.get(name, model.form)
    try:
        model = WRAPPED.get(name, lambda one: one)(model)
        with tread.attach(model, config, family=FAMILY) as handle:
            found, _ = gradients(model, handle, WHOLE.get(name, direct), forwards=forwards, moves=True)
    except tread.ConfigError:
        return "refused"
    except Exception as error:  # whatever torch says is what is counted
        return type(error).__name__
    return max(
        float((found[key] - value).norm() / value.norm()) if key in found else float("inf")
        for key, value in expected.items()
    )


def cell(found: list[float | str]) -> str:
    errors = Counter(one for one in found if isinstance(one, str))
    wrong = [one for one in found if not isinstance(one, str)]
    said = [f"{number} {name}" for name, number in errors.items()]
    return ", ".join([f"{max(wrong):.0e}" if max(wrong) else "0", *said] if wrong else said)


def main() -> int:
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    print("| form | one forward | two forwards |\n|---|---|---|")
    for name in (*FORMS, *WHOLE, *WRAPPED):
        cells = []
        for forwards in (1, 2):
            found = [outcome(name, routes, forwards) for routes in ROUTES]
            cells.append(cell(found))
            for one in found:
                opaque = isinstance(one, str) and one != "refused"
                wrong = isinstance(one, float) and one > EXACT
                counts[
                    "opaque error" if opaque else "refused" if one == "refused" else "wrong" if wrong else "exact"
                ] += 1
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    total = sum(counts.values())
    print(f"\n{total} combinations: " + ", ".join(f"{number} {what}" for what, number in counts.items()) + ".")
    return 0 if counts["exact"] == total else 1


if __name__ == "__main__":
    sys.exit(main())
