"""`neffbuild diff`: what differs between two tags of a store, unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, trust

if TYPE_CHECKING:
    from neffbuild.cache.compare import Change, PlatformDifference, UnitDifference, UnitVersion

_MARKS: dict[Change, str] = {"added": "+", "removed": "-", "changed": "~"}


@click.command(name="diff")
@click.argument("url")
@click.option("--from", "from_", required=True, metavar="NAME:TAG|D", help="A tag or a digest.")
@click.option("--to", required=True, metavar="NAME:TAG|D", help="A tag or a digest.")
@click.option("--check", is_flag=True, help="Exit with status 1 when units differ.")
@trust.reading_options()
@options.cache_option
@options.json_option
def command(
    url: str,
    from_: str,
    to: str,
    check: bool,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Which units were added, removed or changed between two tags of the store at URL, per platform.

    A unit has changed when its key or its artifact has. Exits 0 whatever differs, unless --check.
    """
    from neffbuild.cache.compare import compare
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.release import read_release
    from neffbuild.config.build import cache_directory

    settings = trust.cache_settings(config_file, cache, keys, require_signature)
    # A tag to compare with may well be older than the one that is served.
    believed = replace(trust.trust_of(settings), min_sequence=0)
    remote, local = open_store(url), DirectoryStore(cache_directory(settings))
    before, after = (
        read_release(remote, local, trust.tag_or_digest(name, config_file, settings), believed)
        for name in (from_, to)
    )
    platforms = compare(before, after)
    counts = Counter(one.change for platform in platforms for one in platform.units)
    unchanged = sum(platform.unchanged for platform in platforms)
    different = counts.total() > 0
    if as_json:
        output.print_json(
            {
                "schema": "neffbuild.diff/1",
                "url": url,
                "from": {"name": from_, "index": before.index.digest},
                "to": {"name": to, "index": after.index.digest},
                "different": different,
                "counts": {
                    **{change: counts[change] for change in _MARKS},
                    "unchanged": unchanged,
                },
                "platforms": [_document(platform) for platform in platforms],
            }
        )
    else:
        lines = [line for platform in platforms for line in _lines(platform)]
        total = ", ".join(f"{counts[change]} {change}" for change in _MARKS)
        output.write("\n".join([*lines, f"{from_} → {to}: {total}, {unchanged} unchanged"]))
    return 1 if check and different else 0


def _document(platform: PlatformDifference) -> dict[str, Any]:
    return {
        "platform": dict(platform.platform),
        "from": platform.before,
        "to": platform.after,
        "unchanged": platform.unchanged,
        "units": [
            {
                "bucket_name": one.unit.bucket_name,
                "family": one.unit.shape.family.value,
                "rank_scope": one.unit.rank_scope,
                "change": one.change,
                "from": _version(one.before),
                "to": _version(one.after),
                "ingredients": list(one.ingredients),
            }
            for one in platform.units
        ],
    }


def _version(version: UnitVersion | None) -> dict[str, str | None] | None:
    return {"key": version.key, "artifact": version.artifact} if version else None


def _lines(platform: PlatformDifference) -> Iterator[str]:
    from neffbuild.cache.index import platform_text

    where = " (new)" if platform.before is None else " (gone)" if platform.after is None else ""
    yield platform_text(platform.platform) + where
    for one in platform.units:
        yield f"  {_MARKS[one.change]} {one.unit.bucket_name}  {_why(one)}".rstrip()


def _why(one: UnitDifference) -> str:
    if one.before is None or one.after is None:
        return ""
    if one.before.artifact is None:
        return "was not stored"
    if one.after.artifact is None:
        return "is not stored"
    return ", ".join(one.ingredients) or "same recipe, other artifact"
