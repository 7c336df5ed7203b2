"""The layout of the package: unique names, folders of at most 15 files, a README for every sub-package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import memfit

PACKAGE = Path(memfit.__file__).parent
MOST_FILES = 15
# Each integration has its callback under the same name.
NAMES_OF_SEVERAL_CLASSES = {"MemfitCallback"}
# The names of the contract that exist today; names of later releases are added with their features.
PUBLIC_NAMES = {
    # layer grain
    "LayerTypeHint",
    "LayerMemoryProfile",
    "NoCheckpointing",
    "Full",
    "Selective",
    "AttentionOnly",
    "FfnOnly",
    "EveryNthLayer",
    "LargestLayers",
    "Budget",
    "SqrtLayers",
    "build_checkpoint_plan",
    "CheckpointPlan",
    "estimate_memory_with_plan",
    "estimate_total_recompute_flops",
    "activation_stats",
    "ActivationStats",
    "CheckpointConfig",
    "ActivationCheckpointer",
    # value grain
    "profile",
    "remove",
    "plan",
    "apply",
    "verify",
    "frontier",
    "fit",
    "tune",
    "Tuned",
    "TunedSize",
    "linear_cross_entropy",
    "ModelProfile",
    "Plan",
    "Decision",
    "FrontierPoint",
    "Applied",
    "Fitted",
    "Verification",
    # errors
    "MemfitError",
    "InvalidParameterError",
    "EmptyProfilesError",
    "LayerIndexError",
    "CheckpointMissingError",
    "CheckpointCapacityError",
    "InfeasibleBudgetError",
    "PlanFileError",
    "StaleValueError",
    "VerificationError",
    "__version__",
}


def sub_packages() -> list[Path]:
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_no_two_modules_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem != "__init__":
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert repeated(places) == {}


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in NAMES_OF_SEVERAL_CLASSES:
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert repeated(places) == {}


def test_no_folder_has_more_than_15_python_files() -> None:
    sizes = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in [PACKAGE, *sub_packages()]}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_every_sub_package_has_a_readme() -> None:
    folders = [folder for folder in sub_packages() if not (folder / "README.md").is_file()]
    assert [str(folder.relative_to(PACKAGE)) for folder in folders] == []


def test_readmes_name_only_modules_that_exist() -> None:
    for folder in sub_packages():
        readme = folder / "README.md"
        words = readme.read_text(encoding="utf-8").split("`") if readme.is_file() else []
        named = [word for word in words[1::2] if word.endswith(".py") and "/" not in word and "*" not in word]
        assert [name for name in named if not (folder / name).is_file()] == [], readme


def test_the_public_names_are_those_of_the_contract() -> None:
    assert set(memfit.__all__) == PUBLIC_NAMES
