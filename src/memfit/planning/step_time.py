"""How long a step takes under a plan, where the device computes and the host launches, and each may wait for the other.

The device works off what the host has launched, in order. If the host needs F and B seconds to launch the forward and
the backward pass, and the device f and b to compute them, a step in a row of them takes the longest of

    f + b      the device is never kept waiting,
    F + B      it waits all the time,
    F + b      it waits until the forward pass is launched: only where the host cannot begin the step before the device
               has ended the last one (`HostCosts.runs_ahead`).

A plan adds its replays to b and to B, and what listening costs to F and B. Where host and device are one, or what the
host spends was not measured, a plan adds the seconds of its replays and no more.
"""

from __future__ import annotations

from collections.abc import Set

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.planning.regions import Listeners, ListeningCost

_NOTHING = ListeningCost(0.0, 0.0)


class StepTime:
    """Predicts, for one profiled step, the seconds that plans add to it."""

    def __init__(self, profile: ModelProfile, listeners: Listeners) -> None:
        self._host = profile.host
        self._listeners = listeners
        self._device_forward = sum(op.seconds for op in profile.ops if op.phase is Phase.FORWARD)
        self._device_backward = sum(op.seconds for op in profile.ops if op.phase is not Phase.FORWARD)
        self.launches_may_matter = self._launches_may_matter(profile)

    def added(self, recomputed: Set[int], num_replayed: int, replay_seconds: float) -> float:
        """Return the seconds that the step takes longer when these values are recomputed by running so many ops."""
        if not self.launches_may_matter or not recomputed:
            return replay_seconds
        return self._of(self._listeners.cost_of(recomputed, num_replayed), replay_seconds) - self._of(_NOTHING, 0.0)

    def at_least(self, replay_seconds: float) -> float:
        """Return the seconds that a plan adds at least if its replays take at least ``replay_seconds``."""
        if not self.launches_may_matter:
            return replay_seconds
        return self._of(_NOTHING, replay_seconds) - self._of(_NOTHING, 0.0)

    def _of(self, listening: ListeningCost, replay_seconds: float) -> float:
        assert self._host is not None
        host_forward = self._host.forward + listening.forward
        host_backward = self._host.backward + listening.backward
        device_backward = self._device_backward + replay_seconds
        first_wait = 0.0 if self._host.runs_ahead else host_forward + device_backward
        return max(self._device_forward + device_backward, host_forward + host_backward, first_wait)

    def _launches_may_matter(self, profile: ModelProfile) -> bool:
        """Return whether some plan could keep the device waiting: the dearest listens everywhere and replays all."""
        if self._host is None:
            return False
        forward = {
            index
            for index, value in enumerate(profile.values)
            if value.op_index is not None and profile.ops[value.op_index].phase is Phase.FORWARD
        }
        dearest = self._listeners.cost_of(forward, len(profile.ops))
        return self._of(dearest, 0.0) > self._device_forward + self._device_backward
