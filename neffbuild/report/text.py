"""The report as aligned text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neffbuild.report.rows import UnitRow

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under a header, each column as wide as its widest cell."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def size(count: int | None) -> str:
    """Bytes in the unit that keeps the number short; a dash for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def counted(number: int, what: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def counted_are(number: int, what: str) -> str:
    """`1 unit is`, `2 units are`."""
    return f"{counted(number, what)} {'is' if number == 1 else 'are'}"


def seconds(value: float | None) -> str:
    """`12.3 s`, `4 min 05 s`, `1 h 02 min`; a dash for None."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def report_text(rows: Sequence[UnitRow]) -> str:
    """The whole report: one line per unit and the totals."""
    table = columns(
        ("unit", "outcome", "compile", "peak memory", "artifact", ""),
        (
            (
                row.bucket_name,
                row.outcome,
                seconds(row.compile_seconds),
                size(row.peak_memory_bytes),
                size(row.artifact_bytes),
                row.cause or "",
            )
            for row in rows
        ),
    )
    compile_seconds = sum(row.compile_seconds or 0.0 for row in rows)
    artifact_bytes = sum(row.artifact_bytes or 0 for row in rows)
    peak = max((row.peak_memory_bytes or 0 for row in rows), default=0)
    return (
        f"{table}\n\n{counted(len(rows), 'unit')}: {seconds(compile_seconds)} of compile time, "
        f"{size(artifact_bytes)} of artifacts, highest peak memory {size(peak)}"
    )
