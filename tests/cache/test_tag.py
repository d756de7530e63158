from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cache_samples import ANYONE, X86_V3, X86_V4, in_children
from hypothesis import given, settings
from hypothesis import strategies as st

from neffbuild.cache.catalog import read_index
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.gc import collect
from neffbuild.cache.gc_rules import Policy
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.tag import PAYLOAD_TYPE, TagRef, TagStatement, Trust, resolve_tag, tag_problem
from neffbuild.cache.tag_moving import check_movable, point_tag, replace_tag
from neffbuild.config.errors import ConfigError, IntegrityError, StoreError

PROD = TagRef("llama", "prod")
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def sign(data: bytes) -> Sequence[Signature]:
    """A stand-in for a real signer: what matters here is which bytes are signed and checked."""
    return [Signature("test", b"signed:" + data)]


def check(envelope: Envelope) -> str | None:
    good = any(one.sig == b"signed:" + envelope.signed_bytes for one in envelope.signatures)
    return None if good else "no signature by a known key"


SIGNED = Trust(require_signature=True, check=check)


def move(store: DirectoryStore, number: int = 1, **options: Any) -> TagStatement:
    trust = options.pop("trust", ANYONE)
    return point_tag(store, PROD, X86_V3, f"{number:064x}", trust, **options)


def tag_path(store: DirectoryStore, ref: TagRef = PROD) -> Path:
    return store.root / "v1" / ref.document_name


class TestNames:
    def test_parsing(self) -> None:
        assert TagRef.parse("llama:prod") == PROD
        assert TagRef.parse("prod", default_name="llama") == PROD
        assert str(PROD) == "llama:prod"
        assert PROD.document_name == "tags/llama/prod.json"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            ":",
            "a:",
            ":b",
            "prod",
            "a/b:c",
            "../x:y",
            "a:..",
            "a:.x",
            "a:b c",
            "a:b\n",
            "ä:b",
            "a" * 129 + ":b",
        ],
    )
    def test_what_is_no_tag_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            TagRef.parse(text)
        assert caught.value.field == "tag"

    @given(st.text(), st.text())
    def test_any_accepted_name_is_a_document_name(self, name: str, tag: str) -> None:
        try:
            ref = TagRef(name, tag)
        except ConfigError:
            return
        assert DirectoryStore(Path("/nowhere")).read(ref.document_name) is None


class TestEnvelope:
    def test_signed_bytes_are_those_of_the_dsse_specification(self) -> None:
        envelope = Envelope("http://example.com/HelloWorld", b"hello world")
        expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        assert envelope.signed_bytes == expected

    def test_round_trip_in_the_specified_form(self) -> None:
        envelope = Envelope(PAYLOAD_TYPE, b"\x00payload", (Signature("k", b"s"),))
        document = json.loads(envelope.to_json())
        assert document == {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(b"\x00payload").decode(),
            "signatures": [{"keyid": "k", "sig": "cw=="}],
        }
        assert Envelope.from_json(envelope.to_json()) == envelope

    @pytest.mark.parametrize(
        "document",
        [
            None,
            [],
            {},
            {"payload": "", "payloadType": ""},
            {"payload": "", "payloadType": 1, "signatures": []},
            {"payload": "!", "payloadType": "t", "signatures": []},
            {"payload": "a", "payloadType": "t", "signatures": []},
            {"payload": "", "payloadType": "t", "signatures": {}},
            {"payload": "", "payloadType": "t", "signatures": [1]},
            {"payload": "", "payloadType": "t", "signatures": [{"keyid": "k"}]},
            {"payload": "", "payloadType": "t", "signatures": [{"keyid": 1, "sig": ""}]},
        ],
    )
    def test_malformed_is_refused(self, document: Any) -> None:
        with pytest.raises(IntegrityError):
            Envelope.from_json(json.dumps(document).encode())

    @given(st.binary(max_size=200))
    @settings(deadline=None)
    def test_junk_is_refused(self, junk: bytes) -> None:
        with pytest.raises(IntegrityError):
            Envelope.from_json(junk)


class TestMoving:
    def test_sequence_rises_with_every_write(self, store: DirectoryStore) -> None:
        sequences = [move(store, number).sequence for number in (1, 2, 1)]
        assert sequences == [1, 2, 3]
        statement = resolve_tag(store, PROD, ANYONE)
        index = read_index(store, statement.index)
        assert index is not None
        assert index.manifest_for(X86_V3) == f"{1:064x}"

    def test_sequence_starts_above_what_was_seen_or_is_required(
        self, store: DirectoryStore
    ) -> None:
        assert move(store, trust=Trust(min_sequence=7)).sequence == 7
        tag_path(store).unlink()
        assert move(store, last_seen=9).sequence == 10

    def test_other_platforms_are_kept(self, store: DirectoryStore) -> None:
        move(store)
        statement = point_tag(store, PROD, X86_V4, "4" * 64, ANYONE)
        index = read_index(store, statement.index)
        assert index is not None
        assert index.manifest_for(X86_V3) == f"{1:064x}"
        assert index.manifest_for(X86_V4) == "4" * 64

    def test_many_platforms_written_at_once_all_end_in_the_index(
        self, store: DirectoryStore
    ) -> None:
        def write(number: int) -> int:
            platform = {**X86_V3, "target": f"level{number}"}
            point_tag(store, PROD, platform, f"{number:064x}", ANYONE)
            return 0

        assert in_children(12, write) == [0] * 12
        statement = resolve_tag(store, PROD, ANYONE)
        index = read_index(store, statement.index)
        assert index is not None
        assert len(index.manifests) == 12
        assert statement.sequence == 12

    def test_writer_that_is_overtaken_merges_again(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = DirectoryStore.create

        def overtaken(self: DirectoryStore, name: str, data: bytes) -> bool:
            if name == PROD.document_name:
                monkeypatch.undo()
                point_tag(store, PROD, X86_V4, "4" * 64, ANYONE)
            return create(self, name, data)

        monkeypatch.setattr(DirectoryStore, "create", overtaken)
        statement = move(store)
        index = read_index(store, statement.index)
        assert index is not None
        assert len(index.manifests) == 2
        assert statement.sequence == 2

    @pytest.mark.parametrize("damage", [b"", b"{half", b"[]"])
    @pytest.mark.parametrize("options", [{}, {"trust": SIGNED, "sign": sign}])
    def test_damaged_tag_is_refused_until_it_is_removed(
        self, store: DirectoryStore, damage: bytes, options: dict[str, Any]
    ) -> None:
        """Started afresh, it would lose its other platforms and, for who has not seen it, its
        sequence: whoever can damage a document must not bring that about."""
        move(store, **options)
        tag_path(store).write_bytes(damage)
        for act in (
            lambda: move(store, 2, last_seen=1, **options),
            lambda: check_movable(
                store, PROD, options.get("trust", ANYONE), sign=options.get("sign")
            ),
        ):
            with pytest.raises(IntegrityError, match=r"tags/llama/prod\.json") as caught:
                act()
            assert caught.value.exit_status == 4
            assert "remove the document" in str(caught.value.hint)
        assert tag_path(store).read_bytes() == damage
        tag_path(store).unlink()
        assert move(store, 2, last_seen=1, **options).sequence == 2
        resolve_tag(store, PROD, ANYONE if not options else SIGNED, last_seen=2)

    def test_collector_and_push_agree_on_what_to_do(self, store: DirectoryStore) -> None:
        move(store)
        tag_path(store).write_bytes(b"{half")
        with pytest.raises(IntegrityError) as pushed:
            move(store)
        with pytest.raises(IntegrityError) as collected:
            collect(store, Policy(), delete=True)
        assert collected.value.hint == f"nothing was removed; {pushed.value.hint}"

    def test_damaged_tag_can_be_replaced_on_purpose_above_what_was_seen(
        self, store: DirectoryStore
    ) -> None:
        index = read_index(store, move(store).index)
        assert index is not None
        tag_path(store).write_bytes(b"{half")
        statement, before = replace_tag(store, PROD, index, ANYONE, last_seen=7)
        assert (statement.sequence, before) == (8, None)

    def test_another_tags_document_is_not_written_over(self, store: DirectoryStore) -> None:
        move(store)
        other = TagRef("llama", "other")
        tag_path(store, other).write_bytes(tag_path(store).read_bytes())
        with pytest.raises(IntegrityError, match=r"tags/llama/other\.json"):
            point_tag(store, other, X86_V4, "4" * 64, ANYONE)

    @pytest.mark.parametrize("damage", ["gone", "changed"])
    def test_lost_index_is_started_afresh_and_the_sequence_goes_on(
        self, store: DirectoryStore, damage: str
    ) -> None:
        first = move(store)
        path = store.root / f"v1/indexes/{first.index}.json"
        path.unlink() if damage == "gone" else path.write_bytes(b"{}")
        second = point_tag(store, PROD, X86_V4, "4" * 64, ANYONE)
        assert second.sequence == 2
        index = read_index(store, second.index)
        assert index is not None
        assert [one.manifest for one in index.manifests] == ["4" * 64]

    def test_unreachable_index_is_an_error_and_moves_nothing(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        move(store)
        before = tag_path(store).read_bytes()
        read = DirectoryStore.read

        def unreachable(self: DirectoryStore, name: str) -> Any:
            if name.startswith("indexes/"):
                raise StoreError("timed out")
            return read(self, name)

        monkeypatch.setattr(DirectoryStore, "read", unreachable)
        with pytest.raises(StoreError, match="timed out"):
            point_tag(store, PROD, X86_V4, "4" * 64, ANYONE)
        assert tag_path(store).read_bytes() == before

    def test_somebody_elses_tag_is_not_merged_into_a_signed_one(
        self, store: DirectoryStore
    ) -> None:
        move(store)
        with pytest.raises(IntegrityError, match="not signed"):
            move(store, 2, trust=SIGNED, sign=sign)
        assert resolve_tag(store, PROD, ANYONE).sequence == 1

    def test_expired_tag_is_renewed(self, store: DirectoryStore) -> None:
        move(store, expires=datetime.now(UTC) - timedelta(days=1))
        renewed = move(store, expires=datetime.now(UTC) + timedelta(days=1))
        assert renewed.sequence == 2
        resolve_tag(store, PROD, ANYONE)


class TestBelief:
    def test_unsigned_tag_is_accepted_unless_a_signature_is_required(
        self, store: DirectoryStore
    ) -> None:
        move(store)
        assert resolve_tag(store, PROD, ANYONE).sequence == 1
        assert resolve_tag(store, PROD, Trust(check=check)).sequence == 1
        for trust in (SIGNED, Trust(require_signature=True)):
            with pytest.raises(IntegrityError, match="not signed") as caught:
                resolve_tag(store, PROD, trust)
            assert caught.value.exit_status == 4

    def test_signed_tag_is_checked_where_keys_are_known(self, store: DirectoryStore) -> None:
        move(store, sign=sign)
        assert resolve_tag(store, PROD, SIGNED).sequence == 1
        with pytest.raises(IntegrityError, match="no key is configured"):
            resolve_tag(store, PROD, Trust(require_signature=True))
        envelope = Envelope.from_json(tag_path(store).read_bytes())
        strange = envelope.with_signatures([Signature("other", b"x")])
        tag_path(store).write_bytes(strange.to_json())
        for trust in (SIGNED, Trust(check=check)):
            with pytest.raises(IntegrityError, match="known key"):
                resolve_tag(store, PROD, trust)

    def test_no_such_tag_names_those_there_are(self, store: DirectoryStore) -> None:
        with pytest.raises(StoreError, match="has no tags"):
            resolve_tag(store, PROD, ANYONE)
        move(store)
        with pytest.raises(StoreError, match=r"it has llama:prod") as caught:
            resolve_tag(store, TagRef("llama", "test"), ANYONE)
        assert caught.value.exit_status == 3

    def test_older_tag_served_again_is_a_rollback(self, store: DirectoryStore) -> None:
        move(store)
        old = tag_path(store).read_bytes()
        move(store, 2)
        tag_path(store).write_bytes(old)
        with pytest.raises(IntegrityError, match="sequence 1; 2 was seen here before") as caught:
            resolve_tag(store, PROD, Trust(min_sequence=1), last_seen=2)
        assert "promote" in str(caught.value.hint)
        with pytest.raises(IntegrityError, match="sequence 1; 3 is required by min_seq") as caught:
            resolve_tag(store, PROD, Trust(min_sequence=3), last_seen=2)
        assert "min_sequence" in str(caught.value.hint)
        assert resolve_tag(store, PROD, ANYONE, last_seen=1).sequence == 1

    def test_tag_filed_under_another_name_is_refused(self, store: DirectoryStore) -> None:
        move(store, sign=sign)
        test = TagRef("llama", "test")
        tag_path(store, test).write_bytes(tag_path(store).read_bytes())
        with pytest.raises(IntegrityError, match="answered with the tag llama:prod"):
            resolve_tag(store, test, SIGNED)

    def test_every_refusal_says_what_to_do(self, store: DirectoryStore) -> None:
        move(store)
        with pytest.raises(IntegrityError, match="not signed") as caught:
            resolve_tag(store, PROD, SIGNED)
        assert "--key" in str(caught.value.hint)
        tag_path(store).unlink()
        move(store, sign=sign, trust=SIGNED)
        stranger = Trust(check=lambda _: "it is signed by another")
        with pytest.raises(IntegrityError, match="another") as caught:
            resolve_tag(store, PROD, stranger)
        assert "cache.keys" in str(caught.value.hint)
        with pytest.raises(IntegrityError, match="no key") as caught:
            resolve_tag(store, PROD, Trust(require_signature=True))
        assert "cache.keys" in str(caught.value.hint)
        move(store, sign=sign, trust=SIGNED, expires=NOW.replace(year=2020))
        with pytest.raises(IntegrityError, match="expired") as caught:
            resolve_tag(store, PROD, SIGNED)
        assert "renew" in str(caught.value.hint)

    def test_expiry_counts_from_its_second(self) -> None:
        statement = TagStatement(PROD, "1" * 64, 1, NOW)
        data = Envelope(PAYLOAD_TYPE, statement.payload()).to_json()
        early, late = NOW - timedelta(seconds=1), NOW
        assert tag_problem(PROD, data, ANYONE, last_seen=0, now=early) is None
        problem = tag_problem(PROD, data, ANYONE, last_seen=0, now=late)
        assert problem is not None
        assert problem.kind is ProblemKind.EXPIRED

    @pytest.mark.parametrize(
        "change",
        [
            {"schema": "neffbuild.tag/2"},
            {"name": "../x"},
            {"name": 1},
            {"tag": ""},
            {"index": "x"},
            {"sequence": 0},
            {"sequence": True},
            {"sequence": "1"},
            {"expires": "tomorrow"},
            {"expires": "2026-01-01T00:00:00"},
            {"expires": 5},
        ],
    )
    def test_malformed_statement_is_refused(self, change: dict[str, Any]) -> None:
        document = json.loads(TagStatement(PROD, "1" * 64, 1, NOW).payload()) | change
        data = Envelope(PAYLOAD_TYPE, json.dumps(document).encode()).to_json()
        problem = tag_problem(PROD, data, ANYONE, last_seen=0, now=NOW)
        assert problem is not None
        assert problem.kind is ProblemKind.BAD_ENTRY

    def test_payload_of_another_type_is_refused(self) -> None:
        payload = TagStatement(PROD, "1" * 64, 1).payload()
        problem = tag_problem(
            PROD, Envelope("text/plain", payload).to_json(), ANYONE, last_seen=0, now=NOW
        )
        assert problem is not None
        assert "text/plain" in problem.detail

    @given(position=st.integers(0), bit=st.integers(0, 7))
    @settings(max_examples=300, deadline=None)
    def test_flipped_bit_in_a_signed_tag_never_changes_what_is_believed(
        self, position: int, bit: int
    ) -> None:
        statement = TagStatement(PROD, "1" * 64, 5, NOW + timedelta(days=1))
        envelope = Envelope(PAYLOAD_TYPE, statement.payload())
        data = bytearray(envelope.with_signatures(sign(envelope.signed_bytes)).to_json())
        data[position % len(data)] ^= 1 << bit
        if tag_problem(PROD, bytes(data), SIGNED, last_seen=5, now=NOW) is None:
            assert TagStatement.from_envelope(Envelope.from_json(bytes(data))) == statement
