"""`accelerate launch train.py model=tread`: `tread train model=tread` with the `configs/` beside this file."""

import os
import sys
from pathlib import Path

from tread.cli import main

if __name__ == "__main__":
    os.environ.setdefault("TREAD_CONFIGS", str(Path(__file__).resolve().parent / "configs"))
    main(["train", *sys.argv[1:]])
