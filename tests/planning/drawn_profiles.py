"""Small random steps for property tests: every kind of op, lifetime and save that a profile can describe."""

from __future__ import annotations

from hypothesis import strategies as st

from memfit.graph.model_profile import ModelProfile, Phase, RecordedOp, RecordedValue, Replay, Save


class _Drawing:
    """A step in the making. ``contents`` maps each storage to the value it holds now."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.ops: list[RecordedOp] = []
        self.values: list[RecordedValue] = []
        self.contents: dict[int, int] = {}
        self.last_use_of_storage: dict[int, int] = {}
        self.num_storages = 0

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) < percent

    def new_value(self, storage: int, num_bytes: int, op_index: int | None) -> int:
        index = len(self.values)
        name = f"outside#{index}" if op_index is None else f"m{op_index % 3}::op#{op_index}.{index}"
        self.values.append(RecordedValue(name, num_bytes, op_index, storage))
        self.contents[storage] = index
        return index

    def new_storage(self, num_bytes: int, op_index: int | None) -> int:
        self.num_storages += 1
        return self.new_value(self.num_storages - 1, num_bytes, op_index)

    def forward_op(self, module: str | None) -> None:
        index = len(self.ops)
        present = list(self.contents.values())
        inputs = set(self.draw(st.lists(st.sampled_from(present), max_size=3)))
        rewrites: tuple[int, ...] = ()
        if self.chance(20):
            rewritten = self.draw(st.sampled_from(present))
            rewrites = (rewritten,)
            inputs = inputs | {rewritten} if self.chance(70) else inputs - {rewritten}
            value = self.values[rewritten]
            outputs = [self.new_value(value.storage, value.num_bytes, index)]
        else:
            outputs = [self.new_storage(self.integer(0, 20), index) for _ in range(self.integer(1, 2))]
        for value in (*inputs, *rewrites, *outputs):
            self.last_use_of_storage[self.values[value].storage] = index
        self.ops.append(
            RecordedOp(
                module=module,
                op="op",
                call=index,
                inputs=tuple(sorted(inputs)),
                outputs=tuple(outputs),
                rewrites=rewrites,
                flops=self.integer(0, 9),
                replay=Replay.STATEFUL if self.chance(12) else Replay.YES,
                seconds=float(self.integer(0, 9)),
                replay_seconds=float(self.integer(0, 9)) if self.chance(30) else None,
                workspace_bytes=self.integer(0, 6) if self.chance(30) else 0,
            )
        )

    def backward_op(self) -> None:
        index = len(self.ops)
        outputs = [self.new_storage(self.integer(0, 12), index)] if self.chance(70) else []
        for value in outputs:
            self.last_use_of_storage[self.values[value].storage] = index
        self.ops.append(
            RecordedOp(
                module=None,
                op="backward",
                call=index,
                inputs=(),
                outputs=tuple(outputs),
                rewrites=(),
                flops=1,
                replay=Replay.NO_GRAD,
                phase=Phase.BACKWARD,
                seconds=1.0,
                workspace_bytes=self.integer(0, 6) if self.chance(30) else 0,
            )
        )

    def lifetimes(self, num_forward: int) -> None:
        num_ops = len(self.ops)
        death_of_storage: dict[int, int | None] = {}
        for storage, last_use in self.last_use_of_storage.items():
            later = self.integer(last_use, num_ops - 1) if self.chance(25) else last_use
            death_of_storage[storage] = None if self.chance(5) else later
        current = set(self.contents.values())
        for index, value in enumerate(self.values):
            saves: tuple[Save, ...] = ()
            # Autograd refuses to save what is written over later.
            if (
                value.op_index is not None
                and value.op_index < num_forward
                and index in current
                and num_ops > num_forward
            ):
                saves = tuple(
                    self._save(index, num_forward, num_ops) for _ in range(self.draw(st.sampled_from((0, 0, 1, 1, 2))))
                )
            self.values[index] = RecordedValue(
                value.name,
                value.num_bytes,
                value.op_index,
                value.storage,
                dies_after=None if value.op_index is None else death_of_storage[value.storage],
                saves=saves,
                replays_exactly=not self.chance(4),
            )

    def _save(self, value: int, num_forward: int, num_ops: int) -> Save:
        last = num_forward - 1
        by_loss = self.ops[last].module is None and value in self.ops[last].inputs and self.chance(50)
        op_index = last if by_loss else None
        read_before = num_ops if self.chance(5) else self.integer(num_forward, num_ops - 1)
        released_after = self.integer(min(read_before, num_ops - 1), num_ops - 1)
        return Save(read_before, released_after, op_index, read_place=self.integer(0, 3))


@st.composite
def drawn_profiles(draw: st.DrawFn, max_forward_ops: int = 9, max_backward_ops: int = 7) -> ModelProfile:
    """Draw a whole step. Seconds are whole numbers, so that their sums are exact in any order."""
    drawing = _Drawing(draw)
    for _ in range(drawing.integer(1, 2)):
        drawing.new_storage(drawing.integer(0, 9), None)
    num_in_model = drawing.integer(1, max_forward_ops)
    for position in range(num_in_model):
        drawing.forward_op(f"m{position % 3}")
    if drawing.chance(50):
        drawing.forward_op(None)
    num_forward = len(drawing.ops)
    for _ in range(drawing.integer(0, max_backward_ops)):
        drawing.backward_op()
    drawing.lifetimes(num_forward)
    return ModelProfile(
        ops=tuple(drawing.ops),
        values=tuple(drawing.values),
        blocks=(),
        peak_bytes=0,
        step_seconds=max(1.0, sum(op.seconds for op in drawing.ops)),
        device="cpu",
        fingerprint="drawn",
    )
