"""Building the engine in C++, doing without it, and which of the two tapes a plan runs by."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.runtime.engine.forward_pass import ForwardPass, UnplannedCalls
from memfit.runtime.engine.native_tape import NativeTape, new_tape
from memfit.runtime.engine.op_rules import OpRule, Treatment, rule_for
from memfit.runtime.engine.planned_modules import Fate, PlannedModule
from memfit.runtime.engine.tape import Tape
from memfit.runtime.native import native_build
from memfit.runtime.native.native_build import native_module


@pytest.fixture
def unknown_module() -> Iterator[None]:
    """As in a process that has not asked for the module yet."""
    native_module.cache_clear()
    yield
    native_module.cache_clear()


def commands_of_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let builds write files without compiling; return the commands that they run, as they run them."""
    commands: list[list[str]] = []

    def compiling(command: list[str], **_: Any) -> Any:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"a library")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build.subprocess, "run", compiling)
    return commands


def num_linked(commands: list[list[str]]) -> int:
    return sum("-shared" in command for command in commands)


def test_it_is_built_once_and_found_again(
    unknown_module: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = commands_of_builds(tmp_path, monkeypatch)
    monkeypatch.setattr(native_build, "_loaded", Path.read_bytes)
    assert native_module() == b"a library"
    native_module.cache_clear()
    assert native_module() == b"a library"
    assert num_linked(commands) == 1
    # Another torch wants another library.
    native_module.cache_clear()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert native_module() == b"a library"
    assert num_linked(commands) == 2


def test_builds_that_start_at_once_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock file by itself, as processes do."""
    commands = commands_of_builds(tmp_path, monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        libraries = {each.result() for each in [threads.submit(native_build._built) for _ in range(4)]}
    assert num_linked(commands) == 1
    assert [library.read_bytes() for library in libraries] == [b"a library"]
    # Nothing but the library and its lock is left, and each source was compiled once.
    assert len(list((tmp_path / "cache").iterdir())) == 2
    compiled = [command for command in commands if "-c" in command]
    sources = [part for command in compiled for part in command if part.endswith(".cpp")]
    assert sorted(Path(source).name for source in sources) == ["allocation_meter.cpp", "module.cpp", "usual_ops.cpp"]


def test_without_a_home_to_write_to_it_is_kept_where_files_are_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = tmp_path / "a file"
    no_folder.write_text("")
    monkeypatch.delenv("MEMFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = native_build._writable_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native_build._writable_folder() == tmp_path / "cache" / "memfit"
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "told"))
    assert native_build._writable_folder() == tmp_path / "told"


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write there could put a library of his own in our place."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a file").write_text("")
    monkeypatch.delenv("MEMFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"memfit-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="is owned by another user"):
        native_build._writable_folder()


def test_what_does_not_compile_is_told_and_done_without(
    unknown_module: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'tape.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match=r"could not be built with .*broken-c\+\+ \(tape\.h:1: error: no such thing\)"):
        assert native_module() is None
    assert not list(tmp_path.glob("*.so"))


def test_it_is_done_without_where_asked(
    unknown_module: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    assert native_module() is None
    assert not recwarn.list


def test_a_missing_compiler_is_a_warning(unknown_module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="no C.. compiler 'no-such-compiler' was found.*set CXX.*5 times"):
        assert native_module() is None


def test_hooks_around_the_model_are_served_by_the_tape_in_python() -> None:
    assert isinstance(new_tape(), NativeTape)
    with torch.autograd.graph.save_on_cpu():
        assert isinstance(new_tape(), Tape)
    assert isinstance(new_tape(), NativeTape)


def test_where_another_tape_records_already_the_tape_is_in_python() -> None:
    kinds: list[type] = []
    tape = new_tape()
    tape.run(PlannedModule("", nn.Identity(), {}, hooks_saves=False), lambda: kinds.append(type(new_tape())), (), {})
    tape.close()
    assert kinds == [Tape]


class MaskedAttention(nn.Module):
    """On the CPU, with a mask that is trained, attention adds it in place, unless a dispatch mode is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask).exp()


@pytest.mark.filterwarnings("error:a forward pass is not as planned")
def test_a_profile_has_the_ops_that_the_engine_in_cpp_sees() -> None:
    torch.manual_seed(0)
    model = MaskedAttention()
    x = torch.randn(2, 1, 4, 8, requires_grad=True)
    profile = memfit.profile(model, x, loss=lambda output: output.sum())
    assert [op.op for op in profile.ops if op.module == "" and "add" in op.op] == ["aten.add_"]
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])

    def made() -> ForwardPass:
        tape = new_tape()
        assert isinstance(tape, NativeTape)
        return tape

    # That a pass is not as planned would be a warning.
    with memfit.runtime.applying.apply.Applied(model, plan, made):
        model(x).sum().backward()


def test_a_chain_of_dropped_values_of_any_length_is_let_go() -> None:
    """One after the other: freeing each from within the one before would overflow the stack."""
    x = torch.ones(1, requires_grad=True)
    tape = new_tape()

    def forward() -> Tensor:
        y = x
        for _ in range(50_000):
            y = y.neg()
        return y * y

    result = tape.run(PlannedModule("", nn.Identity(), {"aten.neg": True}), forward, (), {})
    tape.close()
    del result


def rules_of_usual_ops() -> dict[str, OpRule]:
    """Return the rules of all ops with a kernel at the engine's dispatch key, by their names."""
    rules = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("Fake"):
        namespace, _, rest = name.partition("::")
        short_name, _, overload = rest.partition(".")
        assert namespace == "aten"
        rules[name] = rule_for(getattr(getattr(torch.ops.aten, short_name), overload or "default"))
    return rules


def test_what_is_let_through_is_a_view_and_the_usual_ops_write_to_their_first_argument_at_most() -> None:
    assert native_module() is not None
    rules = rules_of_usual_ops()
    let_through = {name for name in rules if torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, "Fake")}
    assert {"aten::view", "aten::t", "aten::slice.Tensor"} <= let_through
    assert {rules[name].treatment for name in let_through} == {Treatment.VIEW}
    usual = rules.keys() - let_through
    assert {"aten::mul.Tensor", "aten::add_.Tensor", "aten::convolution"} <= usual
    for name in usual:
        rule = rules[name]
        assert rule.written in ((), (0,)), name
        assert rule.batch_norm_arguments is None, name
        # Where it writes, that is what it returns: so the kernel knows.
        assert (rule.treatment is Treatment.IN_PLACE) == (rule.written == (0,)), name


def test_calls_with_tensors_without_memory_are_not_counted() -> None:
    planned = PlannedModule("", nn.Identity(), {"aten.mul": (Fate.DROP,)}, num_calls={"aten.mul": 1})
    weight = torch.full((8,), 1.25, requires_grad=True)

    def forward() -> Tensor:
        traced = weight.detach().to("meta")
        torch.cat([traced * traced, traced])
        return (weight * weight).exp().sum()

    tape = new_tape()
    reports: list[UnplannedCalls | None] = []
    tape.report = reports.append
    tape.run(planned, forward, (), {}).backward()
    tape.close()
    assert reports == [None]
