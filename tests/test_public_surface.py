"""The public names: what ``__all__`` promises, type checkers see and users get is one list; importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

HEAVY = ("torch", "numpy", "scipy", "rich", "typer")


def names_for_type_checkers() -> dict[str, str]:
    """Return name -> module of the imports under ``if TYPE_CHECKING`` in ``memfit/__init__.py``."""
    tree = ast.parse(Path(memfit.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def modules_after(statement: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter holds after ``statement``."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_type_checkers_see_exactly_the_promised_names() -> None:
    assert {"__version__", *names_for_type_checkers()} == set(memfit.__all__)


def test_no_name_is_promised_twice() -> None:
    assert len(set(memfit.__all__)) == len(memfit.__all__)


@pytest.mark.parametrize("name", memfit.__all__)
def test_every_promised_name_resolves_to_what_type_checkers_see(name: str) -> None:
    value = getattr(memfit, name)
    if name != "__version__":
        home = sys.modules[names_for_type_checkers()[name]]
        assert value is getattr(home, name)
        assert value.__module__ == home.__name__
    assert name in dir(memfit)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'memfit' has no attribute 'unknown'"):
        memfit.unknown  # noqa: B018  # reading the attribute is the test


def test_importing_memfit_loads_nothing_heavy() -> None:
    assert modules_after("import memfit").isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "statement",
    [
        "import memfit; memfit.build_checkpoint_plan([], memfit.Budget(1))",
        "import memfit.layers.layer_files, memfit.layers.examples",
        "import memfit.report.layer_table",
    ],
)
def test_the_layer_grain_works_without_torch(statement: str) -> None:
    assert "torch" not in modules_after(statement)


def test_only_budget_needs_numpy() -> None:
    loaded = modules_after("import memfit; memfit.build_checkpoint_plan([], memfit.Full())")
    assert loaded.isdisjoint(HEAVY)


def test_the_command_line_starts_without_torch_and_numpy() -> None:
    assert modules_after("import memfit.cli.main").isdisjoint({"torch", "numpy", "scipy"})
