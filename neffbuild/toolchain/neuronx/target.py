"""What is compiled for: the chip, how its cores are grouped, and what is laid down with them.

Each may be said in several places: the config, a flag, a variable that the engine reads too. They agree,
or nothing is built: a NEFF for another chip or grouping is one that the engine cannot load, or does not
look for.

Source: neuronx-cc's API reference guide; SDK 2.33's variables as torch-neuronx and vLLM Neuron read them.
That of Trn3's grouping nothing is published there; it is taken to be Trn2's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neffbuild.config.errors import ConfigError
from neffbuild.toolchain.neuronx.flags import LNC, SCRATCHPAD, TARGET, Flag, value_of

TARGET_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
LOGICAL_CORES = "NEURON_LOGICAL_NC_CONFIG"
PAGE_SIZE = "NEURON_SCRATCHPAD_PAGE_SIZE"

TARGETS: Mapping[str, tuple[int, ...]] = {
    "trn1": (1,),
    "trn1n": (1,),
    "inf2": (1,),
    "trn2": (2, 1),
    "trn3": (2, 1),
}
"""Target → the physical cores that one logical core may be made of, the default first."""


@dataclass(frozen=True, slots=True)
class Target:
    """A chip as `--target` names it, and physical cores per logical core."""

    chip: str
    lnc: int

    @property
    def is_default(self) -> bool:
        """Whether cores are grouped as they are where nobody says how."""
        return self.lnc == TARGETS[self.chip][0]

    @property
    def is_compilers_default(self) -> bool:
        """Whether neuronx-cc is known to take this grouping where none is given."""
        return self.is_default and self.chip != "trn3"

    @property
    def name(self) -> str:
        """As it enters platforms: a NEFF runs on cores that are grouped as it was compiled for."""
        return self.chip if self.is_default else f"{self.chip}+lnc{self.lnc}"


def resolve_target(
    configured: str | None, flags: Sequence[Flag], environment: Mapping[str, str]
) -> Target:
    """The target that a config's `toolchain.target`, flags and environment agree on.

    Raises `ConfigError` where none of them names one, two differ, or there is no such target.
    """
    chip = _agreed(
        ("toolchain.target", configured),
        *_said_by(flags, TARGET),
        (TARGET_OVERRIDE, environment.get(TARGET_OVERRIDE)),
    )
    allowed = ", ".join(TARGETS)
    if chip is None:
        raise ConfigError(
            f"toolchain.target is not set; allowed: {allowed}",
            field="toolchain.target",
            hint="name the chip that the NEFFs are for: nothing of this host says it",
        )
    if chip not in TARGETS:
        raise ConfigError(
            f"neuronx-cc has no target {chip!r}; allowed: {allowed}",
            field="toolchain.target",
            value=chip,
        )
    lnc = _agreed(
        *_said_by(flags, LNC),
        (LOGICAL_CORES, environment.get(LOGICAL_CORES)),
    )
    possible = TARGETS[chip]
    if lnc is not None and lnc not in map(str, possible):
        raise ConfigError(
            f"on {chip} one logical core is {' or '.join(map(str, sorted(possible)))} physical, "
            f"not {lnc}",
            field=f"toolchain.flags ({LNC}) or {LOGICAL_CORES}",
            value=lnc,
        )
    return Target(chip, possible[0] if lnc is None else int(lnc))


def check_scratchpad(flags: Sequence[Flag], environment: Mapping[str, str]) -> None:
    """Raises `ConfigError` where the page size that the NEFF is compiled for is not the one that the
    engine's environment, of which this is a part, runs it with."""
    compiled, run = value_of(flags, SCRATCHPAD), environment.get(PAGE_SIZE) or None
    if run is None or compiled == run:
        return
    says = f"is {compiled}" if compiled else "is not given"
    raise ConfigError(
        f"{PAGE_SIZE} is {run} and the compiler's {SCRATCHPAD} {says}: they must match, or the NEFF "
        "fails when it is loaded",
        field=PAGE_SIZE,
        value=run,
        hint=f"add {SCRATCHPAD}={run} to toolchain.flags, or unset {PAGE_SIZE}",
    )


def _said_by(flags: Sequence[Flag], name: str) -> list[tuple[str, str | None]]:
    return [(f"the flag {name}", flag.value) for flag in flags if flag.name == name]


def _agreed(*said: tuple[str, str | None]) -> str | None:
    """The value that all who say one say; empty is unset."""
    stated = [(place, value) for place, value in said if value]
    if not stated:
        return None
    place, value = stated[0]
    for other, differing in stated:
        if differing != value:
            raise ConfigError(
                f"{place} says {value}, {other} says {differing}",
                field=place.removeprefix("the flag "),
                value=value,
                hint="let them agree, or leave one out",
            )
    return value
