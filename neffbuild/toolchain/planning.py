"""A plan from a config: the toolchain's capabilities and identity, the grid and the store, joined."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from neffbuild.cache.catalog import read_manifest, stored_keys
from neffbuild.cache.manifest import ManifestUnit
from neffbuild.cache.plan import Plan, PlannedUnit, Status, StoredKeys, make_plan
from neffbuild.cache.recipe import ToolchainIdentity, config_digest
from neffbuild.cache.records import read_pointer
from neffbuild.cache.store import Store
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError, ToolchainRefusal
from neffbuild.config.findings import Findings
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.expand import Grid, WarmUp, expand, symbolic_grid
from neffbuild.grid.phases import Phase, served_phases
from neffbuild.grid.ranks import rank_scopes
from neffbuild.grid.windows import span_columns
from neffbuild.toolchain.base import Capabilities, Toolchain
from neffbuild.toolchain.kv_groups import kv_groups

OWN_ENGINE = "reference"


def plan_config(config: BuildConfig, toolchain: Toolchain, store: Store) -> Plan:
    """Every shape of the config with its key and what `store` has of it.

    Raises `ConfigError` for a config the toolchain cannot even plan or its engine would not start with
    (`ToolchainRefusal` where it would have to speculate over state it cannot roll back), `StoreError`
    when the store cannot be read.
    """
    return plan_with(config, toolchain, lambda keys: stored_keys(store, keys))


def plan_with(config: BuildConfig, toolchain: Toolchain, stored: StoredKeys) -> Plan:
    """As `plan_config`, with `stored` to say what is there."""
    _refuse_lasting_drafts(config, toolchain)
    identity = toolchain.identity(config)
    capabilities = _engine_capabilities(toolchain, identity)
    findings = Findings(config.source)
    with findings.stage():
        prefill = capabilities.prefill(config, findings) if capabilities.prefill else None
        phases = served_phases(config, prefill_programs=prefill is not None)
    if identity.kv_blocks is not None:
        findings.note(
            f"the KV pool of {identity.kv_blocks} blocks follows from the engine's published formula, which "
            "has not been checked on a device: set serve.num_gpu_blocks_override, there and here, to be "
            "sure of it"
        )
    config = replace(config, notes=(*config.notes, *findings.notes))
    bucketer = Bucketer.from_config(
        config,
        query_len_support=capabilities.query_len_support,
        window_columns=capabilities.window_columns,
        prefill=prefill,
        phases=phases,
    )
    scopes = rank_scopes(config.serve, replica_groups=capabilities.replica_groups)
    grid = _grid(identity, bucketer)
    plan = make_plan(
        config,
        _with_graphs(config, identity),
        bucketer,
        grid,
        stored,
        rank_scopes=scopes,
        filed_graph=partial(capabilities.filed_graph, config),
    )
    units = (
        replace(unit, needs=capabilities.device_for(config, unit.shape))
        if unit.status is not Status.CANNOT_OCCUR
        else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))


def require_buckets(config: BuildConfig, toolchain: Toolchain) -> None:
    """Raises `ToolchainRefusal` for a config whose steps are not dispatched onto buckets, `ConfigError` for
    one of a worker that only prefills."""
    identity = toolchain.identity(config)
    if identity.symbolic_shapes:
        raise ToolchainRefusal(
            f"with engine {identity.engine} there are no buckets to replay steps over: one program serves "
            "every batch and context, and the engine runs the steps",
            field="toolchain.engine",
            value=identity.engine,
            hint="send the engine requests instead, or leave toolchain.engine out",
        )
    has_prefill = _engine_capabilities(toolchain, identity).prefill is not None
    if Phase.DECODE not in served_phases(config, prefill_programs=has_prefill):
        raise ConfigError(
            "there are no decode steps to replay: the worker only prefills",
            field="serve.kv_transfer_config.kv_role",
            value=(config.serve.kv_transfer_config or {}).get("kv_role"),
            hint="replay the config of the workers that decode",
        )


def _engine_capabilities(toolchain: Toolchain, identity: ToolchainIdentity) -> Capabilities:
    """What programs can do in the engine they are for. Our own runs decode steps alone, on one rank, and
    its tables of sliding windows are as wide as the steps need."""
    if identity.engine != OWN_ENGINE:
        return toolchain.capabilities
    return replace(
        toolchain.capabilities, prefill=None, replica_groups=False, window_columns=span_columns
    )


def _with_graphs(config: BuildConfig, identity: ToolchainIdentity) -> ToolchainIdentity:
    """Graphs that are given as files are in the keys: without them there are none."""
    folder = config.toolchain.hlo_dir
    if folder is None or Path(folder).is_dir():
        return identity
    lacking = f"toolchain.hlo_dir {folder} is not here, and its graphs are in the keys"
    return replace(identity, unresolved=(*identity.unresolved, lacking))


def _grid(identity: ToolchainIdentity, bucketer: Bucketer) -> Grid:
    if identity.symbolic_shapes:
        return symbolic_grid()
    # Our own runtime loads what its steps reach; other engines warm up every shape they list.
    warm_up = WarmUp.REACHABLE if identity.engine == OWN_ENGINE else WarmUp.FULL_PRODUCT
    return expand(bucketer, warm_up)


def _refuse_lasting_drafts(config: BuildConfig, toolchain: Toolchain) -> None:
    """Verification computes drafts that may be rejected, and placeholders: they must leave no trace."""
    if config.serve.speculative_config is None:
        return
    models = {"serve.model": config.model, "serve.speculative_config.model": config.draft_model}
    for field, model in models.items():
        lasting = (kv_groups(model) if model else frozenset()) - toolchain.capabilities.rolled_back
        if model and lasting:
            kinds = " and ".join(sorted(group.replace("_", " ") for group in lasting))
            raise ToolchainRefusal(
                f"{model.name} keeps {kinds} state, in which toolchain {toolchain.name} cannot roll back "
                "rejected drafts and placeholders: speculation would change what it computes",
                field=field,
                value=model.name,
                hint="serve it without speculative_config, or use a toolchain that rolls such state back",
            )


def units_to_serve(
    config: BuildConfig, toolchain: Toolchain, store: Store
) -> tuple[Bucketer, dict[str, PlannedUnit | ManifestUnit]]:
    """The bucketer of a config and key → unit of what its steps need.

    A machine that only serves may lack a tool whose version is in the keys; there the manifest that was
    compiled or pulled for the config says what the keys are. Raises `ConfigError` when neither does.
    """
    plan = plan_config(config, toolchain, store)
    if not plan.identity.unresolved:
        return plan.bucketer, {unit.key: unit for unit in plan.units if unit.key}
    digest = read_pointer(store, config_digest(config))
    manifest = read_manifest(store, digest) if digest else None
    if manifest is None:
        raise ConfigError(
            f"units cannot be keyed here ({'; '.join(plan.identity.unresolved)}) and {store.url} has "
            "no manifest of this config",
            field="toolchain.versions",
            hint="pull the config's tag, or pin the versions",
        )
    return plan.bucketer, {unit.key: unit for unit in manifest.units if unit.key}
