"""Two processes of one gloo group, started once a session, that run functions of the tests at the same time."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_RANKS = 2
_SECONDS_TO_ANSWER = 150


class RanksAtWork:
    """Processes that wait for functions to run, each with its rank in `torch.distributed`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # One process imports torch, and the ranks are forks of it: autograd must not have run before a fork.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "memfit.fitting"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            rendezvous = Path(self._folder.name) / "rendezvous"
            process = context.Process(target=_serve, args=(theirs, rank, str(rendezvous)), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(rank, *args)`` returned in each process; raise if one raised, or does not answer."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS_TO_ANSWER):
                self.end()
                raise TimeoutError(
                    f"rank {rank} did not answer within {_SECONDS_TO_ANSWER} s: do all ranks run as often?"
                )
            answers.append(pipe.recv())
        errors = [error for _, error in answers if error]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for result, _ in answers]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, rendezvous: str) -> None:
    import torch

    torch.set_num_threads(1)
    # torch warns of calls of its own in FSDP2 and in saving checkpoints.
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(rank, *args), None))
        except Exception:
            pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))
