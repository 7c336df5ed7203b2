"""TARGETs: functions of the user that return a model and a batch, found by name and called.

Errors in them are shown as the user's own: the place in their file, without memfit's frames.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.cli.user_errors import users_own_errors
from memfit.errors import InvalidParameterError
from memfit.validation import shown

if TYPE_CHECKING:
    from torch import nn

_FORMS = "package.module:function or path/file.py:function, such as memfit.models:gpt"


ENTRIES = ("model", "batch", "loss", "optimizer")
"""The longest tuple that a TARGET's function may return."""

_NAMES = (*ENTRIES, "targets", "step", "gradients", "batches")


class Target(NamedTuple):
    """What a TARGET's function returned: the model, the step arguments of `profile`, and ``batches`` for `fit`.

    ``num_entries`` is how many entries it returned as a tuple; None where it returned a dict.
    """

    model: nn.Module
    step_arguments: dict[str, Any]
    batches: Any
    num_entries: int | None


def load_target(text: str, arguments: Sequence[str] = ()) -> Target:
    """Return what the function that ``text`` names gives for ``arguments``, each written ``name=value``."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise InvalidParameterError(f"{text!r} is not a valid TARGET; write {_FORMS}")
    keywords = parse_arguments(arguments)
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_named(place)
    function = _function_of(module, name, text)
    _check_arguments(function, name, keywords)
    with users_own_errors(f"while {name}() of {place} ran"):
        result = function(**keywords)
    return _checked(result, text)


def source_files(text: str) -> list[Path]:
    """Return the files that the TARGET ``text`` may be imported from. Nothing is imported."""
    place = text.rpartition(":")[0]
    if place.endswith(".py"):
        return [Path(place)]
    parts = place.split(".")
    folders = [Path.cwd(), *map(Path, sys.path)]
    names = ("/".join([*parts[:-1], parts[-1] + ".py"]), "/".join([*parts, "__init__.py"]))
    return [path for folder in folders for name in names if (path := folder / name).is_file()]


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values by name: numbers, True, None and the like as Python writes them, anything else as text."""
    keywords: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidParameterError(f"--arg is name=value, such as --arg layers=12; got {argument!r}")
        if name in keywords:
            raise InvalidParameterError(f"--arg {name} is given twice")
        try:
            keywords[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            keywords[name] = text
    return keywords


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidParameterError(f"{path}: there is no such file; TARGET is {_FORMS}")
    # As when Python runs the file: what lies beside it can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"memfit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidParameterError(f"{path}: cannot be imported as a Python file; TARGET is {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look a class's module up there.
    sys.modules[name] = module
    with users_own_errors(f"while {path} was imported"):
        spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    # As with `python -m`: modules in the current folder are found.
    sys.path.insert(0, str(Path.cwd()))
    with users_own_errors(f"while {name} was imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                raise InvalidParameterError(
                    f"there is no module {error.name!r}, here or among the installed packages; TARGET is {_FORMS}"
                ) from None
            raise
        except (TypeError, ValueError):
            # Names such as "..models" or "".
            raise InvalidParameterError(f"{name!r} is not a module name; TARGET is {_FORMS}") from None


def _function_of(module: ModuleType, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # callable() does not say what it returns
    if function is not None:
        raise InvalidParameterError(f"{text}: {name!r} is a {type(function).__name__}, not a function")
    functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    near = difflib.get_close_matches(name, functions, n=3) or sorted(functions)[:6]
    there = f"; there is {', '.join(near)}" if near else ""
    raise InvalidParameterError(f"{text}: the module has no function {name!r}{there}")


def _check_arguments(function: Callable[..., Any], name: str, keywords: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "no arguments"
        raise InvalidParameterError(f"{name}() cannot be called with these --arg: {error}; it takes {takes}") from None


def _checked(result: Any, text: str) -> Target:
    from torch import nn

    from memfit.capture.step_arguments import StepArguments

    target = _target_of(result, text)
    if not isinstance(target.model, nn.Module):
        raise InvalidParameterError(
            f"{text} must return a torch.nn.Module first, as in (model, batch); got {shown(target.model)}"
        )
    # The step arguments are checked here as well, so that what is wrong with them names the TARGET.
    try:
        if target.batches is None:
            StepArguments(**target.step_arguments)
    except InvalidParameterError as error:
        form = ". Where there are targets, return a dict: {'model': model, 'batch': batch, 'targets': targets, ...}"
        hint = form if target.step_arguments.get("targets") is None and "targets" in str(error) else ""
        raise InvalidParameterError(f"{text}: {error}{hint}") from None
    return target


def _target_of(result: Any, text: str) -> Target:
    if isinstance(result, tuple) and 2 <= len(result) <= len(ENTRIES):
        num_entries, given = len(result), dict(zip(ENTRIES, result, strict=False))
    elif isinstance(result, dict) and "model" in result and result.keys() <= set(_NAMES):
        num_entries, given = None, {"batch": None, **result}
    else:
        entries = f" of {len(result)}" if isinstance(result, tuple) else ""
        if isinstance(result, dict):
            unknown = sorted(str(name) for name in result.keys() - set(_NAMES))
            entries = f" with {', '.join(unknown)}" if unknown else " without 'model'"
        raise InvalidParameterError(
            f"{text} must return (model, batch), (model, batch, loss), (model, batch, loss, optimizer) or a dict with "
            f"'model' and any of {', '.join(_NAMES[1:])}; got {shown(result)}{entries}"
        )
    return Target(given.pop("model"), given, given.pop("batches", None), num_entries)
