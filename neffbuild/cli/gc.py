"""`neffbuild gc`: remove from a store what is of no use any more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output
from neffbuild.config.errors import StoreError

if TYPE_CHECKING:
    from neffbuild.cache.gc import Collected

_SHOWN = 40


@click.command(name="gc")
@click.argument("url", metavar="DIR|URL")
@click.option(
    "--older-than", metavar="DURATION", help="What was not used for so long: 12h, 30d, 8w."
)
@click.option(
    "--max-size", metavar="SIZE", help="The least recently used, until the rest fits: 500MB, 20GiB."
)
@click.option("--untagged", is_flag=True, help="What no tag leads to.")
@click.option(
    "--keep-tag",
    "keep_tags",
    multiple=True,
    metavar="NAME:TAG",
    help="Keep this tag, repeatable; the other tags go, and what none of these leads to.",
)
@click.option(
    "--grace",
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="How old orphans, leftovers and what is untagged must be.",
)
@click.option("--delete", is_flag=True, help="Remove it. Without this nothing is changed.")
@options.json_option
def command(
    url: str,
    older_than: str | None,
    max_size: str | None,
    untagged: bool,
    keep_tags: tuple[str, ...],
    grace: str,
    delete: bool,
    as_json: bool,
) -> int:
    """Remove what is of no use from the store at URL: a cache directory or a remote store.

    Always: files that nothing names, unfinished writes and uploads. What else goes is said by the
    options. Nothing that a kept tag leads to is ever removed, nor what is being pushed. Shows what would
    go; only --delete removes it.
    """
    from neffbuild.cache.gc import collect
    from neffbuild.cache.gc_rules import Policy
    from neffbuild.cache.open import open_store
    from neffbuild.cache.tag import TagRef
    from neffbuild.config.duration import parse_duration
    from neffbuild.config.sizes import parse_size

    policy = Policy(
        older_than=(
            parse_duration(older_than, field="--older-than").total_seconds() if older_than else None
        ),
        max_size=parse_size(max_size, field="--max-size") if max_size else None,
        untagged=untagged,
        keep_tags=frozenset(str(TagRef.parse(tag)) for tag in keep_tags) if keep_tags else None,
        grace=parse_duration(grace, field="--grace").total_seconds(),
    )
    store = open_store(url)
    if not any(True for _ in store.list("")) and not any(True for _ in store.list_blobs()):
        raise StoreError(
            f"there is nothing in {store.url}", value=url, hint="is the URL that of a store?"
        )
    collected = collect(store, policy, delete=delete)
    if as_json:
        output.print_json(gc_document(store.url, collected))
    else:
        output.write(_text(store.url, collected))
    return 0


def gc_document(url: str, collected: Collected) -> dict[str, Any]:
    """The `neffbuild.gc/1` document."""
    decision = collected.decision
    return {
        "schema": "neffbuild.gc/1",
        "url": url,
        "deleted": collected.deleted,
        "bytes_freed": decision.bytes_freed,
        "bytes_kept": decision.bytes_kept,
        "entries_kept": decision.entries_kept,
        "blobs_kept": decision.blobs_kept,
        "bytes_over_max_size": decision.over_size,
        "removed": [
            *(
                {"kind": one.kind, "name": one.name, "size": one.size, "reason": one.reason}
                for one in decision.removals
            ),
            *(
                {"kind": one.kind, "name": one.name, "size": one.size, "reason": "left over"}
                for one in decision.leftovers
            ),
        ],
    }


def _text(url: str, collected: Collected) -> str:
    from neffbuild.report.text import columns, size

    document = gc_document(url, collected)
    removed = document["removed"]
    rows = [(one["kind"], one["name"], size(one["size"]), one["reason"]) for one in removed]
    lines = [columns(("kind", "name", "size", "why"), rows[:_SHOWN])] if rows else []
    if len(rows) > _SHOWN:
        lines.append(f"… and {len(rows) - _SHOWN} more (--json lists them)")
    kinds = Counter(one["kind"] for one in removed)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    verb = "removed from" if collected.deleted else "would be removed from"
    lines.append(f"{verb} {url}: {counted} ({size(document['bytes_freed'])})")
    lines.append(
        f"kept: {document['entries_kept']} entries, {document['blobs_kept']} blobs "
        f"({size(document['bytes_kept'])})"
    )
    if over := document["bytes_over_max_size"]:
        lines.append(f"{size(over)} above --max-size cannot be freed: tags or pushes need them")
    if removed and not collected.deleted:
        lines.append("nothing was changed; add --delete to remove it")
    return "\n".join(lines)
