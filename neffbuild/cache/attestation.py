"""Signed provenance: an in-toto statement of what a manifest and the artifacts it names are.

The subjects are the manifest's digest and that of every artifact file, so whoever trusts the key knows
which bytes were built for which unit, by whichever tag, index or digest the manifest was found. The
statement follows from the manifest alone: who vouches for the same manifest signs the same bytes, and
the signatures stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neffbuild.cache.canonical import canonical_json, parse_json, require_digest
from neffbuild.cache.catalog import manifest_name
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.manifest import Manifest
from neffbuild.cache.problem import Problem, ProblemKind
from neffbuild.cache.store import Document, Store
from neffbuild.cache.tag import Trust
from neffbuild.cache.tag_moving import Signer
from neffbuild.config.errors import IntegrityError, StoreError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:neffbuild:provenance:1"
_ATTEMPTS = 20


def attestation_name(manifest: str) -> str:
    """The name of the document that holds the provenance of a manifest, by the manifest's digest."""
    return f"attestations/{require_digest(manifest)}.json"


def statement(digest: str, manifest: Manifest) -> bytes:
    """The in-toto statement of a manifest with this digest."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": _subjects(digest, manifest),
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "config": manifest.config,
                "platform": dict(manifest.platform),
                "missing": [unit.bucket_name for unit in manifest.missing],
            },
        }
    )


def attestation_problem(
    digest: str, manifest: Manifest, data: bytes | None, trust: Trust
) -> Problem | None:
    """What is wrong with the provenance of a manifest as served, or None. `data` is None where there
    is none."""
    if data is None and not trust.require_signature:
        return None
    if data is None:
        return Problem(
            ProblemKind.BAD_SIGNATURE,
            digest,
            "its provenance is not signed, and a signature is required",
        )
    try:
        envelope = Envelope.from_json(data)
        fault = trust.fault(envelope)
        if fault is not None:
            return Problem(ProblemKind.BAD_SIGNATURE, digest, f"its provenance: {fault}")
        document = _parsed(envelope)
    except IntegrityError as error:
        return Problem(ProblemKind.BAD_ENTRY, digest, f"its provenance: {error.message}")
    if document["subject"] != _subjects(digest, manifest):
        return Problem(ProblemKind.BAD_ENTRY, digest, "its provenance is that of other artifacts")
    return None


def read_attestation(store: Store, digest: str, trust: Trust) -> bytes | None:
    """The provenance of a manifest, asked for only where it can matter."""
    if trust.check is None and not trust.require_signature:
        return None
    document = store.read(attestation_name(digest))
    return None if document is None else document.data


def require_attestation(store: Store, digest: str, manifest: Manifest, trust: Trust) -> None:
    """Raise `IntegrityError` unless the manifest's provenance is as good as `trust` asks for."""
    data = read_attestation(store, digest, trust)
    problem = attestation_problem(digest, manifest, data, trust)
    if problem is not None:
        raise IntegrityError(
            f"manifest {digest} of {store.url}: {problem.detail}",
            value=digest,
            hint="push it again with a key that is trusted here, or find out who wrote it",
        )


def write_attestation(store: Store, digest: str, manifest: Manifest, sign: Signer) -> None:
    """Sign the provenance of a manifest. Signatures of others over the same statement are kept."""
    unsigned = Envelope(PAYLOAD_TYPE, statement(digest, manifest))
    ours = sign(unsigned.signed_bytes)
    name = attestation_name(digest)
    for _ in range(_ATTEMPTS):
        current = store.read(name)
        others = _other_signatures(current, unsigned, ours)
        data = unsigned.with_signatures([*others, *ours]).to_json()
        if current is None:
            if store.create(name, data):
                return
        elif store.replace(name, data, current.version):
            return
    raise StoreError(f"{name} in {store.url} kept changing while it was written", value=name)


def _other_signatures(
    current: Document | None, unsigned: Envelope, ours: Sequence[Signature]
) -> list[Signature]:
    if current is None:
        return []
    try:
        envelope = Envelope.from_json(current.data)
    except IntegrityError:
        return []
    if envelope.signed_bytes != unsigned.signed_bytes:
        return []
    mine = {one.keyid for one in ours}
    return [one for one in envelope.signatures if one.keyid not in mine]


def _subjects(digest: str, manifest: Manifest) -> list[dict[str, Any]]:
    digests = {manifest_name(digest): digest}
    for key, entry in manifest.entries.items():
        for name, record in entry.files.items():
            digests[f"{key}/{name}"] = record.digest
    return [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)]


def _parsed(envelope: Envelope) -> dict[str, Any]:
    """The statement in an envelope. Raises `IntegrityError` when it is not one of ours."""
    if envelope.payload_type != PAYLOAD_TYPE:
        raise IntegrityError(
            f"envelope holds a {envelope.payload_type!r}, not an in-toto statement"
        )
    document = parse_json(envelope.payload, "in-toto statement")
    if not isinstance(document, dict) or "subject" not in document:
        raise IntegrityError("in-toto statement has no subject")
    stated = (document.get("_type"), document.get("predicateType"))
    if stated != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise IntegrityError(f"in-toto statement has the types {stated!r:.200}")
    return document
