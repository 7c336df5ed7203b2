"""The Python code that does in a training script what a command did, complete enough to be run as it is printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

from memfit.cli.target import ENTRIES, parse_arguments


def python_code(
    target: str,
    arguments: Sequence[str],
    *,
    num_entries: int | None,
    budgets: Mapping[str, Any],
    plan_file: Path | None,
) -> str:
    """Return code that builds the TARGET and fits it, or where its plan was saved, applies that.

    ``num_entries`` is how many entries the tuple has that the TARGET's function returned; None where it was a dict.
    ``budgets`` are the other arguments of `memfit.fit`.
    """
    place, _, function = target.rpartition(":")
    if place.endswith(".py"):
        lines = _import_from_file(Path(place), function)
    else:
        lines = ["import memfit", f"from {place} import {function}"]
    call = f"{function}({', '.join(f'{name}={value!r}' for name, value in parse_arguments(arguments).items())})"
    lines.append("")
    if num_entries is None:
        lines.append(f"training_step = {call}  # model, batch, loss, ...")
        model = 'training_step["model"]'
        step = ["**training_step"]
    else:
        names = ENTRIES[:num_entries]
        lines.append(f"{', '.join(names)} = {call}")
        model = "model"
        step = [*names[:2], *(f"{name}={name}" for name in names[2:])]
    if plan_file is not None:
        lines.append(f"memfit.apply({model}, memfit.Plan.load({str(plan_file)!r}))")
    else:
        options = [f"{name}={value!r}" for name, value in budgets.items()]
        lines.append(f"fitted = memfit.fit({', '.join([*step, *options])})")
    return "\n".join(lines)


def _import_from_file(path: Path, function: str) -> list[str]:
    """Return code that imports ``function`` from the file at ``path``, whatever the file is called."""
    is_here = path.resolve().parent == Path.cwd()
    beside = [] if is_here else ["", f"sys.path.insert(0, {str(path.parent)!r})"]
    name = path.stem
    if name.isidentifier() and not iskeyword(name) and name not in {*sys.stdlib_module_names, *sys.modules}:
        return [*([] if is_here else ["import sys"]), *beside, "import memfit", f"from {name} import {function}"]
    # No import statement finds it.
    run = f"{function} = runpy.run_path({str(path)!r})[{function!r}]"
    return ["import runpy", "import sys", *beside, "", "import memfit", "", run]
