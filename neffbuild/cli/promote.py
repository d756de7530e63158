"""`neffbuild promote`: make a tag name what another tag, or a digest, leads to."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffbuild.cli import options, output, trust

if TYPE_CHECKING:
    from neffbuild.cache.promote import Promoted
    from neffbuild.cache.signing import SigningKey


@click.command(name="promote")
@click.argument("url")
@click.option("--from", "from_", required=True, metavar="NAME:TAG|D", help="A tag or a digest.")
@click.option("--to", required=True, metavar="NAME:TAG", help="The tag to move.")
@click.option("--allow-partial", is_flag=True, help="Promote even if units are missing.")
@trust.signing_options
@trust.reading_options("--trusted-key")
@trust.min_sequence_option
@options.cache_option
@options.json_option
def command(
    url: str,
    from_: str,
    to: str,
    allow_partial: bool,
    key: str | None,
    public_key: Path | None,
    expires: str | None,
    config_file: Path | None,
    keys: tuple[str, ...],
    require_signature: bool,
    min_sequence: int | None,
    cache: Path | None,
    as_json: bool,
) -> int:
    """Make the tag --to name exactly what --from leads to, after checking that it is all there.

    To roll back, promote an older tag, or the digest of an older index: the sequence rises all the
    same. With --key the new tag is signed, and what --from names must be signed by a key that is
    believed (or be named by its digest).
    """
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.cache.open import open_store
    from neffbuild.cache.promote import promote
    from neffbuild.config.build import cache_directory

    settings = trust.cache_settings(config_file, cache, keys, require_signature, min_sequence)
    signing = trust.signing_key(key, public_key, settings)
    promoted = promote(
        open_store(url),
        DirectoryStore(cache_directory(settings)),
        trust.tag_or_digest(from_, config_file, settings),
        trust.tag_ref(to, config_file, settings),
        trust=trust.trust_of(settings, signing),
        sign=signing.sign if signing else None,
        expires=trust.expiry(expires),
        allow_partial=allow_partial,
    )
    document = _document(url, from_, promoted, signing)
    if as_json:
        output.print_json(document)
    else:
        output.write(_text(document, key))
    return 0


def _document(
    url: str, from_: str, promoted: Promoted, signing: SigningKey | None
) -> dict[str, Any]:
    statement = promoted.statement
    return {
        "schema": "neffbuild.promote/1",
        "url": url,
        "from": from_,
        "name": statement.ref.name,
        "tag": statement.ref.tag,
        "index": statement.index,
        "previous_index": promoted.previous.index if promoted.previous else None,
        "sequence": statement.sequence,
        "expires": statement.document()["expires"],
        "signed_by": signing.keyid if signing else None,
        "manifests": [
            {
                "platform": dict(one.platform),
                "manifest": one.manifest,
                "units": len(promoted.release.manifests[one.manifest].entries),
            }
            for one in promoted.release.index.manifests
        ],
    }


def _text(document: dict[str, Any], key: str | None) -> str:
    from neffbuild.cache.index import platform_text

    to = f"{document['name']}:{document['tag']}"
    lines = [f"promoted {document['from']} to {to}, sequence {document['sequence']}"]
    lines += [
        f"  {platform_text(one['platform'])}: {one['units']} units" for one in document["manifests"]
    ]
    lines.append(f"index {document['index']}")
    if document["signed_by"]:
        lines.append(f"signed by {document['signed_by']}")
    if document["expires"]:
        lines.append(f"expires {document['expires']}")
    if document["previous_index"] not in (None, document["index"]):
        back = ["neffbuild", "promote", document["url"], "--from", document["previous_index"]]
        back += ["--to", to, *(["--key", key] if key else [])]
        lines.append(f"back with: {shlex.join(back)}")
    return "\n".join(lines)
