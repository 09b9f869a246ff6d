"""`python -m fuzz [--mutations N] [--out FOLDER] [--only NAME]`: exit status 1 if a reader failed."""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz.readers import READERS
from fuzz.run import work


def main() -> int:
    """Fuzz every reader in two processes and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--mutations", type=int, default=200_000, help="in all (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="only readers with this in their name")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for the files that failed")
    options = parser.parse_args()
    options.out = options.out.absolute()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        shares = pool.starmap(work, [(rank, options.processes, options) for rank in range(options.processes)])
    made, refused, failed = (sum(counts, Counter()) for counts in zip(*shares, strict=True))
    print(f"{'reader':<24}{'mutations':>10}{'refused':>10}{'failed':>8}")
    for name in READERS:
        if made[name]:
            print(f"{name:<24}{made[name]:>10}{refused[name]:>10}{failed[name]:>8}")
    print(f"{'all':<24}{made.total():>10}{refused.total():>10}{failed.total():>8}   in {time.time() - began:.0f} s")
    if failed:
        print(f"the files that failed are in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
