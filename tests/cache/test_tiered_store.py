"""The local store in front of remotes: hits come from anywhere, faults cost a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from cache_samples import as_nobody, fill

from neffbuild.cache.catalog import read_hits
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.store import Document
from neffbuild.cache.tiered import Tier, TieredStore
from neffbuild.cache.verify import verify_keys
from neffbuild.config.errors import StoreError


class Unreachable(DirectoryStore):
    """A remote that fails, and counts how often it was asked."""

    asked = 0

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Document]]:
        self.asked += 1
        raise StoreError(f"{self.url}: connection refused")


@pytest.fixture
def entries(remote: DirectoryStore, tmp_path: Path) -> list[Entry]:
    return fill(remote, tmp_path / "scratch", 4)


def keys(entries: Iterable[Entry]) -> list[str]:
    return [entry.key for entry in entries]


def read_only(store: DirectoryStore) -> Tier:
    return Tier(store, readable=True, writable=False)


def writable(store: DirectoryStore) -> Tier:
    return Tier(store, readable=True, writable=True)


def test_hits_of_a_read_only_remote_are_fetched_once_and_new_units_stay_local(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    tier = read_only(remote)
    tiered = TieredStore(store, [tier])
    assert tiered.stored_keys([*keys(entries), "0" * 64]) == dict.fromkeys(keys(entries))
    assert (tier.counts.hits, tier.counts.faults) == (4, 0)
    assert tiered.back_fill([*keys(entries), "0" * 64]) == {}
    assert verify_keys(store, keys(entries)).ok

    own = fill(store, tmp_path / "scratch", 6)[4:]
    tiered.publish(keys(own))
    assert read_hits(remote, keys(own)) == {}
    assert (tier.counts.published, tier.counts.faults) == (0, 0)

    # All there: the remote is not even asked.
    away = Unreachable(tmp_path / "away")
    again = TieredStore(store, [read_only(away)])
    assert again.stored_keys(keys(entries)) == dict.fromkeys(keys(entries))
    assert again.back_fill(keys(entries)) == {}
    assert away.asked == 0


def test_what_is_built_is_published_to_writable_tiers_alone(
    store: DirectoryStore, remote: DirectoryStore, tmp_path: Path
) -> None:
    own = fill(store, tmp_path / "scratch", 5)
    other = DirectoryStore(tmp_path / "other")
    tiers = [read_only(other), writable(remote)]
    tiered = TieredStore(store, tiers)
    with tiered.publishing() as publish:
        for key in keys(own[:3]):
            publish(key)
    tiered.publish(keys(own))
    assert verify_keys(remote, keys(own)).ok
    assert not other.root.exists()
    assert [tier.counts.published for tier in tiers] == [0, 5]


def test_a_failing_remote_costs_one_warning_and_no_work(
    store: DirectoryStore,
    remote: DirectoryStore,
    entries: list[Entry],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = fill(store, tmp_path / "scratch", 6)[4:]
    away = Unreachable(tmp_path / "away")
    tiers = [writable(away), writable(remote)]
    tiered = TieredStore(store, tiers)
    with caplog.at_level(logging.WARNING):
        wanted = [*keys(entries), *keys(own)]
        assert tiered.stored_keys(wanted) == dict.fromkeys(wanted)
        assert tiered.back_fill(wanted) == {}
        tiered.publish(wanted)
    assert verify_keys(store, wanted).ok
    assert verify_keys(remote, wanted).ok
    assert away.asked == 1
    assert tiers[0].counts.faults == 1
    assert "connection refused" in (tiers[0].counts.last_fault or "")
    assert tiers[1].counts.faults == 0
    assert len(caplog.records) == 1


def test_an_entry_without_its_blobs_is_no_hit_and_the_next_tier_is_asked(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    other = DirectoryStore(tmp_path / "other")
    fill(other, tmp_path / "scratch", 4)
    lost = next(iter(entries[0].blobs))
    remote.blob_path(lost).unlink()
    alone = TieredStore(store, [read_only(remote)])
    assert alone.stored_keys(keys(entries)) == dict.fromkeys(keys(entries[1:]))
    both = TieredStore(store, [read_only(remote), read_only(other)])
    assert both.stored_keys(keys(entries)) == dict.fromkeys(keys(entries))
    assert both.back_fill(keys(entries)) == {}
    assert verify_keys(store, keys(entries)).ok


def test_a_damaged_remote_unit_is_to_be_built_and_healed(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    """A flipped byte shows only when it is read: the plan takes the unit for a hit, fetching does not."""
    victim = entries[2]
    path = remote.blob_path(next(iter(victim.blobs)))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    tiered = TieredStore(store, [writable(remote)])
    assert tiered.stored_keys(keys(entries)) == dict.fromkeys(keys(entries))
    lost = tiered.back_fill(keys(entries))
    assert list(lost) == [victim.key]
    assert "bad_digest" in lost[victim.key]
    assert read_hits(store, keys(entries)).keys() == set(keys(entries)) - {victim.key}

    fill(store, tmp_path / "scratch", 4)  # as a compile does
    tiered.publish(keys(entries))
    assert verify_keys(remote, keys(entries)).ok


def test_a_damaged_unit_that_another_tier_has_whole_is_fetched_from_there(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry], tmp_path: Path
) -> None:
    other = DirectoryStore(tmp_path / "other")
    fill(other, tmp_path / "scratch", 4)
    path = remote.blob_path(next(iter(entries[0].blobs)))
    path.write_bytes(bytes(path.stat().st_size))
    tiered = TieredStore(store, [read_only(remote), read_only(other)])
    assert tiered.back_fill(keys(entries)) == {}
    assert verify_keys(store, keys(entries)).ok


def test_a_local_store_that_cannot_be_written_still_serves(
    public_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, remote = (
        DirectoryStore(public_folder / "store"),
        DirectoryStore(public_folder / "remote"),
    )
    entries = fill(remote, tmp_path / "scratch", 4)
    fill(store, tmp_path / "scratch", 2)

    def ask() -> int:
        tier = read_only(remote)
        tiered = TieredStore(store, [tier])
        assert tiered.stored_keys(keys(entries)) == dict.fromkeys(keys(entries))
        assert tiered.back_fill(keys(entries)) == {}
        assert read_hits(store, keys(entries)).keys() == set(keys(entries[:2]))
        assert tier.counts.faults == 0
        return 0

    assert as_nobody(ask) == 0


def test_unsigned_entries_are_not_taken_where_signatures_are_required(
    store: DirectoryStore, remote: DirectoryStore, entries: list[Entry]
) -> None:
    tiered = TieredStore(store, [Tier(remote, readable=False, writable=True)])
    assert tiered.stored_keys(keys(entries)) == {}
    assert tiered.back_fill(keys(entries)) == {}
    assert read_hits(store, keys(entries)) == {}
