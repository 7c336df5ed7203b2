"""Language models of transformers with a chunked loss: their gradients, their peaks, and `fit(chunk_loss=True)`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.runtime.chunked_loss.language_model_head import loss_in_chunks
from memfit.runtime.chunked_loss.lazy_logits import LazyLogits

transformers = pytest.importorskip("transformers")

NUM_CLASSES = 512
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": NUM_CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "vocab_size": NUM_CLASSES,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "gpt2": GPT2,
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "cohere": LLAMA,
    "granite": {**LLAMA, "logits_scaling": 3.0},
    "gemma2": {**LLAMA, "head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma4_text": {**LLAMA, "head_dim": 8, "final_logit_softcapping": 3.0},
}
# Within this share of the gradients' length, both from float64's.
BOUND = 32 * torch.finfo(torch.float32).eps


def language_model(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    # The grouped matrix products of experts know no float64.
    experts = {"experts_implementation": "eager"} if kind == "mixtral" else {}
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)


def batch(length: int = 24) -> dict[str, Tensor]:
    tokens = torch.randint(1, NUM_CLASSES, (2, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: nn.Module, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch(), **more).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    apart = sum((found[name].double() - gradient.double()).square().sum() for name, gradient in expected.items())
    length = sum(gradient.double().square().sum() for gradient in expected.values())
    return float((apart / length).sqrt())


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}], ids=["mean", "sum by number of items"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_as_close_to_those_in_float64_as_the_plain_ones(kind: str, more: dict[str, Any]) -> None:
    model = language_model(kind)
    expected_loss, expected = step(copy.deepcopy(model).double(), **more)
    _, plain = step(model, **more)
    with loss_in_chunks(model) as lazy_head:
        loss, found = step(model, **more)
    assert lazy_head.has_chunked
    assert found.keys() == expected.keys()
    torch.testing.assert_close(loss.double(), expected_loss.double(), rtol=BOUND, atol=0)
    assert distance(found, expected) <= max(BOUND, 2 * distance(plain, expected))


@pytest.mark.parametrize("kind", MODELS)
def test_logits_have_the_bits_of_the_plain_model(kind: str) -> None:
    model = language_model(kind)
    expected = model(**batch()).logits.detach()
    with loss_in_chunks(model):
        output = model(**batch())
        assert torch.equal(output.logits.detach(), expected)
        assert output.to_tuple()[1].shape == expected.shape


def test_generation_and_evaluation_run_as_before() -> None:
    model = language_model("llama")
    prompt = batch()["input_ids"][:, :4]
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    with loss_in_chunks(model):
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)
        model.eval()
        with torch.no_grad():
            assert type(model(**batch()).logits) is Tensor
        assert type(model(input_ids=prompt).logits) is LazyLogits


def test_autocast_gives_gradients_as_close_as_the_plain_ones() -> None:
    model = language_model("llama")
    _, expected = step(copy.deepcopy(model).double())

    def cast_step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        return loss, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    _, plain = cast_step()
    with loss_in_chunks(model) as lazy_head:
        loss, found = cast_step()
    assert lazy_head.has_chunked
    assert loss.dtype == torch.float32
    assert distance(found, expected) <= 1.2 * distance(plain, expected)


def test_fake_profiles_have_the_chunked_step_and_leave_the_model_alone() -> None:
    model = language_model("llama", vocab_size=8192)
    arguments = {"mode": "fake"}
    plain = memfit.profile(model, batch(128), **arguments)
    chunked = memfit.profile(model, batch(128), chunk_loss=True, **arguments)
    assert (plain.chunks_loss, chunked.chunks_loss) == (False, True)
    logits_bytes = 4 * 2 * 128 * 8192
    assert plain.peak_bytes - chunked.peak_bytes > logits_bytes
    assert "forward" not in vars(model.lm_head)


def fitted_below_the_plain_minimum(model: nn.Module, given: dict[str, Tensor]) -> memfit.Fitted:
    profile = memfit.profile(model, given)
    with pytest.raises(memfit.InfeasibleBudgetError, match="chunk_loss=True") as caught:
        memfit.fit(model, given, budget=profile.peak_bytes // 3)
    return memfit.fit(model, given, budget=caught.value.minimum_bytes - 1, chunk_loss=True)


def test_fit_goes_below_what_is_possible_with_whole_logits(tmp_path: Path) -> None:
    model = language_model("gpt2", vocab_size=8192)
    names = list(model.state_dict())
    given = batch(128)
    fitted = fitted_below_the_plain_minimum(model, given)
    assert fitted.plan.chunks_loss
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes < fitted.verification.plain_peak_bytes
    assert fitted.verification.gradients_equal is False
    assert fitted.verification.gradients_hold
    assert fitted.verification.gradient_distance <= 1e-5
    assert fitted.verification.gradient_tolerance == torch.finfo(torch.float32).eps ** 0.5
    assert "in chunks" in repr(fitted.plan)
    assert list(model.state_dict()) == names
    fitted = memfit.fit(model, given, budget=fitted.plan.budget_bytes, chunk_loss=True)
    assert fitted.plan.chunks_loss
    output = model(**given)
    assert type(output.logits) is LazyLogits
    fitted.plan.save(tmp_path / "plan.json")
    fitted.verification.save(tmp_path / "verification.json")
    fitted.profile.save(tmp_path / "profile.json")
    fitted.remove()
    assert type(model(**given).logits) is Tensor
    assert "forward" not in vars(model.lm_head)
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded.chunks_loss
    assert memfit.Verification.load(tmp_path / "verification.json") == fitted.verification
    assert memfit.ModelProfile.load(tmp_path / "profile.json").chunks_loss
    with memfit.apply(model, loaded):
        assert type(model(**given).logits) is LazyLogits


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputing_leaves_the_bits_of_the_chunked_step(kind: str) -> None:
    model = language_model(kind, **({"num_hidden_layers": 2} if kind == "llama" else {"n_layer": 2}))
    given = batch(96)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(**given).loss.backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    with loss_in_chunks(model) as lazy_head:
        expected = gradients()
    assert lazy_head.has_chunked
    profile = memfit.profile(model, given, mode="fake", chunk_loss=True)
    with pytest.raises(memfit.InfeasibleBudgetError) as caught:
        memfit.plan(profile, budget=1)
    plan = memfit.plan(profile, budget=caught.value.minimum_bytes)
    assert plan.changes_anything
    with memfit.apply(model, plan):
        found = gradients()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_model_that_changes_its_logits_is_told_that_nothing_is_chunked() -> None:
    model = language_model("llama")
    model.lm_head.register_forward_hook(lambda head, args, logits: logits.clamp(-30, 30))
    with (
        pytest.warns(UserWarning, match="chunk_loss=True changes nothing: LlamaForCausalLM"),
        pytest.warns(UserWarning, match="the plan changes nothing"),
    ):
        fitted = memfit.fit(model, batch(), budget="1GiB", chunk_loss=True)
    assert not fitted.plan.chunks_loss
    assert fitted.verification.gradients_equal
    fitted.remove()


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], ids=lambda model: type(model).__name__
)
def test_models_without_a_head_are_refused_before_anything_runs(model: nn.Module) -> None:
    with pytest.raises(memfit.InvalidParameterError, match="chunk_loss=True needs the output projection"):
        memfit.fit(model, torch.randn(2, 2), budget="1GiB", chunk_loss=True)


def test_a_wrong_gradient_is_outside_of_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on the head that is there only while logits are lazy changes the gradient by a thousandth."""
    model = language_model("llama", vocab_size=8192)

    def scaled(head: nn.Module, args: tuple[Tensor], output: Tensor) -> Any:
        return output * 1.001 if isinstance(output, LazyLogits) else output

    model.lm_head.register_forward_hook(scaled)
    profile = memfit.profile(model, batch(128), mode="fake", chunk_loss=True)
    plan = memfit.plan(profile, budget=profile.peak_bytes)
    verification = memfit.verify(model, plan, batch(128))
    assert not verification.gradients_hold
    assert "outside the tolerance" in repr(verification)
