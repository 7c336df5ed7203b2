"""Recurrent models: torch's fused LSTM and GRU, cells in a loop, and a scan of many tiny ops."""

from __future__ import annotations

from functools import partial

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A recurrent layer with dropout between its two levels, then a head on the last hidden state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(5, 6, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        states, last = self.recurrent(x)
        return self.head(states), last


def recurrent(kind: type[nn.RNNBase], dtype: torch.dtype = torch.float32) -> Step:
    """Return a two-level bidirectional recurrent model."""
    inputs = torch.randn(3, 7, 5, dtype=dtype, requires_grad=True)
    return Recurrent(kind).to(dtype), inputs, lambda outputs: mean_of_squares(outputs[0])


class PackedSequences(nn.Module):
    """An LSTM on sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 5)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
        states, _ = self.recurrent(packed)
        return nn.utils.rnn.pad_packed_sequence(states)[0]


def packed_sequences() -> Step:
    """Return an LSTM on three sequences of lengths 2, 5 and 3."""
    return PackedSequences(), ([torch.randn(length, 4) for length in (2, 5, 3)],), mean_of_squares


class CellInLoop(nn.Module):
    """LSTM cells in a Python loop that also truncates its own history."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = carry = x.new_zeros(x.shape[1], 5)
        outputs = []
        for time, step in enumerate(x):
            hidden, carry = self.cell(step, (hidden, carry))
            if time == 3:
                hidden, carry = hidden.detach(), carry.detach()
            outputs.append(self.head(hidden))
        return torch.stack(outputs)


def cell_in_loop() -> Step:
    """Return an LSTM written as a loop over time."""
    return CellInLoop(), torch.randn(7, 3, 4), mean_of_squares


class Scan(nn.Module):
    """A linear state space model stepped in Python: hundreds of ops on a handful of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4))
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        outputs = []
        for step in x:
            state = state * self.decay.sigmoid() + step * self.gain
            state = state.clamp(-3, 3) + 0.01 * state.sin()
            outputs.append(state.tanh() / (1 + state.abs()))
        return torch.stack(outputs).cumsum(0)


def scan() -> Step:
    """Return a scan over 24 time steps."""
    return Scan(), torch.randn(24, 2, 4), mean_of_squares


EXAMPLES = (
    Example("lstm", partial(recurrent, nn.LSTM)),
    Example("lstm-fp64", partial(recurrent, nn.LSTM, torch.float64)),
    Example("gru", partial(recurrent, nn.GRU)),
    Example("elman-rnn", partial(recurrent, nn.RNN)),
    Example("lstm-packed-sequences", packed_sequences),
    Example("lstm-cell-in-loop", cell_in_loop),
    Example("scan-of-tiny-ops", scan),
)
