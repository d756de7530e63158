"""An entry's document: what is accepted from a store, and that both readers accept the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_samples import make_entry
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neffbuild.cache.canonical import canonical_json
from neffbuild.cache.entry import Entry, FileRecord, entry_blobs, sealed
from neffbuild.config.errors import IntegrityError

KEY_OF: dict[str, Any] = {"recipe": {"kind": "unit", "text": "ä\u2028\n"}}


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "recipe": KEY_OF["recipe"],
        "files": {"model.so": FileRecord("a" * 64, 10, 0o755), "b/c.json": FileRecord("b" * 64, 3)},
        "graph_digest": "c" * 64,
        "graph_key": "d" * 64,
        "statistics": {"compile_seconds": 1.25, "schema": 'x,"schema":"neffbuild.entry/1"'},
    }
    return Entry(**{**fields, **changes})


DATA = entry().to_json()
BODY = canonical_json(entry().document())
KEY = entry().key


def accepted(data: bytes) -> tuple[dict[str, int], dict[str, int]] | None:
    """What the two readers make of a document; they must agree."""
    try:
        blobs = dict(Entry.from_json(data, expected_key=KEY).blobs)
    except IntegrityError:
        with pytest.raises(IntegrityError):
            entry_blobs(data, expected_key=KEY)
        return None
    assert dict(entry_blobs(data, expected_key=KEY)) == blobs
    return blobs


def test_round_trip(tmp_path: Path) -> None:
    made, _ = make_entry(tmp_path, 3)
    again = Entry.from_json(made.to_json(), expected_key=made.key)
    assert again == made
    assert dict(entry_blobs(made.to_json(), expected_key=made.key)) == made.blobs
    assert str(tmp_path) not in made.to_json().decode()


def test_statistics_that_imitate_the_end_of_a_recipe_are_read_rightly() -> None:
    assert accepted(DATA) == entry().blobs
    tricky = entry(statistics={"a": {"schema": "neffbuild.entry/1", "statistics": {}}})
    assert accepted(tricky.to_json()) == entry().blobs


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\\uDFFF"'])
def test_values_that_canonical_json_cannot_hold_are_refused(number: bytes) -> None:
    assert BODY.count(b"1.25") == 1
    assert accepted(sealed(BODY.replace(b"1.25", number))) is None
    assert accepted(sealed(BODY.replace(b"1.25", b'"\\u0001\\\\ud800"'))) == entry().blobs


@given(position=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
@settings(max_examples=400, deadline=None)
def test_flipped_bit_anywhere_is_refused(position: int, bit: int) -> None:
    data = bytearray(DATA)
    data[position] ^= 1 << bit
    assert accepted(bytes(data)) is None


@given(position=st.integers(0, len(BODY) - 1), bit=st.integers(0, 7))
@settings(max_examples=400, deadline=None)
def test_recipe_is_what_the_key_says_whatever_digest_is_stated(position: int, bit: int) -> None:
    data = bytearray(BODY)
    data[position] ^= 1 << bit
    blobs = accepted(sealed(bytes(data)))
    start = BODY.index(b'"recipe"')
    end = BODY.index(b',"schema":"neffbuild.entry/1"')
    if start <= position < end:
        assert blobs is None


def test_entry_without_its_digest_is_refused() -> None:
    assert accepted(BODY) is None
    assert accepted(b" " + DATA) is None


@given(length=st.integers(0, len(DATA) - 1))
@settings(max_examples=100, deadline=None)
def test_truncated_document_is_refused(length: int) -> None:
    assert accepted(DATA[:length]) is None


@given(junk=st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"1" * 10_000)
@example(b'{"a":' * 5_000)
@example(b"\xff\xfe{}")
@settings(deadline=None)
def test_junk_is_refused_not_crashed_on(junk: bytes) -> None:
    assert accepted(junk) is None
    assert accepted(sealed(junk)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    where=st.sampled_from(
        [
            ["schema"],
            ["files"],
            ["files", "model.so"],
            ["files", "model.so", "digest"],
            ["files", "model.so", "size"],
            ["files", "model.so", "mode"],
            ["graph_digest"],
            ["graph_key"],
            ["recipe"],
            ["statistics"],
        ]
    ),
    value=json_values,
)
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_field_is_accepted_whole_or_refused(where: list[str], value: Any) -> None:
    document = json.loads(DATA)
    target = document
    for name in where[:-1]:
        target = target[name]
    target[where[-1]] = value
    accepted(sealed(json.dumps(document).encode()))
    try:
        accepted(sealed(canonical_json(document)))
    except ValueError:
        assert (
            "NaN" in repr(value)
            or "nan" in repr(value)
            or "inf" in repr(value)
            or "\\ud" in repr(value)
        )


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "a\\b",
        "a\0b",
        "a\nb",
        "a" * 256,
        "\ud800",
    ],
)
def test_file_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    document = entry().document()
    document["files"] = {name: FileRecord("a" * 64, 1).document()}
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    assert accepted(sealed(body)) is None
    with pytest.raises(IntegrityError):
        Entry.from_document(document)


@pytest.mark.parametrize("name", ["a", "a/b/c", "..a", "a..", ".hidden", "a/..b", "ä/ö", "a b"])
def test_other_file_names_are_kept(name: str) -> None:
    made = entry(files={name: FileRecord("a" * 64, 1)})
    assert Entry.from_json(made.to_json(), expected_key=KEY).files.keys() == {name}


def test_files_that_cannot_lie_in_one_folder_or_share_a_digest_are_refused() -> None:
    both = entry(files={"a": FileRecord("a" * 64, 1), "a/b": FileRecord("b" * 64, 1)})
    assert accepted(both.to_json()) is None
    sizes = entry(files={"a": FileRecord("a" * 64, 1), "b": FileRecord("a" * 64, 2)})
    assert accepted(sizes.to_json()) is None
    assert accepted(entry(files={}).to_json()) is None


def test_entry_under_another_key_is_refused_with_both_keys() -> None:
    with pytest.raises(IntegrityError) as caught:
        Entry.from_json(DATA, expected_key="0" * 64)
    assert "0" * 64 in caught.value.message
    assert KEY in caught.value.message
    with pytest.raises(IntegrityError):
        entry_blobs(DATA, expected_key="0" * 64)


@pytest.mark.parametrize("mode", [-1, 0o1777, 0o4755, True, 493.0, "493"])
def test_modes_beyond_permission_bits_are_refused(mode: Any) -> None:
    document = entry().document()
    document["files"]["model.so"]["mode"] = mode
    assert accepted(sealed(canonical_json(document))) is None
