"""From (manifest, shape) to a ready executable: nothing is traced, compiled or keyed.

Works in a process that has neither a C++ compiler nor `torch._dynamo`: the manifest says which entry a
shape has, the store lays its files out (digests checked before first use), the toolchain opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from neffbuild.cache.catalog import read_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry
from neffbuild.cache.loaded import materialise
from neffbuild.cache.manifest import Manifest, ManifestUnit
from neffbuild.cache.recipe import config_digest
from neffbuild.cache.records import read_pointer
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import MissingUnit, ToolchainRefusal
from neffbuild.grid.shapes import ALL_RANKS, Shape
from neffbuild.runtime.counters import Counters
from neffbuild.runtime.missing import UNNAMED_CONFIG, missing_unit
from neffbuild.toolchain.base import Executable, Toolchain
from neffbuild.toolchain.registry import load_toolchain


def config_manifest(config: BuildConfig, store: DirectoryStore) -> Manifest:
    """The manifest that was compiled or pulled for a config.

    Raises `MissingUnit` when the store has none.
    """
    digest = read_pointer(store, config_digest(config))
    manifest = read_manifest(store, digest) if digest else None
    if manifest is None:
        raise MissingUnit(
            f"{store.url} has no manifest of {config.source}",
            field="cache.local",
            value=store.url,
            hint="`neffbuild compile` it, or `neffbuild pull` its tag",
        )
    return manifest


class Loader:
    """The executables of one manifest, each loaded once, when it is first asked for.

    `counters.hits` counts programs loaded, `counters.misses` shapes asked for in vain.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: DirectoryStore,
        toolchain: Toolchain,
        *,
        architecture: Mapping[str, Any] | None = None,
        draft_architecture: Mapping[str, Any] | None = None,
        config: str = UNNAMED_CONFIG,
        rank_scope: str = ALL_RANKS,
    ) -> None:
        """`rank_scope` is that of the rank that loads: of programs that not all ranks share it takes its
        own. `architecture` and `draft_architecture` are the normalised `config.json` of the models about to
        be served, where they are known: a program built for another one is refused. `config` names the
        serve config's file in messages."""
        self.manifest = manifest
        self.counters = Counters()
        self._store = store
        self._toolchain = toolchain
        self._architectures = {"model": architecture, "draft_model": draft_architecture}
        self._config = config
        self._units = {
            unit.shape: unit
            for unit in manifest.units
            if unit.rank_scope in (ALL_RANKS, rank_scope)
        }
        self._loaded: dict[Shape, Executable] = {}

    @classmethod
    def from_config(cls, config: BuildConfig, store: DirectoryStore) -> Self:
        """The loader of what was compiled or pulled for a config. Raises as `config_manifest` does."""
        return cls(
            config_manifest(config, store),
            store,
            load_toolchain(config.toolchain.name),
            architecture=config.model.architecture,
            draft_architecture=config.draft_model.architecture if config.draft_model else None,
            config=config.source,
        )

    @property
    def stored(self) -> tuple[Shape, ...]:
        """The shapes of the manifest that have a program in it."""
        return tuple(shape for shape, unit in self._units.items() if self._entry(unit) is not None)

    def load(self, shape: Shape) -> Executable:
        """The executable of a shape.

        Raises `MissingUnit` naming unit, key and the command that builds it; `ToolchainRefusal` when it
        was built for another model, torch or kind of host; `IntegrityError` when its files are damaged.
        """
        executable = self._loaded.get(shape)
        if executable is None:
            executable = self._loaded[shape] = self._load(shape)
        return executable

    def load_all(self) -> dict[Shape, Executable]:
        """Every unit of the manifest. Raises as `load` does, before anything is loaded when some are
        missing."""
        if missing := self.manifest.missing:
            self.counters.misses += len(missing)
            first = self._missing(missing[0].shape)
            if len(missing) == 1:
                raise first
            names = ", ".join(unit.bucket_name for unit in missing[1:])
            raise MissingUnit(f"{first.message}; also missing: {names}", hint=first.hint)
        return {shape: self.load(shape) for shape in self.stored}

    def _entry(self, unit: ManifestUnit | None) -> Entry | None:
        return self.manifest.entries.get(unit.key) if unit and unit.key else None

    def _load(self, shape: Shape) -> Executable:
        unit = self._units.get(shape)
        entry = self._entry(unit)
        if entry is None:
            self.counters.misses += 1
            raise self._missing(shape)
        self._check_model(shape, entry)
        executable = self._toolchain.load(materialise(self._store, entry), entry.recipe)
        self.counters.hits += 1
        return executable

    def _missing(self, shape: Shape) -> MissingUnit:
        unit = self._units.get(shape)
        key = unit.key if unit else None
        return missing_unit(shape.bucket_name, key, self._store.url, self._config)

    def _check_model(self, shape: Shape, entry: Entry) -> None:
        for ingredient, serving in self._architectures.items():
            built_for = entry.recipe[ingredient]
            # Only a draft's own programs are built for a draft.
            if serving is None or built_for is None or built_for == serving:
                continue
            names = sorted(
                name for name in {*built_for, *serving} if built_for.get(name) != serving.get(name)
            )
            draft = ingredient == "draft_model"
            raise ToolchainRefusal(
                f"unit {shape.bucket_name} was compiled for another {'draft' if draft else 'model'}; its "
                f"config.json differs in {', '.join(names)}",
                field="serve.speculative_config.model" if draft else "serve.model",
                hint="serve the model the manifest was compiled for, or compile for this one",
            )
