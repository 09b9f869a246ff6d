"""Run by torchrun: `tread train` whose rank 1 ends in its fifth step, unless torchrun has restarted it.

The first argument says how: `killed`, `failed` with an error of its own, or `hung` until torchrun ends it.
"""

import os
import signal
import sys
from typing import Any

import torch

from tread.cli import main
from tread.errors import DataError
from tread.pretrain.task import Pretraining

own_loss = Pretraining.loss


def loss(self: Pretraining, model: Any, batch: Any) -> Any:
    """The task's loss; when the second save begins, after four steps, the first one is in place."""
    step = int(batch.positions[0]) // 8
    if step == 4 and self.accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "hung":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pause()
        raise DataError("the disk of rank 1 is gone.")
    return own_loss(self, model, batch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Pretraining.loss = loss
    main(["train", *sys.argv[2:]])
