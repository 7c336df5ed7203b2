"""Compiled blocks together with a chunked loss, also where the step does not fit the device with whole logits."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.compiled.compiled_models import WIDTH, SmallBlock
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.graph.compiled_data.compiled_blocks import EVERYTHING
from memfit.profiling import with_compiled_blocks

NUM_CLASSES = 200
NUM_TOKENS = 512
_HIDDEN_BYTES = 4 * NUM_TOKENS * WIDTH


class SmallLanguageModel(nn.Module):
    """Embedding, blocks, ``lm_head`` and cross-entropy. Saving more than ``most_bytes`` runs out of memory."""

    def __init__(self, most_bytes: float = float("inf")) -> None:
        super().__init__()
        self.most_bytes = most_bytes
        self.into = nn.Embedding(NUM_CLASSES, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, NUM_CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token itself."""
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if type(tensor) is Tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = self.into(tokens)
            for block in self.blocks:
                x = block(x)
            loss = cross_entropy(self.lm_head(x), tokens)
        if sum(sizes.values()) > self.most_bytes:
            raise torch.OutOfMemoryError("pretended")
        return loss


def small_language_model(most_bytes: float = float("inf")) -> tuple[SmallLanguageModel, Tensor]:
    torch.manual_seed(0)
    return SmallLanguageModel(most_bytes), torch.randint(0, NUM_CLASSES, (NUM_TOKENS,))


def test_the_chunked_step_is_measured_with_the_partitions_of_the_step_with_whole_logits() -> None:
    model, batch = small_language_model()
    whole = memfit.profile(model, batch, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = memfit.fit(model, batch, budget=1_400_000, compile=True, chunk_loss=True)
    with fitted:
        assert fitted.plan.chunks_loss
        assert whole.compiled is not None
        assert fitted.profile.compiled is not None
        assert fitted.profile.compiled.kinds == whole.compiled.kinds
        assert fitted.verification.holds
        peaks = peaks_of_steps(model, batch, lambda loss: loss)
        assert max(peaks) <= 1_400_000
        assert max(peaks) == pytest.approx(fitted.plan.predicted_peak_bytes, rel=0.02)


def test_blocks_that_fit_only_beside_a_chunked_loss_are_compiled() -> None:
    # Blocks that save the least take 10.7 hidden states beside whole logits, and 4.5 beside a chunked loss.
    model, batch = small_language_model(10 * _HIDDEN_BYTES)
    with (
        pytest.warns(UserWarning, match="3 blocks stay in eager.*runs out of memory"),
        pytest.raises(memfit.VerificationError, match="does not fit the device"),
    ):
        memfit.fit(model, batch, budget="1GiB", compile=True)
    with memfit.fit(model, batch, budget="1GiB", compile=True, chunk_loss=True) as fitted:
        assert fitted.plan.chunks_loss
        assert fitted.plan.compiled is not None
        assert fitted.verification.gradients_hold


def test_partitions_that_fit_only_beside_a_chunked_loss_are_in_its_menu() -> None:
    # Those that save everything take 24.2 hidden states beside whole logits, and 18 beside a chunked loss.
    model, batch = small_language_model(20 * _HIDDEN_BYTES)
    step = TrainingStep(model, StepArguments(batch, None, None, None, None, "fresh"))
    whole = with_compiled_blocks(memfit.profile(model, batch, mode="fake"), step).compiled
    assert whole is not None
    assert [kind.partitions[0].name for kind in whole.kinds] == ["50.0% of bytes"]
    assert not whole.has_all_partitions
    with memfit.fit(model, batch, budget=1_500_000, compile=True, chunk_loss=True) as fitted:
        assert fitted.plan.chunks_loss
        assert fitted.profile.compiled is not None
        assert [kind.partitions[0].name for kind in fitted.profile.compiled.kinds] == [EVERYTHING]
