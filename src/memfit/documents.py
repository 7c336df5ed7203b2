"""JSON documents with a format and a version: read with the place of each mistake, written whole or not at all.

What a document means is up to the module of its format; see ``memfit.graph`` and ``memfit.layers.layer_files``. A path
that ends in ``.gz`` is written compressed; what is compressed is read so, whatever it is called.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import PlanFileError
from memfit.validation import shown

LARGEST_DOCUMENT_BYTES = 2**28
"""Files past this size are refused unread: a list of a million layers stays below it."""


_GZIP_MAGIC = b"\x1f\x8b"


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in the file at ``path``, which must carry a ``format`` and a ``version``."""
    text = _read_text(path)
    try:
        document = json.loads(text, object_pairs_hook=_distinct_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        is_cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut_off = "; the file ends too early: it may be cut off" if is_cut_off else ""
        raise PlanFileError(
            f"{path}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}{cut_off}"
        ) from None
    except RecursionError:
        raise PlanFileError(f"{path}: brackets are nested too deep for a file of memfit") from None
    except ValueError as error:
        raise PlanFileError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise PlanFileError(f"{path}: must hold a JSON object with a format and a version; got {shown(document)}")
    return document


def kind_of(document: dict[str, Any], path: str | os.PathLike[str], allowed: Collection[str]) -> str:
    """Return the format of ``document``, which must be one of those ``allowed``."""
    kind = document.get("format")
    if not isinstance(kind, str) or kind not in allowed:
        raise PlanFileError(f'{path}: "format" must be one of {", ".join(allowed)}; got {shown(kind)}')
    return kind


def contents_of(document: dict[str, Any], path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Return what ``document`` has besides its format, which must be ``kind``, and its version, at most ``version``."""
    found_kind = document.get("format")
    if found_kind != kind:
        raise PlanFileError(f'{path}: "format" must be "{kind}"; got {_shown_kind(found_kind)}')
    found = document.get("version")
    if type(found) is not int or found < 1:
        raise PlanFileError(f'{path}: "version" must be a whole number from 1 to {version}; got {shown(found)}')
    if found > version:
        raise PlanFileError(
            f"{path}: version {found} of {kind} is newer than this memfit, which reads up to version {version}; "
            "upgrade memfit or save the file with an older one"
        )
    return {name: entry for name, entry in document.items() if name not in ("format", "version")}


def _shown_kind(kind: object) -> str:
    return f'"{kind}"' if isinstance(kind, str) and kind.startswith("memfit-") else shown(kind)


def check_fields(
    entry: object, place: str, *, required: frozenset[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return ``entry`` if it is an object with all the ``required`` fields and none that is unknown."""
    if not isinstance(entry, dict):
        raise PlanFileError(f"{place}: must be an object with {_listed(required)}; got {shown(entry)}")
    if missing := required - entry.keys():
        raise PlanFileError(f"{place}: {_listed(missing)} is missing")
    if unknown := entry.keys() - required - optional:
        raise PlanFileError(f"{place}: {_listed(unknown)} is unknown; allowed are {_listed(required | optional)}")
    return entry


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` atomically: readers see the old file or the new one, never a part.

    A link stays a link: what it points to is replaced. What is there and no file, such as a pipe, is written into.
    """
    with _as_plan_file_errors(path):
        content = text.encode()
        if Path(path).suffix == ".gz":
            # Without a time of writing inside, equal documents make equal files.
            content = gzip.compress(content, mtime=0)
        if _is_no_file(path):
            Path(path).write_bytes(content)
            return
        with _part_beside(path) as (part, target):
            part.write_bytes(content)
            part.replace(target)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise as ``write_text`` would where ``path`` cannot be written, for callers with long work ahead."""
    with _as_plan_file_errors(path):
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not _is_no_file(path):
            with _part_beside(path) as (part, _):
                part.touch()


def _is_no_file(path: str | os.PathLike[str]) -> bool:
    # The path is not resolved: /dev/stdout leads to a pipe that has no path of its own.
    return Path(path).exists() and not Path(path).is_file()


@contextmanager
def _part_beside(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """Give a path to write to first and the final one, with links followed; what remains at the first is deleted."""
    target = Path(path).resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part, target
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _as_plan_file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    # A loop of links is a RuntimeError up to Python 3.12.
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise PlanFileError(f"{path}: cannot be written: {_reason(error)}") from None


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_DOCUMENT_BYTES + 1)
    except (OSError, ValueError, TypeError) as error:
        raise PlanFileError(f"{path}: cannot be read: {_reason(error)}") from None
    if content.startswith(_GZIP_MAGIC):
        content = _decompressed(content, path)
    if len(content) > LARGEST_DOCUMENT_BYTES:
        raise PlanFileError(f"{path}: larger than {LARGEST_DOCUMENT_BYTES} bytes, the most memfit reads from a file")
    try:
        # Some editors put a byte-order mark in front; it does no harm.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanFileError(f"{path}: line {line}: byte {error.start} is not UTF-8 text") from None


def _decompressed(content: bytes, path: str | os.PathLike[str]) -> bytes:
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = stream.decompress(content, LARGEST_DOCUMENT_BYTES + 1)
    except zlib.error as error:
        raise PlanFileError(f"{path}: cannot be decompressed: {error}") from None
    if not stream.eof and len(text) <= LARGEST_DOCUMENT_BYTES:
        raise PlanFileError(f"{path}: the compressed file ends too early: it may be cut off")
    return text


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the field {shown(repeated)} is given twice in one object")
    return entry


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows; numbers here are whole and finite")


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f'"{name[:60]}"' for name in sorted(names)[:10])


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
