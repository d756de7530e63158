"""`neffbuild verify`: artifacts against their digests, a config against its artifacts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, trust
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from neffbuild.cache.store import Store
    from neffbuild.cache.tag import TagRef
    from neffbuild.cache.verify import Verified
    from neffbuild.config.build import CacheConfig
    from neffbuild.grid.coverage import Coverage

_SHOWN = 40
_log = logging.getLogger(__name__)


@click.command(name="verify")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG | URL")
@options.cache_option
@click.option("--tag", metavar="NAME:TAG", help="Of a URL, only what this tag names.")
@click.option(
    "--repair",
    is_flag=True,
    help="Of a URL, set damaged files aside, so that the next push writes them anew.",
)
@trust.reading_options()
@trust.min_sequence_option
@options.json_option
def command(
    words: tuple[str, ...],
    cache: Path | None,
    tag: str | None,
    repair: bool,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    min_sequence: int | None,
    as_json: bool,
) -> int:
    """Check every artifact's digest.

    With a CONFIG: that every state its decode steps can reach has a stored, undamaged unit in the local
    cache, and that what was adopted for it is undamaged; what is damaged is set aside, units for the next
    compile to build anew. With a URL: the store's tags,
    indexes, manifests, entries and every file they name; with --config or --key, signatures too.
    """
    of_url = {
        "--tag": tag,
        "--repair": repair,
        "--config": config_file,
        "--key": keys,
        "--require-signature": require_signature,
        "--min-sequence": min_sequence,
    }
    of_store = bool(words) and ("://" in words[0] or Path(words[0]).is_dir())
    if not of_store:
        options.require_config_or_store(words)
    if of_store:
        if tag is None and min_sequence is not None:
            raise ConfigError(
                "--min-sequence is of one tag", field="--min-sequence", hint="name it with --tag"
            )
        settings = trust.cache_settings(config_file, cache, keys, require_signature, min_sequence)
        ref = trust.tag_ref(tag, config_file, settings) if tag else None
        store, verified = _verify_store(words, settings, ref)
        document = _document(verified, None, {}, None)
        remedies = ["push again from where the artifacts were built"]
        if repair:
            _take_out_of_service(store, verified)
        elif verified.broken:
            remedies = [f"neffbuild verify {quote(words[0])} --repair, then {remedies[0]}"]
    elif misplaced := [name for name, value in of_url.items() if value not in (None, (), False)]:
        raise ConfigError(f"{misplaced[0]} goes with a URL, not with a config", field=misplaced[0])
    else:
        document = _verify_config(words, cache)
        remedies = _remedies(document, options.config_words(words, cache))
    if as_json:
        output.print_json(document)
    else:
        output.write(_text(document))
        if not document["ok"]:
            output.write("\n".join(f"next: {remedy}" for remedy in remedies))
    if any(problem["kind"] != "missing_unit" for problem in document["problems"]):
        return IntegrityError.exit_status
    return 0 if document["ok"] else 1


def _verify_store(
    words: tuple[str, ...], settings: CacheConfig, ref: TagRef | None
) -> tuple[Store, Verified]:
    from neffbuild.cache.contents import check_contents
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.records import seen_sequence
    from neffbuild.cache.verify import verify_store, verify_tag
    from neffbuild.config.build import cache_directory
    from neffbuild.toolchain.registry import file_checks

    if len(words) != 1:
        raise ConfigError(f"unexpected argument {words[1]!r} after the URL", value=words[1])
    believed = trust.trust_of(settings)
    store, local = open_store(words[0]), DirectoryStore(cache_directory(settings))
    if ref is None and not any(True for _ in store.list("")):
        raise StoreError(
            f"there is nothing in {store.url}", value=words[0], hint="is the URL that of a store?"
        )

    def last_seen(ref: TagRef) -> int:
        return seen_sequence(local, store.identity, ref.name, ref.tag)

    if ref is None:
        # The lowest sequence in a config is that of the tag it is served from, not of every tag.
        everything = replace(believed, min_sequence=0)
        verified = verify_store(store, everything, last_seen=last_seen)
    else:
        verified = verify_tag(store, ref, believed, last_seen=last_seen(ref))
    return store, check_contents(store, verified, file_checks())


def _remedies(document: Mapping[str, Any], config: str) -> list[str]:
    """What is to be done about units, and about what was adopted."""
    adopted = [one for one in document["problems"] if one["adopted"] is not None]
    remedies = []
    if len(adopted) < len(document["problems"]) or document["uncovered_states"]:
        remedies.append(f"neffbuild compile {config}")
    if adopted:
        remedies.append(
            "what was adopted: neffbuild import DIR --layout L --config CONFIG once more, or pull it again"
        )
    return remedies


def _verify_config(words: tuple[str, ...], cache: Path | None) -> dict[str, Any]:
    from neffbuild.cache.adopted import adopted_names
    from neffbuild.cache.contents import check_contents
    from neffbuild.cache.recipe import config_digest
    from neffbuild.cache.verify import verify_config
    from neffbuild.grid.coverage import plan_coverage
    from neffbuild.grid.ranks import shapes_on_every_rank
    from neffbuild.toolchain.planning import units_to_serve
    from neffbuild.toolchain.registry import file_checks, load_toolchain

    config = options.only_config(words, cache)
    store = options.local_store(config)
    bucketer, units = units_to_serve(config, load_toolchain(config.toolchain.name), store)
    digest = config_digest(config)
    adopted = {key: name for key, name in adopted_names(store, digest).items() if key not in units}
    verified = check_contents(
        store, verify_config(store, digest, [*units, *adopted]), file_checks()
    )
    _take_out_of_service(store, verified)
    shapes = {key: unit.shape for key, unit in units.items()}
    good = shapes_on_every_rank(
        shapes, shapes.keys() - {problem.key for problem in verified.problems}
    )
    names = {key: unit.bucket_name for key, unit in units.items()}
    return _document(verified, plan_coverage(bucketer, shapes.values(), good), names, adopted)


def _take_out_of_service(store: Store, verified: Verified) -> None:
    """A reader's test for a hit sees sizes only; a damaged artifact of the right size must be gone
    before the next compile looks."""
    from neffbuild.cache.verify import repair

    try:
        repair(store, verified)
    except StoreError as error:
        _log.warning(
            "damaged entries could not be quarantined", extra={"fields": {"cause": error.message}}
        )


def _document(
    verified: Verified,
    covered: Coverage | None,
    names: Mapping[str, str],
    adopted: Mapping[str, str] | None,
) -> dict[str, Any]:
    """The `neffbuild.verify/1` document; `names` are the bucket names of the config's keys, `adopted` those
    of what was adopted for it: None for a store, whose entries are all alike."""
    return {
        "schema": "neffbuild.verify/1",
        "ok": verified.ok and not (covered and covered.uncovered),
        "entries_checked": verified.entries_checked,
        "adopted_checked": None if adopted is None else len(adopted.keys() & verified.files.keys()),
        "blobs_checked": verified.blobs_checked,
        "states_checked": covered.states_checked if covered else 0,
        "uncovered_states": [one.document() for one in covered.uncovered] if covered else [],
        "prefill_gaps": [one.document() for one in covered.prefill_gaps] if covered else [],
        "problems": [
            {
                **problem.document(),
                "unit": names.get(problem.key),
                "adopted": (adopted or {}).get(problem.key),
            }
            for problem in verified.problems
        ],
    }


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"{one['kind']} {one['unit'] or one['adopted'] or one['key']}: {one['detail']}"
        for one in document["problems"]
    ]
    lines += [f"uncovered: {_state(one)}" for one in document["uncovered_states"]]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more (--json lists them)"]
    lines += [f"note: prefill is not covered: {one['reason']}" for one in document["prefill_gaps"]]
    adopted = f" ({count} adopted)" if (count := document["adopted_checked"]) else ""
    checked = (
        f"{document['entries_checked']} entries{adopted}, {document['blobs_checked']} blobs, "
        f"{document['states_checked']} states checked"
    )
    lines.append(f"{'ok' if document['ok'] else 'NOT ok'}: {checked}")
    return "\n".join(lines)


def _state(state: dict[str, Any]) -> str:
    rows, needs = (_interval(*state[name]) for name in ("num_seqs", "context_need"))
    return f"{state['family']} with {rows} sequences needing {needs} positions: {state['reason']}"


def _interval(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
