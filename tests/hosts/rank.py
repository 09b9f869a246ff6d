"""One rank of `tread train`: SETTING ...

Rank 1 is slow where SLOW is set: it sleeps so many seconds in each batch.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tread.cli import main
from tread.pretrain.task import Pretraining

if __name__ == "__main__":
    torch.set_num_threads(1)
    slow = float(os.environ.get("SLOW", "0")) * int(os.environ["RANK"])
    batches = Pretraining.batches

    def slowly(self: Pretraining, start_step: int) -> Iterator[Any]:
        for batch in batches(self, start_step):
            time.sleep(slow)
            yield batch

    Pretraining.batches = slowly
    main(["train", *sys.argv[1:]])
