"""Profiles in files: what is saved is loaded, exactly; what is broken is named with its place."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.plans import profile_of
from tests.engine.zoo import BY_NAME

from memfit import LayerMemoryProfile, LayerTypeHint, ModelProfile, PlanFileError
from memfit.graph.inputs import Input
from memfit.graph.model_profile import Block, HostCosts, Link, Phase, RecordedOp, RecordedValue, Replay, Save

texts = st.text(max_size=8)
sizes = st.integers(0, 2**58)
seconds = st.floats(0, 1e15)
rates = st.floats(1, 1e15)


inputs = st.lists(
    st.builds(Input, texts, st.sampled_from(["int64", "float32"]), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    max_size=3,
    unique_by=lambda entry: entry.name,
).map(tuple)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    num_ops, num_values = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    makers = draw(st.lists(st.none() | st.integers(0, num_ops - 1), min_size=num_values, max_size=num_values))
    op_index, value_index = st.integers(0, num_ops - 1), st.integers(0, num_values - 1)
    indices = st.lists(value_index, max_size=3).map(tuple)
    save = st.builds(Save, st.integers(0, num_ops), op_index, st.none() | op_index)
    layer = st.builds(LayerMemoryProfile, sizes, st.sampled_from(LayerTypeHint), sizes, sizes, st.none() | texts)

    def op(index: int) -> st.SearchStrategy[RecordedOp]:
        made = [value for value, maker in enumerate(makers) if maker == index]
        return st.builds(
            RecordedOp,
            st.none() | texts,
            texts,
            st.integers(0, 9),
            indices,
            st.permutations([*made, None]).map(tuple) | st.just(tuple(made)),
            indices,
            st.integers(0, 2**80),
            st.sampled_from(Replay),
            st.sampled_from(Phase),
            seconds,
            sizes,
        )

    def value(index: int, maker: int | None) -> st.SearchStrategy[RecordedValue]:
        return st.builds(
            RecordedValue,
            texts.map(lambda text: f"{text}::aten.op#{index}"),
            sizes,
            st.just(maker),
            value_index,
            st.none() | op_index,
            st.lists(save, max_size=2).map(tuple),
            st.booleans(),
        )

    return ModelProfile(
        ops=tuple(draw(op(index)) for index in range(num_ops)),
        values=tuple(draw(value(*maker)) for maker in enumerate(makers)),
        blocks=tuple(draw(st.lists(st.builds(Block, texts, layer), max_size=2))),
        peak_bytes=draw(sizes),
        step_seconds=draw(seconds),
        device=draw(texts),
        fingerprint=draw(texts),
        device_bytes=draw(st.none() | sizes),
        free_bytes=draw(st.none() | sizes),
        measured_with=draw(texts),
        host=draw(st.none() | st.builds(HostCosts, *[seconds] * 7, st.booleans(), st.booleans())),
        inputs=draw(inputs),
        link=draw(st.none() | st.builds(Link, rates, rates, *[seconds, sizes, seconds, seconds])),
        unthrottled_share=draw(st.floats(0, 1, exclude_min=True)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.mark.parametrize("name", ["any.json", "any.json.gz"])
@given(profile=profiles())
def test_what_is_saved_is_loaded(folder: Path, name: str, profile: ModelProfile) -> None:
    profile.save(folder / name)
    assert ModelProfile.load(folder / name) == profile


@pytest.mark.parametrize("name", ["gpt.json", "gpt.json.gz"])
def test_a_measured_profile_is_loaded_as_it_was(tmp_path: Path, name: str) -> None:
    profile = profile_of(BY_NAME["gpt"])
    profile.save(tmp_path / name)
    assert ModelProfile.load(tmp_path / name) == profile
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_compressed_files_are_equal_for_equal_profiles(tmp_path: Path) -> None:
    profile = profile_of(BY_NAME["gpt"])
    for name in ("a.gz", "b.gz"):
        profile.save(tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()).startswith(b'{\n  "format": "memfit-profile"')


def test_loading_needs_no_torch(tmp_path: Path) -> None:
    profile_of(BY_NAME["one-op"]).save(tmp_path / "p.json")
    program = (
        "import sys, memfit; memfit.ModelProfile.load(sys.argv[1]); "
        "assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "p.json")], check=True)


def document(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "whole.json"
    profile_of(BY_NAME["gpt"]).save(path)
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize(
    ("place", "broken", "message"),
    [
        (("format",), "memfit-plan", r'"format" must be "memfit-profile"; got "memfit-plan"'),
        (("version",), 2, r"version 2 of memfit-profile is newer than this memfit.*upgrade memfit"),
        (("ops",), {}, r'"ops" must be a list'),
        (("peak_bytes",), -1, r"peak_bytes must be a whole number, at least 0"),
        (
            ("step_seconds",),
            "fast",
            r"step_seconds must be a number of seconds, at least 0 .*; got 'fast'",
        ),
        (("device",), 3, r"device must be a text; got 3"),
        (("ops", 3), 7, r"ops\[3\]: must be an object"),
        (("ops", 3, "colour"), 7, r'ops\[3\]: "colour" is unknown'),
        (("ops", 3, "outputs"), [10**6], r"ops\[3\]: outputs must be a whole number, at most \d+; got 1000000"),
        (("ops", 3, "inputs"), 1, r"ops\[3\]: inputs must be a list"),
        (("ops", 3, "phase"), "SIDEWAYS", r"ops\[3\]: phase must be one of FORWARD, BACKWARD, OPTIMIZER"),
        (("values", 5, "saves"), [[1, 2]], r"values\[5\]: saves must be lists of read_before"),
        (("values", 5, "op_index"), 10**6, r"values\[5\]: op_index must be a whole number"),
        (("values", 5, "storage"), 10**12, r"values\[5\]: storage must be a whole number, at most"),
        (("ops", 3, "outputs"), [], r"values\[\d+\]: op_index is 3, and the outputs of ops\[3\] do not have \d+"),
        (("ops", 3, "outputs"), [0], r"values\[\d+\]: op_index is 3, and the outputs of ops\[3\] do not have"),
        (("values", 0, "op_index"), 3, r"values\[0\]: op_index is 3, and the outputs of ops\[3\] do not have 0"),
        (("values", 5, "replays_exactly"), "no", r"values\[5\]: replays_exactly must be true or false"),
        (("link",), {}, r'link: "back_bytes_per_second".* is missing'),
        (
            ("link",),
            dict.fromkeys([field.name for field in fields(Link)], 0),
            r"link: out_bytes_per_second must be a number of bytes a second, from 1 to 1e\+15; got 0",
        ),
        (("blocks", 1, "layer_type"), "Conv", r"blocks\[1\]: layer_type must be one of Attention, FFN"),
        (("blocks", 1, "recompute_flops"), -3, r"blocks\[1\]: recompute_flops must be a whole number"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, place: tuple[str | int, ...], broken: object, message: str
) -> None:
    whole = document(tmp_path)
    at: Any = whole
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = broken
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(PlanFileError, match=message) as caught:
        ModelProfile.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_a_file_that_is_cut_off_says_so_wherever_it_is_cut(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    profile_of(BY_NAME["one-op"]).save(path)
    content = path.read_bytes().rstrip()
    for length in range(2, len(content), 17):
        path.write_bytes(content[:length])
        with pytest.raises(PlanFileError):
            ModelProfile.load(path)
    path.write_bytes(content[:-1])
    with pytest.raises(PlanFileError, match="cut off"):
        ModelProfile.load(path)


def test_a_missing_file_is_a_plan_file_error(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"no\.json: cannot be read: No such file"):
        ModelProfile.load(tmp_path / "no.json")


def test_an_op_that_lists_what_another_made_is_refused(tmp_path: Path) -> None:
    whole = document(tmp_path)
    outside = next(place for place, value in enumerate(whole["values"]) if "op_index" not in value)
    whole["ops"][3]["outputs"].append(outside)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(whole))
    told = rf"ops\[3\]: outputs has {outside}, and the op_index of values\[{outside}\] is null; it must be 3"
    with pytest.raises(PlanFileError, match=told):
        ModelProfile.load(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = profile_of(BY_NAME["one-op"])
    profile.save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not finite"):
        replace(profile, step_seconds=float("inf")).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]
