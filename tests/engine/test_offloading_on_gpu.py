"""Offloading on a CUDA device: copies beside the computation, and never a byte of memory reused too early."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.engine.offloading_plans import EVERYTHING, NotedCopies, plan_with
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.graph.plan import Decision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 512
LENGTH = 512
BATCH = 8
VALUE_BYTES = BATCH * LENGTH * WIDTH * 4
WINDOWS = (0, VALUE_BYTES, 6 * VALUE_BYTES, EVERYTHING)


@pytest.fixture(autouse=True)
def reproducible_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, 8, WIDTH // 8)
        scores = torch.einsum("blhd,bmhd->bhlm", heads[:, :, 0], heads[:, :, 1]).div(8).softmax(-1)
        attended = torch.einsum("bhlm,bmhd->blhd", scores, heads[:, :, 2]).flatten(2)
        x = x + self.dropout(self.projection(attended))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class Stack(nn.Sequential):
    def __init__(self, *, dropout: float = 0.1, num_blocks: int = 4) -> None:
        super().__init__(*(Block(dropout) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def built(**options: float) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    return Stack(**options).cuda(), torch.randn(BATCH, LENGTH, WIDTH, device="cuda")  # type: ignore[arg-type]


# Profiling takes seconds, and the models of most tests are the same.
PROFILES: dict[tuple[int, float], memfit.ModelProfile] = {}


def offloading_all(model: Stack, x: Tensor, window_bytes: int) -> memfit.Plan:
    kind = len(model), model[0].dropout.p
    if kind not in PROFILES:
        PROFILES[kind] = memfit.profile(model, x)
    return plan_with(PROFILES[kind], lambda _: Decision.OFFLOAD, window_bytes)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the plain step's gradients; skip where they differ from themselves."""
    first, second = gradients(model, x), gradients(model, x)
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        pytest.skip("the plain step differs from itself here")
    return first


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class OtherWork:
    """Keeps another stream busy with products, and the way to the host with copies, so that ours come late."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(2048, 2048, device="cuda")
        self._large = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        self._host = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(8):
                self._host.copy_(self._large, non_blocking=True)
                torch.mm(self._matrix, self._matrix)
                self._large.copy_(self._host, non_blocking=True)


@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_gradients_are_those_of_the_plain_step_however_late_copies_are(
    window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = built()
    expected = plain_gradients(model, x)
    plan = offloading_all(model, x, window_bytes)
    other_work = OtherWork()
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        for number in range(20):
            if number % 2:
                other_work.launch()
            assert_same(gradients(model, x), expected)
    assert len(copies) >= 20 * 4 * 10
    assert copies.num_alive == 0


def test_a_step_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built()
    expected = plain_gradients(model, x)
    plan = offloading_all(model, x, 2 * VALUE_BYTES)
    copies = NotedCopies(monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with memfit.apply(model, plan):
        for _ in range(5):
            with torch.cuda.stream(stream):
                actual = gradients(model, x)
            torch.cuda.current_stream().wait_stream(stream)
            assert_same(actual, expected)
    assert copies


def num_pinned_blocks_handed_out() -> int:
    return int(torch.cuda.host_memory_stats()["active_requests.allocated"])


def test_host_copies_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(num_blocks=1)
    plan = offloading_all(model, x, 0)
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        before = num_pinned_blocks_handed_out()
        loss = model(x)
        assert num_pinned_blocks_handed_out() - before >= len(copies) > 0
        loss.backward()


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("window_bytes", "share"), [(0, 0.5), (4 * VALUE_BYTES, 0.6)])
def test_the_peak_is_well_below_the_plain_one_and_always_the_same(window_bytes: int, share: float) -> None:
    model, x = built(num_blocks=8)
    gradients(model, x)
    plain = peak_bytes(model, x)
    other_work = OtherWork()
    with memfit.apply(model, offloading_all(model, x, window_bytes)):
        gradients(model, x)
        peaks = []
        for number in range(6):
            if number % 2:
                other_work.launch()
            peaks.append(peak_bytes(model, x))
    assert max(peaks) < share * plain
    assert len(set(peaks)) == 1


def test_the_host_never_waits() -> None:
    model, x = built()
    plan = offloading_all(model, x, 2 * VALUE_BYTES)
    with memfit.apply(model, plan):
        # The first steps allocate and choose kernels.
        for _ in range(3):
            gradients(model, x)
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            # That it does not notice everything.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            model.zero_grad()
            model(x).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


class StopHereError(RuntimeError):
    """What these tests raise."""


@pytest.mark.parametrize("number", range(5))
def test_memory_of_copies_that_nobody_waits_for_is_not_reused_too_early(number: int) -> None:
    """Backward ends early, with all values on their way back; what is allocated next must stay as it is written."""
    model, x = built()
    plan = offloading_all(model, x, EVERYTHING)
    other_work = OtherWork()

    def stop(_: Tensor) -> None:
        raise StopHereError

    with memfit.apply(model, plan):
        gradients(model, x)
        model.zero_grad()
        torch.cuda.synchronize()
        last = list(model.parameters())[-1]
        handle = last.register_hook(stop)
        loss = model(x)
        other_work.launch()
        with pytest.raises(StopHereError):
            loss.backward()
        handle.remove()
        del loss
        taken = [torch.full((VALUE_BYTES // 4,), float(number + 1), device="cuda") for _ in range(200)]
        torch.cuda.synchronize()
        assert all(bool((tensor == number + 1).all()) for tensor in taken)
        del taken
        assert_same(gradients(model, x), gradients(model, x))


def test_memory_that_is_still_leaving_is_not_reused_too_early() -> None:
    """The forward pass is over before the copies are; what the loss allocates must not get into them."""
    model, x = built(dropout=0.0)
    expected = plain_gradients(model, x)
    plan = offloading_all(model, x, EVERYTHING)
    other_work = OtherWork()
    with memfit.apply(model, plan):
        for _ in range(10):
            model.zero_grad()
            other_work.launch()
            loss = model(x)
            taken = [torch.full((VALUE_BYTES // 4,), float("nan"), device="cuda") for _ in range(200)]
            del taken
            loss.backward()
            assert_same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected)


def test_a_captured_step_saves_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(dropout=0.0)
    expected = plain_gradients(model, x)
    plan = offloading_all(model, x, VALUE_BYTES)
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            gradients(model, x)
        torch.cuda.current_stream().wait_stream(stream)
        assert copies
        copies.clear()
        model.zero_grad()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(x).backward()
    assert not copies
    graph.replay()
    torch.cuda.synchronize()
    assert_same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected)
