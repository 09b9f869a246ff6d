"""`accelerate launch train.py model=tread`: the same job as `tread train model=tread`."""

import sys

from tread.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
