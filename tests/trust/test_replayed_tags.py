"""An older tag served again, by whoever can write to the store: refused wherever it can be known."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cache_samples import ANYONE, X86_V3
from trust_samples import PROD, STAGING, Place, Signing, envelope_of, nothing_visible

from neffbuild.cache.envelope import Envelope
from neffbuild.cache.open import open_store
from neffbuild.cache.promote import promote
from neffbuild.cache.release import read_release
from neffbuild.cache.tag import PAYLOAD_TYPE, TagStatement, Trust
from neffbuild.cache.transfer import pull
from neffbuild.cache.verify import verify_store, verify_tag
from neffbuild.config.errors import IntegrityError

SOON = timedelta(hours=1)


@pytest.fixture
def replay(place: Place, release: Signing) -> Callable[[], None]:
    """Two signed releases of one tag; calling it serves the first of them again."""
    place.push(place.manifest(), PROD, release)
    old = place.path(PROD.document_name).read_bytes()
    place.push(place.manifest(note="new"), PROD, release)
    return lambda: (place.path(PROD.document_name).write_bytes(old), None)[1]


def test_it_is_signed_and_whole_so_only_its_age_tells(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    replay()
    assert place.pull(PROD, release.trust).statement is not None


def test_where_a_newer_one_was_seen(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    local = place.fresh()
    newer = place.pull(PROD, release.trust, local)
    replay()
    for again in range(2):
        with pytest.raises(IntegrityError, match="sequence 1; 2 was seen") as caught:
            place.pull(PROD, release.trust, local)
        assert caught.value.exit_status == 4, again
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        read_release(place.remote, local, PROD, release.trust)
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        promote(place.remote, local, PROD, STAGING, trust=release.trust, sign=release.key.sign)
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        place.push(place.manifest(note="newest"), PROD, release)  # who pushed has seen it too
    assert newer.statement is not None
    assert [
        one.kind.value
        for one in verify_tag(place.remote, PROD, release.trust, last_seen=2).problems
    ] == ["rollback"]


def test_where_a_lowest_sequence_is_configured(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    floor = Trust(True, 2, release.trust.check)
    assert place.pull(PROD, floor).statement is not None
    replay()
    local = place.fresh()
    with pytest.raises(IntegrityError, match="sequence 1; 2"):
        place.pull(PROD, floor, local)
    assert nothing_visible(local)
    assert not verify_store(place.remote, floor).ok


@pytest.mark.parametrize("signed", [True, False])
def test_everywhere_when_it_has_expired(place: Place, release: Signing, signed: bool) -> None:
    """Also on a machine that has seen nothing and was told nothing."""
    signing, trust = (release, release.trust) if signed else (None, ANYONE)
    expires = datetime.now(UTC) + SOON
    place.push(place.manifest(), PROD, signing, expires=expires)
    assert place.pull(PROD, trust).statement is not None
    place.push(place.manifest(), PROD, signing, expires=datetime.now(UTC) - timedelta(seconds=1))
    local = place.fresh()
    with pytest.raises(IntegrityError, match="expired at") as caught:
        place.pull(PROD, trust, local)
    assert caught.value.exit_status == 4
    assert nothing_visible(local)
    with pytest.raises(IntegrityError, match="expired at"):
        read_release(place.remote, local, PROD, trust)
    assert [one.kind.value for one in verify_tag(place.remote, PROD, trust).problems] == ["expired"]


def test_an_expired_tag_is_renewed_by_the_next_push(place: Place, release: Signing) -> None:
    past = datetime.now(UTC) - timedelta(days=1)
    place.push(place.manifest(), PROD, release, expires=past)
    place.push(place.manifest(), PROD, release, expires=datetime.now(UTC) + SOON)
    statement = place.pull(PROD, release.trust).statement
    assert statement is not None
    assert statement.sequence == 2


def test_what_was_seen_of_one_store_says_nothing_of_another(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    """A copy of a store may rightly be older: what is remembered is of a store, a name and a tag."""
    local = place.fresh()
    place.pull(PROD, release.trust, local)
    other = Place(place.root / "other", type(place.remote)(place.root / "copy"))
    other.push(other.manifest(), PROD, release)
    statement = other.pull(PROD, release.trust, local).statement
    assert statement is not None
    assert statement.sequence == 1


@pytest.mark.parametrize("spelling", ["link", "dots", "slash", "file", "relative"])
def test_a_store_is_the_same_under_every_spelling(
    place: Place,
    release: Signing,
    replay: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    spelling: str,
) -> None:
    local = place.fresh()
    place.pull(PROD, release.trust, local)
    replay()
    root = place.remote.root
    (place.root / "link").symlink_to(root)
    monkeypatch.chdir(place.root)
    url = {
        "link": f"{place.root}/link",
        "dots": f"{root}/../{root.name}/.",
        "slash": f"{root}//",
        "file": f"file://{place.root}/link/",
        "relative": "link",
    }[spelling]
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        pull(open_store(url), local, PROD, platform=X86_V3, trust=release.trust)


def test_a_newer_one_that_had_expired_was_seen(place: Place, release: Signing) -> None:
    place.push(place.manifest(), PROD, release)
    old = place.path(PROD.document_name).read_bytes()
    past = datetime.now(UTC) - timedelta(seconds=1)
    place.push(place.manifest(note="new"), PROD, release, expires=past)
    local = place.fresh()
    with pytest.raises(IntegrityError, match="expired at"):
        place.pull(PROD, release.trust, local)
    place.path(PROD.document_name).write_bytes(old)
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        place.pull(PROD, release.trust, local)


def test_a_newer_one_whose_artifacts_were_withheld_was_seen(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    local = place.fresh()
    for path in (place.remote.root / "v1/indexes").iterdir():
        path.rename(place.root / path.name)
    with pytest.raises(IntegrityError):
        place.pull(PROD, release.trust, local)
    for path in place.root.glob("*.json"):
        path.rename(place.remote.root / "v1/indexes" / path.name)
    replay()
    with pytest.raises(IntegrityError, match="sequence 1; 2 was seen"):
        place.pull(PROD, release.trust, local)


def test_what_no_believed_key_vouches_for_is_not_remembered(
    place: Place, release: Signing, stranger: Signing
) -> None:
    """Else whoever can write to the store could lock every machine out of the true tag."""
    place.push(place.manifest(), PROD, release)
    true = place.path(PROD.document_name).read_bytes()
    index = TagStatement.from_envelope(envelope_of(place.path(PROD.document_name))).index
    local = place.fresh()
    forged = Envelope(PAYLOAD_TYPE, TagStatement(PROD, index, 99).payload())
    elsewhere = Envelope(PAYLOAD_TYPE, TagStatement(STAGING, index, 99).payload())
    for envelope in (
        forged,
        forged.with_signatures(stranger.key.sign(forged.signed_bytes)),
        elsewhere.with_signatures(release.key.sign(elsewhere.signed_bytes)),
    ):
        place.path(PROD.document_name).write_bytes(envelope.to_json())
        with pytest.raises(IntegrityError):
            place.pull(PROD, release.trust, local)
        assert nothing_visible(local, ["seen/"])
    place.path(PROD.document_name).write_bytes(true)
    assert place.pull(PROD, release.trust, local).statement is not None


def test_who_pushed_starts_a_lost_tag_above_what_they_have_seen(
    place: Place, release: Signing, replay: Callable[[], None]
) -> None:
    place.path(PROD.document_name).write_bytes(b"{half")
    with pytest.raises(IntegrityError, match=PROD.document_name) as caught:
        place.push(place.manifest(), PROD, release)
    assert caught.value.exit_status == 4
    place.path(PROD.document_name).unlink()
    statement = place.push(place.manifest(), PROD, release).statement
    assert statement is not None
    assert statement.sequence == 3
