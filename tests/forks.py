"""Ranks of a process group as forks of the test's process, which has imported everything already.

`in_ranks(main, folder)` calls `main(folder)` in two processes with the variables that torchrun sets. What torchrun
itself does, and programs that a user starts, are tested by `tests.programs`.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import distributed

from tests.tiny.runs import forget


def in_ranks(call: Callable[..., object], *arguments: Any, processes: int = 2) -> None:
    """Let each rank make a call on the CPU, which must succeed in all of them; one that fails ends the others.

    CUDA does not work in a fork, nor autograd after its use of CUDA: with a GPU the ranks are started anew, so `call`
    and `arguments` must be picklable.
    """
    if distributed.is_initialized():  # of a test before, in this process alone
        distributed.destroy_process_group()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    variables = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        context.Process(target=_be, args=(variables | {"RANK": rank, "LOCAL_RANK": rank}, call, arguments))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running and not any(rank.exitcode for rank in ranks):
        for sentinel in wait(running):
            running.pop(sentinel).join()  # pyright: ignore[reportArgumentType]
    for rank in running.values():
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * processes, "the errors of the ranks are in the captured output"


def _be(variables: dict[str, object], call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    forget()
    call(*arguments)
