"""What a dispatcher tells of its steps to whoever counts them."""

from __future__ import annotations

from typing import Protocol

from neffbuild.grid.shapes import DecodeShape


class StepObserver(Protocol):
    """Told of every program that a dispatcher runs, when it has run, and of those it lacks. What it
    raises ends the step."""

    def ran(self, wanted: DecodeShape, program: DecodeShape, rows: int) -> None:
        """A step of `rows` live rows (0 on an idle rank), which wanted one program and ran in one: in
        another where that stood in for it."""

    def missed(self, wanted: DecodeShape) -> None:
        """A step whose program is not stored, and which nothing stands in for."""
