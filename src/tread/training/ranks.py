"""Agreement between the processes of a run: rank 0's result on all, the largest of their numbers, the loss of one.

No process waits for another longer than `train.timeout_minutes`, the timeout of every process group.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tread.errors import ConfigError, RankLost
from tread.together import gathered, together
from tread.training.settings import JobConfig

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
"""Variables of torchrun that are numbers; MASTER_ADDR is a name."""
Result = TypeVar("Result")


def check_launched() -> None:
    """Refuse a process that was launched as one of several if variables of torchrun are missing or wrong: accelerate
    would wait for a rank that nobody has, or train alone."""
    given = {name: os.environ.get(name, "") for name in (*NUMBERS, "MASTER_ADDR")}
    if not given["LOCAL_RANK"] and given["WORLD_SIZE"] in ("", "1"):
        return
    missing = [f"{name} is not set" for name, value in given.items() if not value]
    wrong = [f"{name} is {given[name]!r}" for name in NUMBERS if given[name] and not given[name].isdecimal()]
    if not missing and not wrong and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        wrong = [f"RANK is {given['RANK']} and WORLD_SIZE {given['WORLD_SIZE']}"]
    if missing or wrong:
        raise ConfigError(
            f"this process was launched as one of several, but {', '.join(missing + wrong)}: start it with torchrun or "
            f"accelerate launch, which set {', '.join(given)}, or unset them all."
        )


def restarts() -> int:
    """The number of times that torchrun has started this command again after a process of the run ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rejoin(backend: str, timeout: timedelta) -> None:
    """Open the process group of a run that torchrun has restarted, under keys of its own.

    Torchrun's store still has the addresses of the processes that ended, and gloo would call them (torch 2.13).
    """
    if restarts() and not distributed.is_initialized():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = PrefixStore(f"restart-{restarts()}", TCPStore(*address, world, is_master=is_master, timeout=timeout))
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


@contextmanager
def arriving(config: JobConfig) -> Iterator[None]:
    """Turn a failure to open the process group, because other processes did not arrive, into a RankLost."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_rank(error):
            raise
        world, address = os.environ.get("WORLD_SIZE", "several"), os.environ.get("MASTER_ADDR", "the first machine")
        raise RankLost(
            f"not all {world} processes of this run met at {address} within {_waited(config)}: see the output of the "
            "others, whether they run and whether they reach that address."
        ) from error


def _waited(config: JobConfig) -> str:
    return f"{config.train.timeout_minutes:g} minutes ({config.called('train.timeout_minutes')})"


def from_main(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """Call `compute` on rank 0 alone; every rank returns its result, or raises if rank 0 does."""
    with together():
        result: Any = gathered(compute() if accelerator.is_main_process else None)[0]
    return result


@contextmanager
def lost_ranks(config: JobConfig | None = None) -> Iterator[None]:
    """Turn a failed collective, whose error does not name the process that ended, into a RankLost; `config`: the job
    whose timeout it is, if it is not torch's."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_rank(error):
            raise
        waited = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        what = f"has not answered for {_waited(config) if config else 'too long'}" if waited else "has ended"
        raise RankLost(
            f"another process of this run {what}, so this one ends too: the error is in that process's own output."
        ) from error


def _is_lost_rank(error: RuntimeError) -> bool:
    """Whether gloo, NCCL or the store reports a closed connection or a timeout."""
    known = isinstance(error, distributed.DistError)
    return known or "gloo/transport" in str(error) or "Connection closed by peer" in str(error)


class Largest:
    """The largest of the processes' numbers, one exchange behind: a step never waits for the network.

    Each call gives this process's number to an exchange that runs in the background, over gloo, and returns the result
    of the call before, which is the same on every process.
    """

    def __init__(self, accelerator: Accelerator, timeout: timedelta) -> None:
        self._alone = accelerator.num_processes == 1
        self._group = None if self._alone else distributed.new_group(backend="gloo", timeout=timeout)
        self._sent: Tensor | None = None
        self._work: Any = None

    def __call__(self, number: int) -> int:
        if self._alone:
            return number
        result = self.settle()
        self._sent = torch.tensor([number])
        self._work = distributed.all_reduce(self._sent, distributed.ReduceOp.MAX, self._group, async_op=True)
        return result

    def settle(self) -> int:
        """The result of the pending exchange; 0 if there is none."""
        if self._work is None or self._sent is None:
            return 0
        self._work.wait()
        result = int(self._sent)
        self._work = self._sent = None
        return result
