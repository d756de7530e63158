"""What to do about a tag that is refused, in the words of the command line."""

from __future__ import annotations

from datetime import datetime

UNSIGNED = (
    "push or promote it again with --key; where only trusted machines can write to the store, "
    "`cache.require_signature: false` takes what is unsigned"
)
WRONG_KEY = (
    "if the signer is to be trusted, name its public key in `cache.keys` or with the option for keys; "
    "otherwise find out who wrote the tag, and push or promote it again with a trusted key"
)
NO_KEY = "name the public keys to believe in `cache.keys` or with the option for keys"
UNREADABLE = (
    "to write over it and keep the platforms of an index pushed before: `neffbuild promote URL --from "
    "DIGEST --to NAME:TAG`; or remove the document by hand and push every platform again (from a "
    "machine that has not seen the tag, with a `cache.min_sequence` above what others have seen)"
)
SEEN = (
    "find out who serves an older tag again; to go back on purpose, `neffbuild promote` the older "
    "index: its sequence rises; a tag that was lost is started above it with `cache.min_sequence` in "
    "the config of who pushes"
)
REQUIRED = (
    "push or promote what is wanted, which raises the sequence; or lower `cache.min_sequence` "
    "(`--min-sequence`) if the older tag is meant"
)


def expired(instant: datetime) -> str:
    """`instant` is when it expired, UTC."""
    return (
        "renew it: push again, or `neffbuild promote` its index digest, with a later --expires; if "
        f"this machine's clock is wrong, set it (the tag was good until {instant:%Y-%m-%dT%H:%M:%SZ})"
    )
