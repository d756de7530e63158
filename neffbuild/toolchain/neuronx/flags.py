"""neuronx-cc's flags in one spelling, so that equal command lines are equal in recipes.

`--a b` is `--a=b`, short forms are their long ones, the right-most of two counts, flags of the caching
wrappers are not neuronx-cc's and go. What nobody here has heard of stays, in its order: it may change the
NEFF. Values are the compiler's to judge, but for those that decide here what is built.

Source: neuronx-cc's API reference guide; the rest is named as the plugins of vLLM and torch use it.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neffbuild.config.errors import ConfigError

CC_FLAGS = "NEURON_CC_FLAGS"
OPT_LEVEL = "NEURON_COMPILER_OPT_LEVEL"
CONFIGURED = "toolchain.flags"

LNC = "--lnc"
OPTLEVEL = "--optlevel"
SCRATCHPAD = "--hbm-scratchpad-page-size"
TARGET = "--target"
VERBOSE = "--verbose"

_ALIASES = {"-O": OPTLEVEL, "-lnc": LNC, "--logical-nc-config": LNC, "-o": "--output"}
_VALUED = frozenset(
    {
        LNC,
        OPTLEVEL,
        SCRATCHPAD,
        TARGET,
        VERBOSE,
        "--auto-cast",
        "--auto-cast-type",
        "--distribution-strategy",
        "--framework",
        "--implicit-integer-downcast",
        "--logfile",
        "--model-type",
        "--native-int64",
        "--output",
    }
)
TENSORIZER_OPTIONS = "--internal-hlo2tensorizer-options"
BACKEND_OPTIONS = "--internal-backend-options"
# Their values are command lines of their own, and may start with a dash.
_OPTIONS_WITHIN = frozenset({TENSORIZER_OPTIONS, BACKEND_OPTIONS})
_SWITCHES = frozenset(
    {
        "--enable-fast-context-switch",
        "--enable-fast-loading-neuron-binaries",
        "--enable-mixed-precision-accumulation",
        "--enable-saturate-infinity",
        "--no_cache",
        "--retry_failed_compilation",
    }
)
_OF_WRAPPERS = frozenset({"--cache_dir", "--log_level", "--no_cache", "--retry_failed_compilation"})
_OURS = {
    "--logfile": "neffbuild names the files of a compile",
    "--output": "neffbuild names the files of a compile",
}
_CHOICES = {OPTLEVEL: ("1", "2", "3"), LNC: ("1", "2"), "--framework": ("XLA",)}
_KNOWN = _VALUED | _SWITCHES
_INTERNAL = "--internal-"
_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag under its long name; `value` is None for a switch."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


def configured_flags(items: Iterable[str]) -> tuple[Flag, ...]:
    """The flags of a config's `toolchain.flags`. An item is a flag, a value of the flag before it, or
    several flags as a shell would take them; one that starts `--name=` is one flag, spaces and all.

    Raises `ConfigError` for what is no flag, lacks its value, or is not a user's to set.
    """
    return parse_flags([word for item in items for word in _item_words(item)], CONFIGURED)


def environment_flags(text: str) -> tuple[Flag, ...]:
    """The flags in `NEURON_CC_FLAGS`, split as a shell does. Raises as `configured_flags`."""
    return parse_flags(_shell_words(text, CC_FLAGS), CC_FLAGS)


def level_flags(text: str) -> tuple[Flag, ...]:
    """The flag in `NEURON_COMPILER_OPT_LEVEL`, which holds `-O1` or `1`. Raises as `configured_flags`."""
    level = text.strip()
    return parse_flags([level if level.startswith("-") else f"-O{level}"], OPT_LEVEL)


def parse_flags(words: Sequence[str], source: str) -> tuple[Flag, ...]:
    """The flags that the words of a command line are; `source` says in messages whose words."""
    rest = deque(words)
    flags = []
    while rest:
        word = rest.popleft()
        if "\0" in word or not word.lstrip("-") or not word.startswith("-"):
            raise _refused(source, word, f"{word!r} is no flag", "write flags as --name=value")
        name, equals, value = word.partition("=")
        if name.startswith("-O") and name != "-O":
            name, equals, value = "-O", "=", f"{name[2:]}{equals}{value}"
        name = _ALIASES.get(name, name)
        if equals:
            flags.append(_checked(Flag(name, value), source, word))
        elif name not in _SWITCHES and rest and _is_value(rest[0]):
            flags.append(_checked(Flag(name, rest.popleft()), source, word))
        elif name in _VALUED or name in _OPTIONS_WITHIN:
            raise _refused(source, word, f"{word} needs a value", f"write {name}=VALUE")
        else:
            flags.append(_checked(Flag(name), source, word))
    return tuple(flags)


def canonical_flags(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """Each flag once, the right-most of its name; those that are known by name, then the others in
    their order; without the wrappers' own."""
    last: dict[str, Flag] = {}
    for flag in flags:
        if flag.name not in _OF_WRAPPERS:
            # Taken out first, so that its place is that of the last one.
            last.pop(flag.name, None)
            last[flag.name] = flag
    known = sorted((flag for flag in last.values() if flag.name in _KNOWN), key=lambda f: f.name)
    return (*known, *(flag for flag in last.values() if flag.name not in _KNOWN))


def value_of(flags: Iterable[Flag], name: str) -> str | None:
    """The value of the right-most flag of this name, None where there is none."""
    values = [flag.value for flag in flags if flag.name == name]
    return values[-1] if values else None


def _item_words(item: str) -> list[str]:
    first = (item.split(maxsplit=1) or [""])[0]
    name, equals, value = item.strip().partition("=")
    if "=" not in first:
        return _shell_words(item, CONFIGURED)
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]  # quoted for a shell that is not there
    return [f"{name}{equals}{value}"]


def _shell_words(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise _refused(
            source, text, f"its quotes do not match ({error})", "quote values with spaces"
        ) from error


def _is_value(word: str) -> bool:
    """As argparse sees it: what has a space in it and does not name an option is none."""
    if not word.startswith("-") or _NUMBER.fullmatch(word):
        return True
    name = word.partition("=")[0]
    named = name in _KNOWN or name in _ALIASES or name.startswith(_INTERNAL)
    return " " in word and not named


def _checked(flag: Flag, source: str, word: str) -> Flag:
    if flag.name in _OURS:
        raise _refused(source, word, f"{_OURS[flag.name]}: {flag.name} cannot be set", "remove it")
    choices = _CHOICES.get(flag.name)
    if choices and flag.value not in choices:
        raise _refused(
            source, word, f"{flag.name} takes {', '.join(choices)}, not {flag.value!r}", None
        )
    if flag.name in _VALUED and (flag.value == "" or len((flag.value or "").split()) > 1):
        raise _refused(
            source,
            word,
            f"{flag.name} takes one word, not {flag.value!r}",
            "write each flag as an item of its own",
        )
    return flag


def _refused(source: str, value: str, why: str, hint: str | None) -> ConfigError:
    return ConfigError(
        f"the neuronx toolchain cannot take {value!r} of {source}: {why}",
        field=source,
        value=value,
        hint=hint,
    )
