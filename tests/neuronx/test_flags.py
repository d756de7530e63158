"""neuronx-cc's flags in one spelling."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.neuronx.flags import (
    Flag,
    canonical_flags,
    configured_flags,
    environment_flags,
    level_flags,
    parse_flags,
)

WORDS = st.text("abcxyz019._:/", min_size=1, max_size=8)
UNKNOWN = st.builds("--{}".format, st.text("abcdefgh-", min_size=2, max_size=6).map("x{}y".format))
KNOWN = {
    "--auto-cast": ("none", "matmult", "all"),
    "--optlevel": ("1", "2", "3"),
    "--lnc": ("1", "2"),
    "--model-type": ("generic", "transformer"),
    "--hbm-scratchpad-page-size": ("1024", "2048"),
}
FLAGS = st.one_of(
    st.sampled_from(sorted(KNOWN)).flatmap(
        lambda name: st.sampled_from(KNOWN[name]).map(lambda value: Flag(name, value))
    ),
    st.builds(Flag, UNKNOWN, WORDS),
    st.builds(Flag, UNKNOWN),
    st.just(Flag("--enable-saturate-infinity")),
    st.just(Flag("--internal-backend-options", "--enable-verifier=false --enable-nested")),
)


def spellings(flag: Flag) -> st.SearchStrategy[list[str]]:
    if flag.value is None:
        return st.just([flag.name])
    ways = [[f"{flag.name}={flag.value}"], [flag.name, flag.value]]
    if flag.name == "--optlevel":
        ways += [[f"-O{flag.value}"], ["-O", flag.value], [f"-O={flag.value}"]]
    if flag.name == "--lnc":
        ways += [["-lnc", flag.value], [f"--logical-nc-config={flag.value}"]]
    return st.sampled_from(ways)


@given(st.data(), st.lists(FLAGS, max_size=8))
def test_every_spelling_is_the_same(data: st.DataObject, flags: list[Flag]) -> None:
    words: list[str] = []
    for flag in flags:
        spelled = data.draw(spellings(flag))
        # A switch nobody knows would take a word after it for its value; there is none here.
        words += spelled
    assert parse_flags(words, "test") == tuple(flags)
    assert environment_flags(shlex.join(words)) == tuple(flags)


@given(st.lists(FLAGS, max_size=10))
def test_canonical_flags_are_the_right_most_and_stay_so(flags: list[Flag]) -> None:
    canonical = canonical_flags(flags)
    assert {flag.name: flag.value for flag in flags} == {f.name: f.value for f in canonical}
    assert len({flag.name for flag in canonical}) == len(canonical)
    assert canonical_flags(canonical) == canonical
    assert canonical_flags(parse_flags([str(flag) for flag in canonical], "test")) == canonical
    assert canonical_flags([*flags, *canonical]) == canonical


@given(st.lists(FLAGS, max_size=10, unique_by=lambda flag: flag.name), st.randoms())
def test_the_order_of_known_flags_is_no_matter_and_that_of_others_is(
    flags: list[Flag], source: object
) -> None:
    known = [flag for flag in flags if flag.name in KNOWN]
    others = [flag for flag in flags if flag.name not in KNOWN]
    shuffled = list(known)
    source.shuffle(shuffled)  # type: ignore[attr-defined]
    assert canonical_flags([*shuffled, *others]) == canonical_flags([*others, *known])
    unknown = [flag for flag in others if flag.name != "--enable-saturate-infinity"]
    kept = [flag for flag in canonical_flags(flags) if flag in unknown]
    assert kept == unknown


def test_flags_of_wrappers_are_not_the_compilers() -> None:
    text = "--cache_dir=/x --no_cache --retry_failed_compilation --log_level info -O1"
    assert canonical_flags(environment_flags(text)) == (Flag("--optlevel", "1"),)


@pytest.mark.parametrize(
    ("items", "flags"),
    [
        (["--auto-cast none"], [Flag("--auto-cast", "none")]),
        (["--auto-cast", "none"], [Flag("--auto-cast", "none")]),
        (["-O2 -lnc 1"], [Flag("--optlevel", "2"), Flag("--lnc", "1")]),
        (["--new-thing"], [Flag("--new-thing")]),
        (["--new-thing", "-3"], [Flag("--new-thing", "-3")]),
        (
            ["--internal-backend-options=--a=false --b"],
            [Flag("--internal-backend-options", "--a=false --b")],
        ),
        (
            ["--internal-backend-options='--a=false --b'"],
            [Flag("--internal-backend-options", "--a=false --b")],
        ),
        (
            ["--internal-backend-options", "--a=false --b"],
            [Flag("--internal-backend-options", "--a=false --b")],
        ),
    ],
)
def test_items_of_a_config(items: list[str], flags: list[Flag]) -> None:
    assert configured_flags(items) == tuple(flags)


@pytest.mark.parametrize("text", ["-O1", "1", " -O1 ", "--optlevel=1"])
def test_the_level_of_the_environment(text: str) -> None:
    assert level_flags(text) == (Flag("--optlevel", "1"),)


@pytest.mark.parametrize(
    ("items", "why"),
    [
        (["none"], "'none' is no flag"),
        (["--"], "'--' is no flag"),
        (["-"], "'-' is no flag"),
        (["--auto-cast"], "--auto-cast needs a value"),
        (["--auto-cast", "--optlevel=1"], "--auto-cast needs a value"),
        (
            ["--internal-backend-options", "--a=false"],
            "--internal-backend-options needs a value",
        ),
        (["--internal-hlo2tensorizer-options"], "--internal-hlo2tensorizer-options needs a value"),
        (["--x=\0"], "is no flag"),
        (["--auto-cast="], "takes one word, not ''"),
        (["--auto-cast=none -O2"], "takes one word, not 'none -O2'"),
        (["-O4"], "--optlevel takes 1, 2, 3, not '4'"),
        (["-O2x"], "--optlevel takes 1, 2, 3, not '2x'"),
        (["--lnc=3"], "--lnc takes 1, 2, not '3'"),
        (["--framework=TORCH"], "--framework takes XLA, not 'TORCH'"),
        (["--output=x.neff"], "--output cannot be set"),
        (["--logfile", "x"], "--logfile cannot be set"),
        (["-o", "x.neff"], "--output cannot be set"),
        (["--auto-cast 'none"], "its quotes do not match"),
    ],
)
def test_what_is_refused_says_why(items: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        configured_flags(items)
    assert refused.value.field == "toolchain.flags"


def test_a_refusal_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="of NEURON_CC_FLAGS: --optlevel takes"):
        environment_flags("-O9")
    with pytest.raises(ConfigError, match="of NEURON_COMPILER_OPT_LEVEL: --optlevel takes"):
        level_flags("fast")
