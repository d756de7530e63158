"""`neffbuild diff CONFIG --engine-log FILE | --engine-cache DIR`: what an engine compiles, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffbuild.cli import options

if TYPE_CHECKING:
    from neffbuild.config.build import BuildConfig
    from neffbuild.grid.conformance import Conformance, Expected
    from neffbuild.grid.shapes import Shape

_SHOWN = 40
_NAMED = 8
_SIGNS = {"missing": "-", "extra": "+", "other_width": "~", "setting": "~", "failed": "!"}
_UNREAD = "?"


def compare_with_engine(
    words: tuple[str, ...], cache: Path | None, log: Path | None, entries: Path | None
) -> tuple[dict[str, Any], str]:
    """The `neffbuild.diff/1` document of a config and what an engine says or left, and its text."""
    from neffbuild.cache.engine_cache import empty_rank_folders, engine_entries
    from neffbuild.config.log_lines import read_lines
    from neffbuild.grid.engine_entries import compare_entries
    from neffbuild.grid.engine_log import read_engine_log
    from neffbuild.grid.engine_options import lone_replicas
    from neffbuild.grid.engine_programs import compare_log

    expected, config = _expected(words, cache)
    engine: dict[str, str | int]
    if log is not None:
        said = read_engine_log(read_lines(log), lone_replicas(expected.serve))
        conformance = compare_log(expected, said)
        engine = {"source": "log", "path": str(log), "starts": said.starts}
    else:
        assert entries is not None
        conformance = compare_entries(
            expected, engine_entries(entries), empty_rank_folders(entries)
        )
        engine = {"source": "cache", "path": str(entries)}
    document = _document(expected, config, engine, conformance)
    return document, _text(document, conformance)


def _expected(words: tuple[str, ...], cache: Path | None) -> tuple[Expected, BuildConfig]:
    from neffbuild.grid.conformance import Expected
    from neffbuild.grid.expand import Need
    from neffbuild.toolchain.planning import plan_with
    from neffbuild.toolchain.registry import load_toolchain

    config = options.only_config(words, cache)
    # What is stored of the plan is no matter here.
    plan = plan_with(config, load_toolchain(config.toolchain.name), lambda keys: {})
    left_out = {one.shape: one.reason or "" for one in plan.units if one.need is Need.CANNOT_OCCUR}
    shapes = frozenset(one.shape for one in plan.units if one.shape not in left_out)
    versions = plan.identity.versions
    return Expected(config.serve, plan.bucketer, shapes, left_out, versions), config


def _document(
    expected: Expected,
    config: BuildConfig,
    engine: Mapping[str, str | int],
    conformance: Conformance,
) -> dict[str, Any]:
    return {
        "schema": "neffbuild.diff/1",
        "config": config.source,
        "engine": dict(engine),
        "different": bool(conformance.differences),
        "counts": conformance.counts,
        "differences": [
            {
                "kind": one.kind,
                "name": one.name,
                "detail": one.detail,
                "plan": _shape_document(expected, one.plan),
                "engine": _shape_document(expected, one.engine),
            }
            for one in conformance.differences
        ],
        "not_covered": list(conformance.not_covered),
        "unread": [{"name": name, "reason": reason} for name, reason in conformance.unread.items()],
        "notes": list(conformance.notes),
    }


def _shape_document(expected: Expected, shape: Shape | None) -> dict[str, Any] | None:
    from neffbuild.grid.shapes import DecodeShape

    if shape is None:
        return None
    document = {"bucket_name": shape.bucket_name, **shape.document()}
    del document["kind"]
    if isinstance(shape, DecodeShape):
        document["block_table_width"] = expected.bucketer.block_table_width(shape)
    return document


def _text(document: Mapping[str, Any], conformance: Conformance) -> str:
    from neffbuild.report.text import counted

    lines = [f"{_SIGNS[one.kind]} {one.name}  {one.detail}" for one in conformance.differences]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more (--json lists them)"]
    unread = [f"{_UNREAD} {name}  {reason}" for name, reason in conformance.unread.items()]
    if len(unread) > _NAMED:
        unread[_NAMED:] = [f"… and {len(unread) - _NAMED} more that are unread (--json lists them)"]
    lines += unread
    if unread:
        lines.append(
            "note: what the engine compiles is known in part: of what is unread it cannot be told whether it "
            "is planned"
        )
    if left_out := conformance.not_covered:
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        names = ", ".join(left_out[:_NAMED])
        lines.append(
            f"note: compiled by the engine, of a phase that the plan leaves out: {names}{more}"
        )
    lines += [f"note: {note}" for note in conformance.notes]
    counts = document["counts"]
    found = [
        f"{counts['missing']} missing" if counts["missing"] else "",
        f"{counts['extra']} extra" if counts["extra"] else "",
        f"{counts['other_width']} of other width" if counts["other_width"] else "",
        counted(counts["setting"], "other setting") if counts["setting"] else "",
        f"{counts['failed']} failed" if counts["failed"] else "",
        f"{counts['unread']} unread" if counts["unread"] else "",
    ]
    engine = document["engine"]
    lines.append(
        f"{document['config']} and the engine's {engine['source']} {engine['path']}: "
        f"{counted(counts['matching'], 'program')} as planned, "
        + (", ".join(filter(None, found)) or "no difference")
    )
    return "\n".join(lines)
