"""The signed in-toto statement beside a manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from cache_samples import ANYONE, in_children
from trust_samples import PROD, Place, Signing, envelope_of, swapped

from neffbuild.cache.attestation import (
    PAYLOAD_TYPE,
    attestation_name,
    attestation_problem,
    statement,
    write_attestation,
)
from neffbuild.cache.envelope import Envelope
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.tag import Trust
from neffbuild.cache.verify import verify_store
from neffbuild.config.errors import IntegrityError


def test_it_names_the_manifest_and_every_artifact_file(place: Place, release: Signing) -> None:
    manifest = place.manifest()
    pushed = place.push(manifest, PROD, release)
    envelope = envelope_of(place.path(attestation_name(pushed.manifest)))
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert release.trust.fault(envelope) is None
    document = json.loads(envelope.payload)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {one["name"]: one["digest"]["sha256"] for one in document["subject"]}
    expected = {f"manifests/{pushed.manifest}.json": pushed.manifest}
    for key, entry in manifest.entries.items():
        for name, record in entry.files.items():
            expected[f"{key}/{name}"] = record.digest
    assert subjects == expected
    assert document["predicate"] == {
        "config": manifest.config,
        "platform": manifest.platform,
        "missing": [],
    }


def test_a_partial_manifest_says_what_it_lacks(place: Place) -> None:
    manifest = place.manifest(lacking=1)
    document = json.loads(statement(manifest.digest, manifest))
    assert document["predicate"]["missing"] == ["decode_b3_ctx4096"]


def test_without_a_key_there_is_none(place: Place) -> None:
    pushed = place.push(place.manifest(), PROD)
    assert not place.path(attestation_name(pushed.manifest)).exists()
    assert place.pull(pushed.manifest, ANYONE).digest == pushed.manifest


def test_it_is_written_before_anything_leads_to_the_manifest(
    place: Place, release: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    create = type(place.remote).create

    def record(self: Any, name: str, data: bytes) -> bool:
        written.append(name.partition("/")[0])
        return create(self, name, data)

    monkeypatch.setattr(type(place.remote), "create", record)
    place.push(place.manifest(), PROD, release)
    order = ["manifests", "attestations", "indexes", "tags"]
    assert [kind for kind in written if kind in order] == order


def test_a_pull_by_digest_is_checked_by_it(place: Place, release: Signing) -> None:
    pushed = place.push(place.manifest(), None, release)
    for digest in (pushed.index, pushed.manifest):
        assert place.pull(digest, release.trust).digest == pushed.manifest
    place.path(attestation_name(pushed.manifest)).unlink()
    for digest in (pushed.index, pushed.manifest):
        with pytest.raises(IntegrityError, match="provenance is not signed"):
            place.pull(digest, release.trust)


def test_keys_that_are_not_required_still_refuse_the_wrong_one(
    place: Place, release: Signing, stranger: Signing
) -> None:
    lenient = Trust(check=release.trust.check)
    unsigned = place.push(place.manifest(), None)
    assert place.pull(unsigned.manifest, lenient).digest == unsigned.manifest
    place.push(place.manifest(), None, stranger)
    with pytest.raises(IntegrityError, match=stranger.key.keyid):
        place.pull(unsigned.manifest, lenient)


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"payload": "e30="}'])
def test_damaged_provenance_is_found_by_who_has_no_key(
    place: Place, release: Signing, damaged: bytes
) -> None:
    pushed = place.push(place.manifest(), None, release)
    assert verify_store(place.remote, Trust()).ok
    place.path(attestation_name(pushed.manifest)).write_bytes(damaged)
    [problem] = verify_store(place.remote, Trust()).problems
    assert (problem.kind, problem.key) == (ProblemKind.BAD_ENTRY, pushed.manifest)
    assert "its provenance" in problem.detail


def test_keys_sign_side_by_side(place: Place, release: Signing, stranger: Signing) -> None:
    manifest = place.manifest()
    pushed = place.push(manifest, None, release)
    path = place.path(attestation_name(pushed.manifest))
    before = path.read_bytes()
    place.push(manifest, None, stranger)
    for one in (release, stranger):
        assert place.pull(pushed.manifest, one.trust).digest == pushed.manifest
    place.push(manifest, None, release)
    assert len(envelope_of(path).signatures) == 2
    path.write_bytes(before)
    # What is not a signature over the same statement is not kept.
    for junk in (b"{", Envelope(PAYLOAD_TYPE, b"{}", envelope_of(path).signatures).to_json()):
        path.write_bytes(junk)
        place.push(manifest, None, stranger)
        assert [one.keyid for one in envelope_of(path).signatures] == [stranger.key.keyid]


def test_keys_that_sign_at_once_are_all_kept(
    place: Place, release: Signing, stranger: Signing
) -> None:
    manifest = place.manifest()

    def sign(number: int) -> int:
        key = (release, stranger)[number].key
        for _ in range(10):
            write_attestation(place.remote, manifest.digest, manifest, key.sign)
        return 0

    assert in_children(2, sign) == [0, 0]
    signatures = envelope_of(place.path(attestation_name(manifest.digest))).signatures
    assert {one.keyid for one in signatures} == {release.key.keyid, stranger.key.keyid}


class TestSignedButWrong:
    """The believed key signed it, but it is not a statement of this manifest."""

    def problem(self, place: Place, release: Signing, **changes: Any) -> ProblemKind:
        manifest = place.manifest()
        document = {**json.loads(statement(manifest.digest, manifest)), **changes}
        kind = document.pop("payload type", PAYLOAD_TYPE)
        document = {name: value for name, value in document.items() if value is not ...}
        unsigned = Envelope(kind, json.dumps(document).encode())
        envelope = unsigned.with_signatures(release.key.sign(unsigned.signed_bytes))
        found = attestation_problem(manifest.digest, manifest, envelope.to_json(), release.trust)
        assert found is not None
        return found.kind

    @pytest.mark.parametrize(
        "changes",
        [
            {"subject": []},
            {"subject": None},
            {"subject": ...},
            {"_type": "https://in-toto.io/Statement/v2"},
            {"_type": ...},
            {"predicateType": "https://slsa.dev/provenance/v1"},
            {"payload type": "application/vnd.neffbuild.tag+json"},
        ],
    )
    def test_other_statements(
        self, place: Place, release: Signing, changes: dict[str, Any]
    ) -> None:
        assert self.problem(place, release, **changes) is ProblemKind.BAD_ENTRY

    @pytest.mark.parametrize("drop", [0, -1])
    def test_one_subject_too_few(self, place: Place, release: Signing, drop: int) -> None:
        manifest = place.manifest()
        subjects = json.loads(statement(manifest.digest, manifest))["subject"]
        del subjects[drop]
        assert self.problem(place, release, subject=subjects) is ProblemKind.BAD_ENTRY

    def test_subjects_exchanged(self, place: Place, release: Signing) -> None:
        other = swapped(place.manifest())
        subjects = json.loads(statement(place.manifest().digest, other))["subject"]
        assert self.problem(place, release, subject=subjects) is ProblemKind.BAD_ENTRY

    def test_statements_of_later_releases_may_say_more(
        self, place: Place, release: Signing
    ) -> None:
        manifest = place.manifest()
        document = json.loads(statement(manifest.digest, manifest))
        document["predicate"]["more"] = 1
        unsigned = Envelope(PAYLOAD_TYPE, json.dumps(document).encode())
        envelope = unsigned.with_signatures(release.key.sign(unsigned.signed_bytes))
        assert (
            attestation_problem(manifest.digest, manifest, envelope.to_json(), release.trust)
            is None
        )

    def test_another_manifest_with_the_same_artifacts(self, place: Place, release: Signing) -> None:
        """Which shape has which key is only in the manifest: its own digest is a subject too."""
        manifest = place.manifest()
        first, second = manifest.units
        units = (replace(first, key=second.key), replace(second, key=first.key))
        crossed = replace(manifest, units=units)
        data = Envelope(PAYLOAD_TYPE, statement(manifest.digest, manifest))
        signed = data.with_signatures(release.key.sign(data.signed_bytes)).to_json()
        found = attestation_problem(crossed.digest, crossed, signed, release.trust)
        assert found is not None
        assert found.kind is ProblemKind.BAD_ENTRY
