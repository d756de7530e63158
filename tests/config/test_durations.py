"""Durations as people write them."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.duration import parse_duration
from neffbuild.config.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("1s", timedelta(seconds=1)),
        ("90m", timedelta(minutes=90)),
        ("12h", timedelta(hours=12)),
        ("30d", timedelta(days=30)),
        ("8w", timedelta(weeks=8)),
        ("36500d", timedelta(days=36500)),
        ("007d", timedelta(days=7)),
    ],
)
def test_a_number_and_a_unit(text: str, duration: timedelta) -> None:
    assert parse_duration(text, field="--expires") == duration


@pytest.mark.parametrize(
    "text",
    [
        *("", "30", "d", "0d", "-1d", "+1d", "1.5h", "1 d", "1d ", "1d12h", "1y", "1D", "36501d"),
        *("٣d", "9" * 10 + "w", "9" * 5000 + "d"),
    ],
)
def test_anything_else_is_refused_naming_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: a whole number and one of") as caught:
        parse_duration(text, field="--expires")
    assert caught.value.field == "--expires"
    assert caught.value.value == text


@given(st.text())
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert parse_duration(text, field="x") > timedelta(0)
