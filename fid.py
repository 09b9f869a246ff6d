"""`python fid.py SAMPLES REF.npz`: the same job as `tread eval SAMPLES --ref REF.npz`."""

import sys

from tread.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) > 1 and not arguments[0].startswith("-") and not arguments[1].startswith("-"):
        arguments.insert(1, "--ref")
    main(["eval", *arguments])
