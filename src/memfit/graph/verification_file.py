"""Files of verifications: one JSON object. Infinite errors, which JSON has no number for, are the text "infinite"."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from typing import Any

from memfit.documents import contents_of, read_document
from memfit.graph.records import Records
from memfit.graph.verification import GradientError, Verification

VERIFICATION_FORMAT = "memfit-verification"
VERIFICATION_VERSION = 1

_INFINITE = "infinite"
# Written for readers and other tools; read back, they follow from the rest.
_EXTRAS = ("within_budget", "holds")


def verification_document(verification: Verification) -> dict[str, Any]:
    """Return ``verification`` as the JSON object that files and ``--json`` carry."""
    document: dict[str, Any] = {"format": VERIFICATION_FORMAT, "version": VERIFICATION_VERSION}
    document |= {name: getattr(verification, name) for name in _EXTRAS}
    return document | {name: _written(value) for name, value in asdict(verification).items()}


def load_verification(path: str | os.PathLike[str]) -> Verification:
    """Return the verification in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    return verification_from_document(read_document(path), path)


def verification_from_document(document: dict[str, Any], path: str | os.PathLike[str]) -> Verification:
    """Return the verification of a document already read; ``path`` is for messages."""
    contents = contents_of(document, path, VERIFICATION_FORMAT, VERIFICATION_VERSION)
    records = Records()
    read_error = records.reader_of(GradientError)
    records.readers[GradientError] = lambda value, name: math.inf if value == _INFINITE else read_error(value, name)
    fields = {name: entry for name, entry in contents.items() if name not in _EXTRAS}
    verification: Verification = records.reader_of(Verification)(fields, f"{path}")
    return verification


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return _INFINITE if value == math.inf else value
