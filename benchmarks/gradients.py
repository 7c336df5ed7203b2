"""How far the gradients of two steps are apart, and kernels that make it measurable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def compare(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return 0.0 where all bits agree, else the largest difference of a tensor relative to its largest number."""
    errors = [0.0]
    for ours, theirs in zip(gradients, reference, strict=True):
        expected = theirs.to(ours.device)
        if not torch.equal(ours, expected):
            error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())
            # A NaN is as far as can be; max() would pass it over.
            errors.append(error if error == error else float("inf"))
    return max(errors)


@contextmanager
def sums_in_a_fixed_order(step: Callable[[], object]) -> Iterator[None]:
    """Let torch choose kernels whose sums do not depend on who comes first: all of them where ``step`` can run so.

    Where some op of it has no such kernel, torch is only to warn, and goes on with attention whose backward sums as it
    comes. Attention of cuDNN has no other, so that it is left out by name; what a plan says of its values then concerns
    nobody, and they are saved.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        # That finds reads of memory that nobody wrote, which is another matter.
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            torch.use_deterministic_algorithms(True)
            try:
                step()
            except RuntimeError as error:
                print(f"gradients: not all sums can be in a fixed order: {str(error)[:200]}", flush=True)
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fills_memory
