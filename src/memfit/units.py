"""Bytes as people write them: "20GiB", "900MB". Nothing here knows what the bytes are for."""

from __future__ import annotations

import re

from memfit.errors import InvalidParameterError

_BYTES_PER_UNIT = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WRITTEN_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` names, rounded down: "20GiB", "1.5 GB", "4096B"."""
    match = _WRITTEN_SIZE.fullmatch(text)
    unit = match and _BYTES_PER_UNIT.get(match[2].lower())
    if match is None or unit is None:
        raise InvalidParameterError(
            f"{text!r} is not a size; write a number and a unit, one of B, kB, MB, GB, TB (powers of 1000) "
            'or KiB, MiB, GiB, TiB (powers of 1024), such as "20GiB" or "900MB"'
        )
    whole, _, fraction = match[1].partition(".")
    # Integer arithmetic: float("20.1") * 2**30 would already be off by a few bytes.
    shift: int = 10 ** len(fraction)
    return int(whole + fraction) * unit // shift


def format_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` for a reader: exact below 1 KiB, else three or four digits in binary units."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}" if abs(size) >= 10 else f"{size:.2f} {unit}"
