"""What entries hold for the places of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from neffbuild.cache.canonical import digest_document
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.cache.layouts.layout import Layout, layout_file


@dataclass(slots=True)
class Candidate:
    """The files of one entry for one place: name below the layout's root → record."""

    records: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_document({name: one.digest for name, one in self.records.items()})

    @property
    def size(self) -> int:
        return sum(one.size for one in self.records.values())


def places_of(layout: Layout, entries: Mapping[str, Entry]) -> dict[str, list[Candidate]]:
    """place → what entries hold for it, each entry by itself, in the order of keys."""
    found: dict[str, list[Candidate]] = {}
    for key in sorted(entries):
        of_entry: dict[str, Candidate] = {}
        for name, record in entries[key].files.items():
            inside = layout_file(layout.name, name)
            place = layout.place_of(inside) if inside is not None else None
            if inside is not None and place is not None:
                of_entry.setdefault(place, Candidate()).records[inside] = record
        for place, candidate in of_entry.items():
            found.setdefault(place, []).append(candidate)
    return found
