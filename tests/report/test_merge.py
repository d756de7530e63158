"""Reports of shards, joined: nothing is lost, and nothing depends on which file comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.report.merge import Merged, merge_reports
from neffbuild.report.run_files import parse_report, read_report

OUTCOMES = ("built", "cached", "failed", "cancelled", "skipped")


def unit(name: str, outcome: str = "built", **fields: Any) -> dict[str, Any]:
    return {
        "bucket_name": name,
        "family": "draft" if name.startswith("draft") else "target-with-spec",
        "key": name.encode().hex()[:64].ljust(64, "0"),
        "outcome": outcome,
        "compile_seconds": 2.5 if outcome in ("built", "cached") else None,
        "peak_memory_bytes": 1 << 30 if outcome in ("built", "cached") else None,
        "artifact_bytes": 4096 if outcome in ("built", "cached") else None,
        "cause": None if outcome in ("built", "cached") else "why",
        **fields,
    }


def run(*units: dict[str, Any], wall_seconds: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {
        "schema": "neffbuild.run/1",
        "counts": {
            name: sum(one["outcome"] == name for one in units)
            for name in ("built", "cached", "failed")
        },
        "wall_seconds": wall_seconds,
        "units": list(units),
        **fields,
    }


def merged(*documents: dict[str, Any]) -> Merged:
    """The documents joined, as if they stood in the files `0.json`, `1.json` …"""
    return merge_reports(
        [
            parse_report(json.dumps(document), f"{number}.json")
            for number, document in enumerate(documents)
        ]
    )


GRID = [
    f"{kind}_b{rows}_s6_ctx{context}"
    for kind in ("decode", "draft")
    for rows in (1, 2, 4, 8, 16)
    for context in (1024, 4096, 131072)
]


@given(
    outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=len(GRID), max_size=len(GRID)),
    shards=st.lists(st.integers(0, 2), min_size=len(GRID), max_size=len(GRID)),
)
def test_the_parts_of_a_report_make_the_whole(outcomes: list[str], shards: list[int]) -> None:
    """Whatever the split: the units, their order, and every figure of each."""
    units = [unit(name, outcome) for name, outcome in zip(GRID, outcomes, strict=True)]
    whole = run(*units)
    parts = [
        run(*(one for one, shard in zip(units, shards, strict=True) if shard == index))
        for index in range(3)
    ]
    joined = merged(*parts)
    assert joined.document["units"] == whole["units"]
    assert joined.document["counts"] == whole["counts"]
    assert joined.document["absent_units"] == 0
    assert joined.complete == (set(outcomes) <= {"built", "cached"})
    assert [row.bucket_name for row in joined.rows] == GRID


@given(
    told=st.lists(
        st.tuples(st.sampled_from(GRID[:4]), st.sampled_from(OUTCOMES), st.floats(0, 9)),
        max_size=12,
    ),
    order=st.randoms(use_true_random=False),
)
def test_the_best_outcome_counts_whichever_file_has_it(
    told: list[tuple[str, str, float]], order: Any
) -> None:
    documents = [
        run(unit(name, outcome, compile_seconds=seconds), wall_seconds=seconds)
        for name, outcome, seconds in told
    ]
    joined = merged(*documents).document
    for found in joined["units"]:
        reported = [outcome for name, outcome, _ in told if name == found["bucket_name"]]
        assert found["outcome"] == min(reported, key=OUTCOMES.index)
    assert joined["wall_seconds"] == max((seconds for *_, seconds in told), default=0)
    order.shuffle(documents)
    assert merged(*documents).document == joined
    assert merged(*documents, *documents).document == {
        **joined,
        "reports": 2 * len(documents),
    }


def test_times_of_the_whole_are_the_longest_run_and_the_sum_of_compiles() -> None:
    joined = merged(
        run(unit(GRID[0]), unit(GRID[1], compile_seconds=0.25), wall_seconds=7.0),
        run(unit(GRID[2], "cached"), wall_seconds=3.0),
    ).document
    assert joined["wall_seconds"] == 7.0
    assert joined["compile_seconds"] == 2.75


def test_prefill_units_follow_decode_units_as_a_plan_has_them() -> None:
    names = ["prefill_s128_kv512", "prefill_s256_kv512", "prefill_s128_kv1024"]
    units = [unit(name, family="prefill") for name in names]
    decode = [unit("decode_b2", family="target"), unit("decode_b16", family="target")]
    joined = merged(run(*reversed(units)), run(*reversed(decode)))
    assert joined.document["units"] == [*decode, *units]


def shard(index: int, count: int = 3, of_units: int = 4) -> dict[str, int]:
    return {"index": index, "count": count, "of_units": of_units}


def test_units_of_a_shard_without_a_report_are_missed() -> None:
    reports = [
        run(unit(GRID[0]), unit(GRID[1]), shard=shard(1)),
        run(unit(GRID[2]), shard=shard(3)),
    ]
    joined = merged(*reports)
    assert joined.absent_units == joined.document["absent_units"] == 1
    assert joined.absent_shards == ("2/3",)
    assert not joined.complete
    # A later run of everything that is left has it.
    assert merged(*reports, run(unit(GRID[3]))).complete
    # Joined reports can be joined again.
    assert merged(joined.document).absent_units == 1
    assert merged(joined.document, run(unit(GRID[3]))).complete


def test_an_empty_shard_adds_nothing() -> None:
    joined = merged(run(unit(GRID[0]), shard=shard(1, 2, 1)), run(shard=shard(2, 2, 1)))
    assert joined.complete
    assert joined.document["counts"] == {"built": 1, "cached": 0, "failed": 0}


def test_remotes_are_added_up() -> None:
    def remote(url: str, hits: int, fault: str | None = None) -> dict[str, Any]:
        counts = {"hits": hits, "published": 2 * hits, "faults": int(fault is not None)}
        return {"url": url, "mode": "rw", "readable": True, **counts, "last_fault": fault}

    joined = merged(
        run(remotes=[remote("s3://a/b", 1), remote("s3://c/d", 5)]),
        run(remotes=[remote("s3://a/b", 2, "denied")]),
        run(remotes=[remote("s3://a/b", 3)]),
    ).document
    assert joined["remotes"] == [
        {**remote("s3://a/b", 6, "denied"), "faults": 1},
        remote("s3://c/d", 5),
    ]


def test_what_later_versions_add_to_a_unit_is_kept() -> None:
    [found] = merged(run(unit(GRID[0], cause_kind="x", later=[1]))).document["units"]
    assert (found["cause_kind"], found["later"]) == ("x", [1])


def test_two_keys_for_one_unit_are_refused_with_both() -> None:
    one, other = unit(GRID[0]), unit(GRID[0], "failed", key="f" * 64)
    with pytest.raises(ConfigError) as refused:
        merged(run(unit(GRID[1])), run(one), run(other))
    for part in (one["key"], other["key"], "1.json", "2.json", GRID[0]):
        assert part in refused.value.message
    # One that could not be keyed somewhere is no contradiction.
    assert merged(run(one), run(unit(GRID[0], "skipped", key=None))).complete


def test_shards_of_different_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.json is a shard of 4 units, .*1\.json one of 5"):
        merged(run(shard=shard(1)), run(shard=shard(2, of_units=5)))


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        (
            [run(shard=shard(1, 3)), run(shard=shard(2, 4))],
            "0.json is shard 1/3, 1.json shard 2/4: they are not of one split",
        ),
        (
            [run(unit(GRID[0]), shard=shard(1)), run(unit(GRID[0]), shard=shard(2))],
            f"unit {GRID[0]} is in shard 1/3 (0.json) and in shard 2/3 (1.json)",
        ),
        (
            [run(unit(GRID[0]), shard=shard(2)), run(unit(GRID[1]), shard=shard(2))],
            "0.json and 1.json are both shard 2/3, of different units",
        ),
    ],
)
def test_reports_of_no_one_split_are_refused(reports: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        merged(*reports)
    assert refused.value.message == said


def test_a_shard_that_was_run_again_is_no_contradiction() -> None:
    first = run(unit(GRID[0]), unit(GRID[1], "failed"), shard=shard(1, of_units=2))
    # As `--retry-failed` reports it.
    assert merged(first, run(unit(GRID[1]), shard=shard(1, of_units=2))).complete
    again = run(unit(GRID[0], "cached"), unit(GRID[1]), shard=shard(1, of_units=2))
    assert merged(first, again).complete


def test_the_events_of_a_run_end_in_its_report() -> None:
    event = {"schema": "neffbuild.event/1", "event": "started"}
    lines = [json.dumps(each) for each in (event, event, run(unit(GRID[0])))]
    assert merge_reports([parse_report("\n".join(lines) + "\n", "lines")]).complete
    with pytest.raises(ConfigError, match=r"neffbuild\.event/1"):
        parse_report("\n".join(lines[:2]), "lines")  # it was killed


DAMAGED = {
    "empty": ("", "is empty"),
    "cut off": ('{"schema": "neffbuild.run/1", "units": [', "not valid JSON"),
    "no object": ("[]", "schema is None"),
    "another document": ('{"schema": "neffbuild.plan/1"}', "'neffbuild.plan/1'"),
    "an error": (
        '{"schema": "neffbuild.error/1", "error": {"message": "no such bucket"}}',
        "no such bucket",
    ),
    "no figures": ('{"schema": "neffbuild.run/1"}', "wall_seconds"),
    "a number as text": (json.dumps(run() | {"wall_seconds": "1"}), "wall_seconds"),
    "an outcome there is not": (json.dumps(run(unit(GRID[0], "fine"))), "units.0.outcome"),
    "a malformed key": (json.dumps(run(unit(GRID[0], key="0" * 63))), "units.0.key"),
    "a negative time": (json.dumps(run(unit(GRID[0], compile_seconds=-1.0))), "compile_seconds"),
    "a time beyond all": (
        json.dumps(run(unit(GRID[0], compile_seconds=1.7e308))),
        "1.7e+308; allowed",
    ),
    "a number beyond all": (
        json.dumps(run(later=0)).replace('"later": 0', '"later": 1e400'),
        "JSON",
    ),
    "a peak beyond all": (json.dumps(run(unit(GRID[0], peak_memory_bytes=10**400))), "peak_memory"),
    "a name beyond all": (json.dumps(run(unit("decode_b" + "9" * 5000))), "bucket_name"),
    "a cause that is none": (json.dumps(run(unit(GRID[0], cause=["x"]))), "units.0.cause is ['x']"),
    "a key twice": ('{"schema": "neffbuild.run/1", "schema": "x"}', "twice"),
    "a shard of none": (json.dumps(run(shard=shard(1, 0))), "shard.count"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, name: str) -> None:
    text, said = DAMAGED[name]
    path = tmp_path / "shard-2.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_report(path)
    assert str(path) in refused.value.message
    assert said in refused.value.message
    assert refused.value.exit_status == 2


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*nowhere\.json"):
        read_report(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="is a directory"):
        read_report(tmp_path)
