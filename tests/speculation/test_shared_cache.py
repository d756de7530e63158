"""One cache for two values of K: what is the same program is found, what is not is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_models import DRAFT, build_config

from neffbuild.cache.catalog import commit_entry, record_files
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.plan import Plan
from neffbuild.config.build import BuildConfig
from neffbuild.config.model import ModelConfig
from neffbuild.grid.shapes import Family
from neffbuild.toolchain.base import Unit
from neffbuild.toolchain.inductor import InductorToolchain
from neffbuild.toolchain.planning import plan_config

TOOLCHAIN = InductorToolchain()
WITH, WITHOUT, DRAFTS = Family.TARGET_WITH_SPEC, Family.TARGET_WITHOUT_SPEC, Family.DRAFT


def with_draft(**changes: object) -> BuildConfig:
    """K = 3 with another draft."""
    return replace(build_config(3), draft_model=ModelConfig("draft", DRAFT | changes))


def fill(config: BuildConfig, store: DirectoryStore, folder: Path) -> Plan:
    """Commit something under every key of a config."""
    artifact = folder / "artifact"
    artifact.write_bytes(b"program")
    plan = plan_config(config, TOOLCHAIN, store)
    for unit in plan.units:
        if unit.recipe is not None:
            files = {"artifact": artifact}
            entry = Entry(unit.recipe, record_files(files), "0" * 64, "1" * 64)
            commit_entry(store, entry, files)
    return plan


def found(config: BuildConfig, store: DirectoryStore) -> dict[Family, set[str]]:
    """Family → the statuses of its units that can occur."""
    statuses: dict[Family, set[str]] = {}
    for unit in plan_config(config, TOOLCHAIN, store).units:
        if unit.key is not None:
            statuses.setdefault(unit.shape.family, set()).add(unit.status.value)
    return statuses


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """Holds all of K = 3."""
    store = DirectoryStore(tmp_path / "cache")
    fill(build_config(3), store, tmp_path)
    assert set().union(*found(build_config(3), store).values()) == {"cached"}
    return store


CHANGED = {
    "K": (build_config(5), {WITHOUT}),
    "the draft's vocabulary": (with_draft(draft_vocab_size=64), {WITH, WITHOUT}),
    "no vocabulary map": (with_draft(draft_vocab_size=None), {WITH, WITHOUT}),
    "the draft's width": (with_draft(intermediate_size=128), {WITH, WITHOUT}),
    "auxiliary layers": (with_draft(eagle_aux_hidden_state_layer_ids=[0, 1]), set()),
    "the draft's limit": (build_config(3, draft_limit=80), {WITH, WITHOUT}),
    "no speculation": (build_config(0), set()),
}


@pytest.mark.parametrize(("changed", "cached"), CHANGED.values(), ids=CHANGED)
def test_what_a_change_leaves_of_the_cache(store, changed, cached):
    for family, statuses in found(changed, store).items():
        assert statuses == ({"cached"} if family in cached else {"missing"}), family


def test_one_more_bucket_leaves_all_of_it(store):
    more = build_config(3, contexts=(32, 48, 64))
    assert set(map(frozenset, found(more, store).values())) == {frozenset({"cached", "missing"})}
    units = plan_config(more, TOOLCHAIN, store).units
    assert all(unit.shape.context_len == 48 for unit in units if unit.status.value == "missing")


def test_programs_differ_exactly_where_their_keys_do(tmp_path: Path):
    """Captured for real: K = 5 has another graph wherever it has another key, and the same where not."""
    digests: dict[int, dict[Family, str]] = {}
    keys: dict[int, dict[Family, str]] = {}
    for spec_tokens in (3, 5):
        config = build_config(spec_tokens, contexts=None, num_seqs=(2,))
        plan = plan_config(config, TOOLCHAIN, DirectoryStore(tmp_path))
        digests[spec_tokens] = {
            unit.shape.family: TOOLCHAIN.capture(
                Unit(config, unit.shape, unit.recipe, unit.key)
            ).graph_digest
            for unit in plan.units
        }
        keys[spec_tokens] = {unit.shape.family: unit.key for unit in plan.units}
    for family in (WITH, WITHOUT, DRAFTS):
        same_key = keys[3][family] == keys[5][family]
        assert same_key == (digests[3][family] == digests[5][family]) == (family is WITHOUT)
