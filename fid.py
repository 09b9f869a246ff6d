"""`python fid.py SAMPLES REF.npz`: the same job as `tread eval SAMPLES --ref REF.npz`.

`--mode calc --images SAMPLES --ref REF.npz` and `--mode ref --data IMAGES --dest REF.npz` are forms that others have;
every option of `tread eval` may follow.
"""

import sys

from tread.cli import main

MODES = {"calc": {"--images": "", "--num": "--count"}, "ref": {"--data": "", "--dest": "--save", "--num": "--count"}}
"""The option of `tread eval` for each of a mode's own; "" is the argument SAMPLES."""


def translated(arguments: list[str]) -> list[str]:
    """The arguments of `tread eval`."""
    given = [part for text in arguments for part in (text.split("=", 1) if text.startswith("--") else [text])]
    if "--mode" in given:
        where = given.index("--mode")
        mode = given[where + 1] if where + 1 < len(given) else ""
        if mode not in MODES:
            print(f"fid.py: --mode is {mode!r}; choose one of: {', '.join(MODES)}.", file=sys.stderr)
            sys.exit(2)
        rest = given[:where] + given[where + 2 :]
        return [name for text in rest if (name := MODES[mode].get(text, text))]
    if len(given) > 1 and not given[0].startswith("-") and not given[1].startswith("-"):
        given.insert(1, "--ref")
    return given


if __name__ == "__main__":
    main(["eval", *translated(sys.argv[1:])])
