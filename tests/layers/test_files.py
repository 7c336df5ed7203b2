"""Files of layers and plans: what is written comes back, and every broken file is told by its place."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.drawn_layers import layer_lists

from memfit import (
    Budget,
    Full,
    InvalidParameterError,
    LayerMemoryProfile,
    LayerTypeHint,
    PlanFileError,
    build_checkpoint_plan,
    documents,
)
from memfit.documents import check_writable
from memfit.layers.examples import gpt_layers
from memfit.layers.layer_files import (
    layers_from_document,
    load_layer_plan,
    load_layers,
    plan_document,
    save_layer_plan,
    save_layers,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "layers.json"
LAYER = {"layer_idx": 0, "layer_type": "FFN", "activation_size_bytes": 8, "recompute_flops": 9}


def layers_text(*entries: object, **changes: object) -> str:
    return json.dumps({"format": "memfit-layers", "version": 1, "layers": list(entries), **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "layers.json"


@settings(max_examples=50)
@given(layers=layer_lists(), names=st.lists(st.none() | st.text(st.characters(codec="utf-8")), min_size=12))
def test_layers_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, layers: list[LayerMemoryProfile], names: list[str | None]
) -> None:
    named = tuple(replace(layer, name=name) for layer, name in zip(layers, names, strict=False))
    folder = tmp_path_factory.getbasetemp() / "drawn-layers"
    folder.mkdir(exist_ok=True)
    path = folder / "layers.json"
    save_layers(named, path)
    assert load_layers(path) == named
    assert [entry.name for entry in path.parent.iterdir()] == ["layers.json"]


@given(layer_lists(min_size=1))
@settings(max_examples=50)
def test_plans_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, layers: list[LayerMemoryProfile]
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn-layer-plan.json"
    minimum_bytes = max(layer.activation_size_bytes for layer in layers)
    plan = build_checkpoint_plan(layers, Budget.from_bytes(minimum_bytes))
    save_layer_plan(plan, path, strategy="budget")
    assert load_layer_plan(path) == plan
    assert json.loads(path.read_text()) == plan_document(plan, strategy="budget")


def test_the_example_is_the_built_in_list() -> None:
    assert load_layers(EXAMPLE) == gpt_layers()


def test_a_byte_order_mark_does_no_harm(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + layers_text(LAYER).encode())
    assert load_layers(file) == (LayerMemoryProfile(0, LayerTypeHint.FFN, 8, 9),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"line 1, column 1: not JSON.* cut off"),
        (layers_text(LAYER)[:-10], r"line 1, column \d+: not JSON.* cut off"),
        ('{\n  "format": memfit\n}', r"line 2, column 13: not JSON"),
        ("[1, 2]", r"must hold a JSON object with a format and a version; got \[1, 2\]"),
        ("{}", r'"format" must be "memfit-layers"; got None'),
        ('{"format": "memfit-plan", "version": 1}', r'"format" must be "memfit-layers"; got "memfit-plan"'),
        (layers_text(version=2), r"version 2 of memfit-layers is newer .* reads up to version 1; upgrade memfit"),
        (layers_text(version="1"), r'"version" must be a whole number from 1 to 1; got \'1\''),
        (layers_text(version=True), r'"version" must be .* got True'),
        (layers_text(version=0), r'"version" must be .* got 0'),
        (layers_text(layers={"0": LAYER}), r'"layers" must be a list of layers'),
        (layers_text(comment="x"), r'"comment" is unknown; allowed are "format", "layers", "version"'),
        ('{"format": "memfit-layers", "version": 1}', r'"layers" is missing'),
        (layers_text(LAYER, 5), r"layers\[1\]: must be an object .* got 5"),
        (layers_text({**LAYER, "flops": 3}), r'layers\[0\]: "flops" is unknown'),
        (layers_text({"layer_idx": 0}), r'layers\[0\]: "activation_size_bytes", .* is missing'),
        (
            layers_text({**LAYER, "layer_type": "Conv"}),
            r"layers\[0\]: layer_type must be one of Attention, FFN.*\'Conv\'",
        ),
        (layers_text({**LAYER, "layer_type": None}), r"layer_type must be one of .* got None"),
        (layers_text({**LAYER, "activation_size_bytes": -1}), r"layers\[0\]: activation_size_bytes must be .* got -1"),
        (layers_text({**LAYER, "recompute_flops": 1.5}), r"layers\[0\]: recompute_flops must be .* got 1\.5"),
        (layers_text({**LAYER, "recompute_flops": 2**64}), r"recompute_flops must be .* at most 18446744073709551615"),
        (layers_text({**LAYER, "layer_idx": "0"}), r"layers\[0\]: layer_idx must be .* got '0'"),
        (layers_text({**LAYER, "name": 7}), r"layers\[0\]: name must be a text"),
        (
            layers_text(LAYER, {**LAYER, "layer_idx": 1}, LAYER),
            r"layer_idx 0 is given twice, in layers\[0\] and layers\[2\]",
        ),
        ('{"format": "memfit-layers", "format": "memfit-layers"}', r"'format' \(str\) is given twice"),
        (layers_text({**LAYER, "recompute_flops": float("nan")}), r"NaN is not a number that JSON allows"),
        ('{"version": ' + "9" * 5000 + "}", r"digits"),
        ("[" * 100_000, r"nested too deep"),
        (b'{\n"format": "\xff"}', r"line 2: byte 13 is not UTF-8"),
    ],
)
def test_a_broken_file_is_told_by_its_place(file: Path, content: str | bytes, message: str) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanFileError, match=message) as refused:
        load_layers(file)
    assert str(refused.value).startswith(str(file))


def test_a_missing_file_a_folder_and_a_name_that_is_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"missing\.json: cannot be read: No such file"):
        load_layers(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match=r"cannot be read: Is a directory"):
        load_layers(tmp_path)
    with pytest.raises(PlanFileError, match=r"cannot be read"):
        load_layers(None)  # type: ignore[arg-type]
    with pytest.raises(PlanFileError, match=r"cannot be read: embedded null"):
        load_layers("a\0b")


def test_a_huge_file_is_refused_unread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LARGEST_DOCUMENT_BYTES", 100)
    file.write_text(layers_text() + " " * 100)
    with pytest.raises(PlanFileError, match="larger than 100 bytes"):
        load_layers(file)


def test_what_cannot_be_written_is_told_and_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot be written: No such file"):
        save_layers([], tmp_path / "missing" / "layers.json")
    target = tmp_path / "layers.json"
    target.write_text("old")
    with pytest.raises(InvalidParameterError):
        save_layers([None], target)  # type: ignore[list-item]
    with pytest.raises(PlanFileError, match="cannot be written"):
        save_layers([LayerMemoryProfile(0, LayerTypeHint.FFN, 1, 1, name="\ud800")], target)
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["layers.json"]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    target, link, chained = tmp_path / "files" / "layers.json", tmp_path / "link.json", tmp_path / "chained.json"
    link.symlink_to("files/layers.json")
    chained.symlink_to("link.json")
    for layers in ((), gpt_layers()):
        # At first it points to nothing.
        save_layers(layers, chained)
        assert (link.is_symlink(), chained.is_symlink(), target.is_symlink()) == (True, True, False)
        assert load_layers(target) == load_layers(chained) == layers
    assert [entry.name for entry in target.parent.iterdir()] == ["layers.json"]


def test_a_link_that_leads_nowhere_is_told_and_stays(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to("loop.json")
    with pytest.raises(PlanFileError, match=r"loop\.json: cannot be written: "):
        save_layers([], loop)
    assert loop.is_symlink()


@pytest.mark.parametrize("name", ["pipe.json", "link.json"])
def test_a_pipe_is_written_into_and_stays(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    (tmp_path / "link.json").symlink_to("pipe.json")
    # Opened for both ways, it is there to be written into, and holds what is.
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        check_writable(tmp_path / name)
        save_layers([], tmp_path / name)
        assert json.loads(os.read(reader, 1000)) == {"format": "memfit-layers", "version": 1, "layers": []}
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "pipe.json"]


def test_whether_a_path_can_be_written_is_told_without_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    check_writable(file)
    assert list(tmp_path.iterdir()) == []
    file.write_text("old")
    check_writable(file)
    assert file.read_text() == "old"
    with pytest.raises(PlanFileError, match=r"missing/layers\.json: cannot be written: No such file"):
        check_writable(tmp_path / "missing" / "layers.json")
    for write in (check_writable, lambda path: save_layers([], path)):
        with pytest.raises(PlanFileError, match="cannot be written: Is a directory"):
            write(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
nearly_layers = st.fixed_dictionaries(
    {"format": st.just("memfit-layers"), "version": st.just(1) | json_values},
    optional={
        "layers": json_values
        | st.lists(
            st.fixed_dictionaries(
                {
                    "layer_idx": st.integers(0, 3) | json_values,
                    "layer_type": st.sampled_from(["FFN", "Norm"]) | json_values,
                    "activation_size_bytes": st.integers(0, 9) | json_values,
                    "recompute_flops": st.integers(0, 9) | json_values,
                },
                optional={"name": json_values},
            ),
            max_size=3,
        )
    },
)
nearly_plans = st.fixed_dictionaries(
    {
        **{
            key: st.just(value) | json_values for key, value in plan_document(build_checkpoint_plan([], Full())).items()
        },
        "format": st.just("memfit-layer-plan"),
        "version": st.just(1),
    }
)


@given(document=json_values | nearly_layers)
def test_any_document_gives_layers_or_a_plan_file_error(document: object) -> None:
    if isinstance(document, dict):
        with contextlib.suppress(PlanFileError):
            for layer in layers_from_document(document, "drawn.json"):
                assert isinstance(layer, LayerMemoryProfile)


@settings(max_examples=200)
@given(
    content=st.binary(max_size=40) | st.one_of(json_values, nearly_layers, nearly_plans).map(json.dumps).map(str.encode)
)
def test_any_bytes_give_layers_or_a_plan_or_a_plan_file_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.json"
    path.write_bytes(content)
    for load in (load_layers, load_layer_plan):
        with contextlib.suppress(PlanFileError):
            load(path)
