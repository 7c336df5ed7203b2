"""What listening really takes of the host, plan by plan: the launching of a step under each, beside the plain one's.

    python benchmarks/launching.py [MODEL] [--cores N] [--turns N] [--small]

At every eighth of the memory between the smallest plan and saving all, the step takes turns with the plain one, each
alone. Told are the milliseconds by which launching its forward and its backward pass takes longer, and what the planner
counts with. The first tells by how much a step is late whose device waits for the host.
"""

from __future__ import annotations

import argparse

import torch
from frontier_models import SUBJECTS
from measuring import host_held, machine
from rich.console import Console
from rich.table import Table

import memfit
from memfit.capture.measuring.step_times import timed_interleaved
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step
from memfit.runtime.native_tape import engine_name
from memfit.units import format_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="mixtral", choices=SUBJECTS)
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, to try the script")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    torch.manual_seed(0)
    subject = SUBJECTS[options.model](device, small=options.small)
    engine_name()
    with host_held(device, options.cores):
        profile = memfit.profile(subject.model, subject.batch)
        step = Step(profile)
        training_step = TrainingStep(subject.model, subject.batch)
        state = KeptState(training_step)
        columns = (
            "peak",
            "dropped",
            "forward, counted",
            "forward, measured",
            "backward, counted",
            "backward, measured",
        )
        table = Table(*columns, title=f"{options.model}, {machine()}: ms more to launch than the plain step takes")
        for point in memfit.frontier(profile, points=9)[1:]:
            plan = point.plan
            dropped = {i for i in step.plannable if plan.decisions[profile.values[i].name] is memfit.Decision.RECOMPUTE}
            counted = step.listeners.cost_of(dropped, len(simulated(step, dropped).replayed_ops))
            plain, planned = timed_interleaved(
                training_step,
                device,
                state,
                lambda plan=plan: memfit.apply(subject.model, plan),
                num_rounds=options.turns,
            )
            measured = (
                planned.forward_launched - plain.forward_launched,
                planned.backward_launched - plain.backward_launched,
            )
            cells = (counted.forward, measured[0], counted.backward, measured[1])
            table.add_row(format_bytes(point.peak_bytes), str(len(dropped)), *(f"{1e3 * cell:.2f}" for cell in cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
