"""`neffbuild diff`: what differs between two tags of a store, or between a plan and an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, trust
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.compare import (
        AdoptedDifference,
        Change,
        PlatformDifference,
        UnitDifference,
        UnitVersion,
    )
    from neffbuild.config.build import CacheConfig

_MARKS: dict[Change, str] = {"added": "+", "removed": "-", "changed": "~"}


@click.command(name="diff")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="URL | CONFIG")
@click.option("--from", "from_", metavar="NAME:TAG|D", help="Of a URL, a tag or a digest.")
@click.option("--to", metavar="NAME:TAG|D", help="Of a URL, a tag or a digest.")
@click.option("--check", is_flag=True, help="Of a URL: exit with status 1 when it differs.")
@click.option(
    "--engine-log",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Of a CONFIG, the log of an engine that was started with it (-: standard input).",
)
@click.option(
    "--engine-cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Of a CONFIG, what such an engine left in its own compile cache.",
)
@trust.reading_options()
@options.cache_option
@options.json_option
def command(
    words: tuple[str, ...],
    from_: str | None,
    to: str | None,
    check: bool,
    engine_log: Path | None,
    engine_cache: Path | None,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    cache: Path | None,
    as_json: bool,
) -> int:
    """What differs between two tags of the store at URL, or between CONFIG's plan and an engine.

    \b
    neffbuild diff URL --from prod:1 --to prod:2
    neffbuild diff config.yaml --engine-log serve.log

    Of a URL, per platform: which units were added, removed or changed, and which entries that were adopted
    from an engine's own cache. One has changed when its key or its artifact has. Exits 0 whatever differs,
    unless --check.

    Of a CONFIG: which programs the engine compiles that are not planned, which planned ones it does not,
    and which have another width. Exits 1 when something differs, or an entry of the engine's cache cannot
    be read.
    """
    if engine_log is not None or engine_cache is not None:
        of_store = {
            "--from": from_,
            "--to": to,
            "--check": check,
            "--config": config_file,
            "--key": keys,
            "--require-signature": require_signature,
        }
        for option in (name for name, value in of_store.items() if value):
            raise ConfigError(
                f"{option} is of two tags of a store, not of a config and an engine", field=option
            )
        if engine_log is not None and engine_cache is not None:
            raise ConfigError(
                "--engine-log and --engine-cache exclude each other", field="--engine-cache"
            )
        return _engine_difference(words, cache, engine_log, engine_cache, as_json)
    if len(words) != 1 or from_ is None or to is None:
        raise _incomplete(words, from_)
    settings = trust.cache_settings(config_file, cache, keys, require_signature)
    return _release_difference(words[0], from_, to, settings, config_file, check, as_json)


def _incomplete(words: tuple[str, ...], from_: str | None) -> ConfigError:
    hint = "see `neffbuild diff --help`"
    if not words:
        return ConfigError("neither a URL nor a config was given", hint=hint)
    if len(words) > 1:
        return ConfigError(f"unexpected argument {words[1]!r} after the URL", value=words[1])
    lacking = "--from" if from_ is None else "--to"
    return ConfigError(
        f"{lacking} is missing: two tags of a store are compared, or with --engine-log or --engine-cache "
        "a config and an engine",
        field=lacking,
        hint=hint,
    )


def _engine_difference(
    words: tuple[str, ...],
    cache: Path | None,
    log: Path | None,
    entries: Path | None,
    as_json: bool,
) -> int:
    from neffbuild.cli.engine_diff import compare_with_engine

    document, text = compare_with_engine(words, cache, log, entries)
    if as_json:
        output.print_json(document)
    else:
        output.write(text)
    # What is known in part is not called equal.
    return 1 if document["different"] or document["unread"] else 0


def _release_difference(
    url: str,
    from_: str,
    to: str,
    settings: CacheConfig,
    config_file: Path | None,
    check: bool,
    as_json: bool,
) -> int:
    from neffbuild.cache.compare import compare
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.release import read_release
    from neffbuild.config.build import cache_directory

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
    adopted = Counter(one.change for platform in platforms for one in platform.adopted)
    adopted_unchanged = sum(platform.adopted_unchanged for platform in platforms)
    different = counts.total() + adopted.total() > 0
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
                    "adopted": {
                        **{change: adopted[change] for change in _MARKS},
                        "unchanged": adopted_unchanged,
                    },
                },
                "platforms": [_document(platform) for platform in platforms],
            }
        )
    else:
        lines = [line for platform in platforms for line in _lines(platform)]
        total = _total(counts, unchanged)
        if adopted.total() + adopted_unchanged:
            total += f"; adopted: {_total(adopted, adopted_unchanged)}"
        output.write("\n".join([*lines, f"{from_} → {to}: {total}"]))
    return 1 if check and different else 0


def _total(counts: Counter[Change], unchanged: int) -> str:
    return ", ".join(
        [*(f"{counts[change]} {change}" for change in _MARKS), f"{unchanged} unchanged"]
    )


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
        "adopted_unchanged": platform.adopted_unchanged,
        "adopted": [
            {
                "name": one.name,
                "change": one.change,
                "from": _version(one.before),
                "to": _version(one.after),
                "ingredients": list(one.ingredients),
            }
            for one in platform.adopted
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
    for entry in platform.adopted:
        yield f"  {_MARKS[entry.change]} {entry.name} (adopted)  {_why(entry)}".rstrip()


def _why(one: UnitDifference | AdoptedDifference) -> str:
    if one.before is None or one.after is None:
        return ""
    if one.before.artifact is None:
        return "was not stored"
    if one.after.artifact is None:
        return "is not stored"
    return ", ".join(one.ingredients) or "same recipe, other artifact"
