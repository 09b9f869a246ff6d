"""`python -m faults [--kills N] [--jobs NAME ...] [--seed N] [--case N]`: exit status 1 if an outcome differed."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from faults.jobs import JOBS
from faults.run import schedule, work


def main() -> int:
    """Run the cases in two processes and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m faults")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all, at least (default: %(default)s)")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="(default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the events that are struck (default: %(default)s)")
    parser.add_argument("--case", type=int, help="only the case of this number, of each job")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.cases = list(schedule(options.kills, options.jobs))
    if options.case is not None:
        options.cases = [(job, options.case) for job in options.jobs]
    options.processes = min(options.processes, len(options.cases))
    began = time.time()
    spawn = multiprocessing.get_context("spawn")  # not multiprocessing's pool: its processes may have no children
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        shares = list(pool.map(work, range(options.processes), [options] * options.processes))
    cases, ends, equal = (sum(counts, Counter()) for counts in zip(*shares, strict=True))
    print(f"{'job':<16}{'fault':<10}{'cases':>8}{'ended':>8}{'equal':>8}")
    for job, fault in sorted(cases):
        key = job, fault
        print(f"{job:<16}{fault:<10}{cases[key]:>8}{ends[key]:>8}{equal[key]:>8}")
    took = f"in {time.time() - began:.0f} s"
    print(f"{'all':<26}{cases.total():>8}{ends.total():>8}{equal.total():>8}   {took}")
    print(f"{sum(count for (_, fault), count in ends.items() if fault == 'kill')} jobs got SIGKILL")
    return 0 if equal == cases else 1


if __name__ == "__main__":
    sys.exit(main())
