"""What recording costs per op: one small GPT block run plainly, under an empty dispatch mode, and under both tapes.

    python benchmarks/recording_cost.py

The best of many forward passes in process time on one thread; the tensors are tiny, so that recording is what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import GPT
from measuring import machine

from memfit.runtime.engine.forward_pass import ForwardPass
from memfit.runtime.engine.native_tape import engine_name, new_tape
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.engine.tape import Tape
from memfit.runtime.torch_internals import DispatchMode

NUM_RUNS = 400
REPLAYED = ("gelu", "native_layer_norm", "addmm", "add", "_scaled_dot_product_flash_attention_for_cpu")


class Empty(DispatchMode):
    num_ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return op(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    model = GPT(1, 32, vocabulary=100)
    block, x = model.blocks[0], torch.randn(1, 16, 32, requires_grad=True)
    region = PlannedModule("blocks.0", model, {f"aten.{op}": True for op in REPLAYED})

    def under(new: Callable[[], ForwardPass]) -> Callable[[], None]:
        def run() -> None:
            tape = new()
            tape.run(region, block, (x,), {})
            tape.close()

        return run

    def under_empty_mode() -> int:
        with Empty() as mode:
            block(x)
        return mode.num_ops

    num_ops = under_empty_mode()
    plain = best_microseconds(lambda: block(x))
    print(f"{machine()}: {num_ops} ops, plain {plain / num_ops:.1f} us each")
    methods: dict[str, Callable[[], object]] = {
        "an empty dispatch mode": under_empty_mode,
        "the tape in Python, every value dropped": under(Tape),
    }
    if engine_name() == "C++":
        methods["the tape in C++, every value dropped"] = under(new_tape)
    for name, run in methods.items():
        print(f"{name} adds {(best_microseconds(run) - plain) / num_ops:.1f} us per op")


def best_microseconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        begin = time.process_time_ns()
        run()
        times.append(time.process_time_ns() - begin)
    return min(times) / 1e3


if __name__ == "__main__":
    main()
