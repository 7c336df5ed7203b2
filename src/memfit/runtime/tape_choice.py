"""Which of the two tapes a plan runs by."""

from __future__ import annotations

from collections.abc import Callable

from memfit.runtime.forward_pass import ForwardPass
from memfit.runtime.native_tape import NativeTape, new_tape
from memfit.runtime.tape import Tape


class TapeChoice:
    """Makes the tapes for the forward passes of one plan: in C++, unless only Python hears what the plan expects.

    Profiles are recorded by a dispatch mode, and a few composite ops of torch take other ways where one is at work: the
    attention of CPUs, with a mask, does. Then the calls are counted otherwise than in the profile, and some values are
    dropped in place of others: right gradients, but another peak. So the first pass is checked, and if it differs the
    second, with the tape in Python, whether that agrees.
    """

    def __init__(self) -> None:
        self._make: Callable[[], ForwardPass] = new_tape
        self._judge: Callable[[bool], None] | None = self._judge_native

    def __call__(self) -> ForwardPass:
        """Return a tape for the next pass."""
        tape = self._make()
        # Where there is no choice, there is nothing to judge.
        if isinstance(tape, NativeTape) or self._make is Tape:
            tape.report = self._judge
        return tape

    def _judge_native(self, heard_what_was_planned: bool) -> None:
        self._judge = None
        if not heard_what_was_planned:
            self._make, self._judge = Tape, self._judge_python

    def _judge_python(self, heard_what_was_planned: bool) -> None:
        self._judge = None
        if not heard_what_was_planned:
            self._make = new_tape
