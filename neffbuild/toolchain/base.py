"""What a compiler must offer to be a toolchain: capture → compile → load.

A toolchain is one module, found through the entry-point group `neffbuild.toolchains`, so a third
party adds one without touching this repository. It never knows where artifacts are kept: it is handed
a scratch folder to write to and files to load from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from neffbuild.cache.index import Fit
from neffbuild.cache.problem import FileCheck
from neffbuild.cache.recipe import ToolchainIdentity
from neffbuild.config.build import BuildConfig
from neffbuild.config.neuron_engine import PrefillRules
from neffbuild.grid.bucketer import QueryLenSupport
from neffbuild.grid.shapes import ALL_RANKS, Shape, unit_name
from neffbuild.grid.windows import WindowColumns, span_columns


class KVGroup(StrEnum):
    """Kinds of KV state a model's layers keep."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    RECURRENT = "recurrent"


KEPT_BY_POSITION = frozenset({KVGroup.FULL, KVGroup.SLIDING_WINDOW, KVGroup.MLA})
"""Kinds in which a token that comes to nothing is overwritten when its position is computed again."""


DeviceNeed = Callable[[BuildConfig, Shape], str | None]
"""Which device the compile of a config's shape needs beside it (`neuron`); None for none."""


def no_device(_config: BuildConfig, _shape: Shape) -> str | None:
    """Any host compiles any shape."""
    return None


Grouping = Callable[[BuildConfig, Shape], str | None]
"""Which units of a config one compile makes: those of the same text; None for one made by itself."""


def each_alone(_config: BuildConfig, _shape: Shape) -> str | None:
    """Every unit takes a compile of its own."""
    return None


FiledGraph = Callable[[BuildConfig, str], str | None]
"""The digest of the graph that lies in a file for a config's unit of a name; None where there is none."""


def no_filed_graph(_config: BuildConfig, _unit_name: str) -> str | None:
    """Graphs are captured when they are compiled."""
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a toolchain's programs can do; the planner decides from this, never from the name.

    `kv_groups` are the kinds of KV state it builds programs for; of `rolled_back` it can undo what a
    token did that came to nothing (a rejected draft, a placeholder). `window_columns` says how wide the
    block tables of sliding-window layers are. `prefill` is how its engine settles its prefill buckets,
    None where it has no prefill programs. `device_for` says which units are compiled beside a device,
    `together` which come of one compile, `filed_graph` whose graphs are given as files. With
    `replica_groups` a program names the global ranks of the collectives in it.
    """

    query_len_support: QueryLenSupport
    kv_groups: frozenset[KVGroup]
    rolled_back: frozenset[KVGroup] = KEPT_BY_POSITION
    speculation_under_dcp: bool = False
    device_for: DeviceNeed = no_device
    together: Grouping = each_alone
    filed_graph: FiledGraph = no_filed_graph
    window_columns: WindowColumns = span_columns
    prefill: PrefillRules | None = None
    replica_groups: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """What one worker compiles: a shape of one model for one toolchain, with its recipe and key."""

    config: BuildConfig
    shape: Shape
    recipe: Mapping[str, Any]
    key: str

    @property
    def bucket_name(self) -> str:
        return unit_name(self.shape, self.recipe.get("rank_scope", ALL_RANKS))


BESIDE = "beside"
"""The folder below a farm's shared one with the files of stored units (`Toolchain.beside`), a folder for
each by its key."""

ENGINE_FILES = "engine"
"""The folder of an artifact whose files are no part of the program: below `engine/<engine>/` lies what
that engine keeps in a cache of its own and finds there at its next start."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph. `graph_digest` is the digest of its canonical walk; `graph` is the
    toolchain's own and means nothing to anyone else. `engine_files` is what an engine that was started
    for the capture left in its own cache: name below `ENGINE_FILES` → content."""

    graph_digest: str
    graph: Any
    engine_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files a compile produced: the name each must have when loaded → where it lies now. Where the
    compile is what captured the graph, `graph_digest` is its digest, and counts instead of that of
    `Captured`. `others` are artifacts of other units that the same compile made."""

    files: Mapping[str, Path]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    graph_digest: str | None = None
    others: Sequence[OtherArtifact] = ()


@dataclass(frozen=True, slots=True)
class OtherArtifact:
    """An artifact beside the one that was asked for, and the recipe of its unit."""

    recipe: Mapping[str, Any]
    files: Mapping[str, Path]
    statistics: Mapping[str, Any]
    graph_digest: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """What compiling one unit is expected to take: wall seconds, resident bytes of everything it starts
    at their peak, bytes of scratch space."""

    seconds: float
    memory_bytes: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `neffbuild doctor`. `needed` is False for what a toolchain does without: slower, or
    for fewer targets."""

    subject: str
    ok: bool
    detail: str
    hint: str | None = None
    needed: bool = True


class BoundExecutable(Protocol):
    """A loaded program some of whose inputs are fixed; `free` names the others."""

    @property
    def free(self) -> tuple[str, ...]: ...

    def __call__(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run once with the free inputs given; outputs in the order of `Executable.outputs`."""
        ...


class Executable(Protocol):
    """A loaded program: no tracing, no compiling. `inputs` and `outputs` are names in its order (None
    for an output the graph returns as None)."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str | None, ...]: ...

    def bind(self, tensors: Mapping[str, Any]) -> BoundExecutable:
        """Fix those of the inputs that `tensors` names; it may hold others. Nothing is copied, so one
        set of weights serves any number of programs.

        Raises `ConfigError` for a tensor the program does not take.
        """
        ...


class Toolchain(Protocol):
    """One compiler."""

    name: str
    capabilities: Capabilities

    def identity(self, config: BuildConfig) -> ToolchainIdentity:
        """Name, route, target, versions, flags and source digest as they enter recipes.

        Imports nothing heavy. What cannot be known here is left out of `versions` and named in
        `ToolchainIdentity.unresolved` with what to pin. Raises `ConfigError` for a bad target or flag.
        """
        ...

    def refusal(self, config: BuildConfig, shape: Shape | None = None) -> str | None:
        """Why this toolchain cannot build the config (or one shape of it) on any host; None when it
        can."""
        ...

    def host_refusal(self, config: BuildConfig) -> str | None:
        """Why this host cannot compile the config's units (a compiler missing, a version other than
        the one pinned); None when it can. `compile` refuses for the same reasons."""
        ...

    def fit(self, platform: Mapping[str, Any]) -> Fit:
        """How this host suits a platform of this toolchain's artifacts (`ToolchainIdentity.platform`):
        why it cannot load them, by what can be seen here, and which of several it should. Imports
        nothing heavy."""
        ...

    def findings(self) -> list[Finding]:
        """What is installed, and whether compiles and loads can run here."""
        ...

    def prior(self, config: BuildConfig, shape: Shape) -> Expectation:
        """What compiling a shape is expected to take where nothing like it was ever measured. It orders
        units and bounds how many run at once; measurements replace it from the first run on. It depends
        on nothing but its arguments: machines that cannot talk cut a config into shards by it. Imports
        nothing heavy. A toolchain without it gets `neffbuild.farm.expectations.default_prior`."""
        ...

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing once in the server that workers are forked from."""
        ...

    def beside(self, unit: Unit) -> Sequence[str]:
        """Keys of other units whose artifacts save work when this one is compiled. Of those that the store
        has, the files are below `BESIDE` in the folder `shared` that `compile` is given. A toolchain
        without it is given none."""
        ...

    def capture(self, unit: Unit) -> Captured:
        """Trace the unit's graph. Raises `ToolchainRefusal` for what cannot be built."""
        ...

    def compile(
        self, unit: Unit, captured: Captured, scratch: Path, *, shared: Path | None = None
    ) -> Artifact:
        """Compile into `scratch`, leaving nothing outside it.

        `shared` is a folder that all units of one farm are given, for what they can share (precompiled
        headers); it may be there already, and several processes use it at once. Raises
        `ToolchainRefusal` for what `host_refusal` says, and when this host is not what the unit's
        recipe was made for, `CompilerFailure` (`neffbuild.toolchain.failures`) for what its compiler reports.
        """
        ...

    @property
    def file_checks(self) -> Mapping[str, FileCheck]:
        """Ending of a file's name → what says why such a file is not whole. Digests are right already when
        it is asked: this is for files whose builder was wrong. A toolchain without it has its files
        believed by their digests."""
        ...

    def load(self, files: Path, recipe: Mapping[str, Any]) -> Executable:
        """A ready executable from a folder that holds the artifact's files under their names.

        No tracing and no compiling. Raises `ToolchainRefusal` when this host cannot run it.
        """
        ...
