"""Bytes, shares and overheads as people write and read them: "20GiB", "6G", "90%", "+3.1%"."""

from __future__ import annotations

import re

from memfit.errors import InvalidParameterError

_BYTES_PER_UNIT: dict[str, int] = {"b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_WRITTEN_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_WRITTEN_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` names, rounded down: "20GiB", "1.5 GB", "6G" (as GB), "6Gi" (as GiB), "4096B"."""
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


def parse_share(text: str) -> float | None:
    """Return the share that a percentage names, 0.9 for "90%"; None where ``text`` is not a percentage."""
    match = _WRITTEN_SHARE.fullmatch(text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise InvalidParameterError(f"a percentage is above 0% and at most 100%; got {text!r}")
    return share


def format_overhead(overhead: float | None) -> str:
    """Return a share of the plain step with its sign: "+3.1%"."""
    return "unknown" if overhead is None else f"{100 * overhead:+.1f}%"


def format_rate(per_second: float) -> str:
    """Return a rate for a reader, without an exponent: "38,119" or "1.57"."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` for a reader, in ms or μs where they are short: "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} μs"


def budget_text(num_bytes: int) -> str:
    """Return a short budget of at least ``num_bytes``, as `parse_bytes` reads it: "1.3GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            tenths = -(-10 * num_bytes // size)
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{num_bytes}B"


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
