"""What the page shows of a step with compiled blocks: what each block saves by its partition, and the step by segments.

Inside a compiled block nothing is planned value by value. A *segment* is a part of the step between two borders of
blocks; what is live in it is known from the measurement of each partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledPlan,
    CompiledProfile,
    MeasuredPartition,
    SegmentKind,
    StepSegment,
    held_by,
)
from memfit.graph.plan import Decision, FrontierPoint

_PASSES = {SegmentKind.FORWARD: "forward", SegmentKind.BACKWARD: "backward"}


class CompiledStep:
    """The measured step with compiled blocks, and what a plan does to it."""

    def __init__(self, profile: CompiledProfile) -> None:
        self._profile = profile
        self.labels = [block.path for block in profile.blocks]
        self.kinds = [profile.kinds[block.kind].name for block in profile.blocks]

    def timeline(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the segments of the step; ``kinds`` are the bytes that exist before it."""
        everything = [0] * len(self._profile.blocks)
        num_segments = len(self._profile.segments)
        return {
            "unit": "segment",
            "first_ops": list(range(num_segments)),
            "phases": self._phases(),
            "plain_bytes": self._live_bytes(everything, [0] * len(everything)),
            "kinds": {
                "weights": kinds["weights"],
                "batch": kinds["batch"],
                "optimizer_state": (kinds["optimizer_state"] or [0]) * num_segments,
                # Gradients are part of what was measured of a block's backward pass.
                "gradients": None,
            },
        }

    def point_entry(self, point: FrontierPoint, resident_bytes: int) -> dict[str, Any]:
        """Return what the page shows of one plan; ``resident_bytes`` exist before the step."""
        plan = point.plan.compiled
        assert plan is not None
        for outside in self._profile.outside:
            if set(outside.recomputed) == set(point.plan.recomputed_names):
                return CompiledStep(self._profile.with_outside(outside)).point_entry(point, resident_bytes)
        choice = [self._place_of(block, plan) for block in self._profile.blocks]
        sent = [
            self._sent_bytes(block, number, plan) for block, number in zip(self._profile.blocks, choice, strict=True)
        ]
        live = self._live_bytes(choice, sent)
        peak = max(range(len(live)), key=live.__getitem__, default=0)
        live_at_peak = self._live_at(peak, choice, sent, point.peak_bytes, resident_bytes)
        return {
            **point.facts(),
            "outcomes": "",
            "partitions": [plan.choice[path] for path in self.labels],
            "blocks": [
                _bytes_of(block, block.measured[number], num_sent)
                for block, number, num_sent in zip(self._profile.blocks, choice, sent, strict=True)
            ],
            "timeline_bytes": live,
            "peak_op_index": peak,
            "peak_op": self._name_of(self._profile.segments[peak]) if live else "",
            "num_live_modules": len(live_at_peak),
            "live_at_peak": live_at_peak,
            "other_live_bytes": 0,
            "live_samples": [],
        }

    def _place_of(self, block: CompiledBlock, plan: CompiledPlan) -> int:
        partitions = self._profile.kinds[block.kind].partitions
        return next(number for number, each in enumerate(partitions) if each.name == plan.choice[block.path])

    def _sent_bytes(self, block: CompiledBlock, number: int, plan: CompiledPlan) -> int:
        sent = plan.offloaded.get(block.path)
        return 0 if sent is None else sum(sent.among(block.measured[number].saved_sizes))

    def _phases(self) -> list[list[Any]]:
        """Return where the forward and the backward pass begin, at their first block."""
        phases: list[list[Any]] = []
        for index, segment in enumerate(self._profile.segments):
            name = _PASSES.get(segment.kind)
            if name is not None and all(name != other for other, _ in phases):
                phases.append([name, index if phases else 0])
        return phases

    def _live_bytes(self, choice: Sequence[int], sent: Sequence[int]) -> list[int]:
        blocks = self._profile.blocks
        held = [0]
        chosen = [block.measured[number] for block, number in zip(blocks, choice, strict=True)]
        for own, num_sent in zip(held_by(chosen), sent, strict=True):
            held.append(held[-1] + own - num_sent)
        live = []
        for segment in self._profile.segments:
            num_bytes = segment.base_bytes + held[segment.num_held]
            if segment.block is not None:
                measured = chosen[segment.block]
                is_forward = segment.kind is SegmentKind.FORWARD
                num_bytes += measured.forward_bytes if is_forward else measured.output_bytes + measured.backward_bytes
            live.append(num_bytes)
        return live

    def _live_at(
        self, index: int, choice: Sequence[int], sent: Sequence[int], peak_bytes: int, resident_bytes: int
    ) -> list[tuple[str, int]]:
        """Return what the blocks hold in a segment, what exists before the step, and as one entry all else."""
        segment = self._profile.segments[index]
        entries = [
            (f"{block.path} (saved)", block.measured[choice[place]].held_bytes - sent[place])
            for place, block in enumerate(self._profile.blocks[: segment.num_held])
        ]
        held = sum(num_bytes for _, num_bytes in entries)
        entries.append(("(weights, optimizer state and batch)", resident_bytes))
        entries.append((f"({self._name_of(segment)}: gradients and workspaces)", peak_bytes - held - resident_bytes))
        return sorted((entry for entry in entries if entry[1]), key=lambda entry: -entry[1])

    def _name_of(self, segment: StepSegment) -> str:
        if segment.block is None:
            return "outside the blocks"
        return f"{segment.kind} pass of {self.labels[segment.block]}"


def _bytes_of(block: CompiledBlock, measured: MeasuredPartition, num_sent: int) -> list[int]:
    """Return the bytes of each decision; recomputed is what the first partition saves beyond this one."""
    num_bytes = {
        Decision.SAVE: measured.held_bytes - num_sent,
        Decision.RECOMPUTE: max(0, block.measured[0].held_bytes - measured.held_bytes),
        Decision.OFFLOAD: num_sent,
    }
    return [num_bytes.get(decision, 0) for decision in Decision]
