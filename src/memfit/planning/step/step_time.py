"""How long a step takes under a plan, where the device computes and the host launches, and each may wait for the other.

The device works off what the host has launched, in order. If the host needs F and B seconds to launch the forward and
the backward pass, and the device f and b to compute them, each of several steps back-to-back takes the longest of

    f + b      the device is never kept waiting,
    F + B      it waits all the time,
    F + b      it waits until the forward pass is launched: only where the host cannot begin the step before the device
               has ended the last one (`HostCosts.runs_ahead`).

On a CPU the two are one: the step is as long as what both do.

A plan adds its replays to b and to B, what recording costs to F and B, and what the device waits for copies to f and b:
the host continues meanwhile. Where what the host spends was not measured, a plan adds the seconds of its replays and of
that waiting, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from memfit.graph.model_profile import ModelProfile, Phase, RecordedOp
from memfit.planning.step.recording import RecordingChoice
from memfit.planning.step.seconds import NONE, Seconds


def device_seconds(ops: Iterable[RecordedOp]) -> Seconds:
    """Return what the device computes for in a plain step."""
    seconds = [0.0, 0.0]
    for op in ops:
        seconds[op.phase is not Phase.FORWARD] += op.seconds
    return Seconds(*seconds)


def back_to_back_seconds(host: Seconds, device: Seconds, *, runs_ahead: bool) -> float:
    """Return what a step takes that the host needs ``host`` to launch and the device ``device`` to compute."""
    first_wait = 0.0 if runs_ahead else host.forward + device.backward
    return max(sum(device), sum(host), first_wait)


class StepTime:
    """Predicts, for one profiled step, the seconds that plans add to it."""

    def __init__(self, profile: ModelProfile, recording: RecordingChoice) -> None:
        self._host = profile.host
        self._recording = recording
        self._host_seconds_offloading = 0.0 if profile.link is None else profile.link.host_seconds
        self._device = device_seconds(profile.ops)
        self._are_one = profile.device == "cpu"
        self.launches_may_matter = self._launches_may_matter(profile)

    @property
    def plain_seconds(self) -> float:
        """What a plain step is predicted to take."""
        return sum(self._device) if self._host is None else self._of(NONE, 0.0)

    def added(
        self,
        dropped: Set[int],
        num_runs: int,
        replay_seconds: float,
        num_offloaded: int = 0,
        waiting: Seconds = NONE,
    ) -> float:
        """Return the seconds that the step takes longer when these values are dropped, and so much is restored.

        ``num_offloaded`` of the values go to the host, which has to send and to fetch them, and for which the device
        may be ``waiting``.
        """
        if self._are_one and self._host is not None and dropped:
            return replay_seconds + sum(waiting) + sum(self._recording.cost_of(dropped, num_runs))
        if not self.launches_may_matter or not dropped:
            return replay_seconds + sum(waiting)
        forward, backward = self._recording.cost_of(dropped, num_runs)
        # About as long for sending as for fetching.
        offloading = num_offloaded * self._host_seconds_offloading / 2
        recording = Seconds(forward + offloading, backward + offloading)
        return self._of(recording, replay_seconds, waiting) - self._of(NONE, 0.0)

    def at_least(self, replay_seconds: float) -> float:
        """Return the seconds that a plan adds at least if its replays take at least ``replay_seconds``."""
        if not self.launches_may_matter:
            return replay_seconds
        return self._of(NONE, replay_seconds) - self._of(NONE, 0.0)

    def _of(self, recording: Seconds, replay_seconds: float, waiting: Seconds = NONE) -> float:
        assert self._host is not None
        forward, backward = self._device
        host = Seconds(self._host.forward + recording.forward, self._host.backward + recording.backward)
        device = Seconds(forward + waiting.forward, backward + replay_seconds + waiting.backward)
        return back_to_back_seconds(host, device, runs_ahead=self._host.runs_ahead)

    def _launches_may_matter(self, profile: ModelProfile) -> bool:
        """Return whether the plan that records and replays everything keeps the device waiting."""
        if self._host is None or self._are_one:
            return False
        forward_ops = [op for op in profile.ops if op.phase is Phase.FORWARD]
        forward = {output for op in forward_ops for output in op.outputs if output is not None}
        return self._of(self._recording.cost_of(forward, len(profile.ops)), 0.0) > sum(self._device)
