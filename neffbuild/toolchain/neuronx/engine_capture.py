"""Capturing and compiling a unit by starting vLLM Neuron for its warm-up alone.

A start compiles a whole row (`neffbuild.toolchain.neuronx.engine_config`). The other units of the row come of
it too, so a farm runs one unit of a row at a time, and finds the others stored. Where one is not, because its
graph failed or the start ended before it was done, the engine is started again, with what is finished in its
cache beforehand: it then compiles what is missing and nothing else.

Never run against a real vLLM Neuron.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.cache.canonical import digest_document, digest_file
from neffbuild.cache.layouts.layout import entry_file
from neffbuild.cache.layouts.vllm_neuron import NAME
from neffbuild.cache.recipe import beside_recipe, recipe_key
from neffbuild.config.errors import NeffbuildError, ToolchainRefusal
from neffbuild.grid.shapes import Shape
from neffbuild.toolchain.base import BESIDE, Artifact, Capabilities, OtherArtifact, Unit
from neffbuild.toolchain.neuronx.engine_cache import (
    Entry,
    artifact_files,
    copy_finished,
    entries,
)
from neffbuild.toolchain.neuronx.engine_config import (
    NEURON,
    Row,
    compile_cache,
    engine_environment,
    engine_options,
    generation,
    row_of,
)
from neffbuild.toolchain.neuronx.engine_entries import RowUnits
from neffbuild.toolchain.neuronx.engine_start import engine_failure, model_folder, run_engine
from neffbuild.toolchain.neuronx.hosts import neuron_devices


@dataclass(frozen=True, slots=True)
class Start:
    """What the engine is started with for a unit, and the units that come of it. `device` is what has to
    be beside it, None where nothing has to."""

    unit: Unit
    release: tuple[int, int]
    device: str | None
    row: RowUnits

    @property
    def of(self) -> Row:
        return row_of(self.unit.shape)

    def options(self, model: str, draft: str | None) -> dict[str, Any]:
        return engine_options(self.unit.config, self.of, self.row.num_kv_blocks, model, draft)

    def environment(self, cache_root: str) -> dict[str, str]:
        chip = str(self.unit.recipe["toolchain"]["target"]).partition("+")[0]
        on_device = self.device == NEURON
        return engine_environment(self.of, chip, self.release, cache_root, on_device=on_device)

    @property
    def digest(self) -> str:
        """The same for all units of a row: of everything the start is told, but where it lies."""
        return digest_document(
            {"options": self.options("", None), "environment": self.environment("")}
        )


def make_start(unit: Unit, capabilities: Capabilities) -> Start:
    """The start for a unit of a config's grid.

    Raises `ToolchainRefusal` for a release of vLLM Neuron that cannot be started, and where it has to be
    beside a device and this host has none.
    """
    device = capabilities.device_for(unit.config, unit.shape)
    if device == NEURON and not neuron_devices():
        raise ToolchainRefusal(
            f"{unit.bucket_name} is captured beside a Neuron device, and this host has none (/dev/neuron*): "
            "vLLM Neuron does not compile speculation without",
            hint="compile it on a Trainium instance, or on a Ray cluster with one (`--executor ray`)",
        )
    recipe = unit.recipe
    release = str(recipe["toolchain"]["versions"].get("vllm-neuron"))
    known = generation(release)
    if known is None:
        raise ToolchainRefusal(f"vLLM Neuron {release} cannot be started for its graphs")
    return Start(unit, known, device, row_units(unit, capabilities))


def row_units(unit: Unit, capabilities: Capabilities) -> RowUnits:
    """The units of a unit's row, itself among them."""
    blocks = int(unit.recipe["num_kv_blocks"])
    return RowUnits.of(unit.config, capabilities, row_of(unit.shape), blocks)


def row_recipes(unit: Unit, row: RowUnits) -> dict[Shape, dict[str, Any]]:
    """The recipes of the other units of a unit's row, of all families."""
    return {
        shape: beside_recipe(unit.recipe, unit.config, shape)
        for shape, _ in row.units
        if shape != unit.shape
    }


def row_keys(unit: Unit, row: RowUnits) -> list[str]:
    """The keys of these."""
    return [recipe_key(recipe) for recipe in row_recipes(unit, row).values()]


def build(start: Start, scratch: Path, shared: Path | None) -> Artifact:
    """Compile a unit below `scratch`; `shared` is the folder of the farm, in which units of the row lie that
    are stored.

    Raises `CompilerFailure` for what the engine and its compiler report, `NeffbuildError` where what they
    leave cannot be told apart.
    """
    pool = (shared or scratch) / "finished" / start.digest[:16]
    root = Path(compile_cache(str(scratch / "vllm")))
    root.mkdir(parents=True)
    copy_finished(pool, root)
    for key in row_keys(start.unit, start.row) if shared else ():
        copy_finished(pool.parents[1] / BESIDE / key / entry_file(NAME, ""), root)
    own = [entry for entry in _own(start, root) if entry.fault is None]
    if not own:
        own = _started(start, scratch, root, pool)
    return _artifact(start, root, own)


def _started(start: Start, scratch: Path, root: Path, pool: Path) -> list[Entry]:
    """The unit's finished entries after a start of the engine."""
    model = model_folder(start.unit.config.model, scratch / "model")
    draft = start.unit.config.draft_model
    ended = run_engine(
        start.options(model, model_folder(draft, scratch / "draft") if draft else None),
        start.environment(str(scratch / "vllm")),
        scratch,
    )
    copy_finished(root, pool)
    own = _own(start, root)
    finished = [entry for entry in own if entry.fault is None]
    failure = engine_failure(ended)
    if finished:
        if failure is not None:
            _say(f"the start failed after this unit was finished: {failure.message}")
        return finished
    found = _left(start, root, own)
    if failure is not None:
        raise type(failure)(
            f"{failure.message} ({found})", hint=failure.hint, failure=failure.failure
        )
    raise NeffbuildError(
        f"vLLM Neuron ended well, but {found}",
        hint="compare what `neffbuild explain` says of the unit with the engine's own options",
    )


def _own(start: Start, root: Path) -> list[Entry]:
    """The entries that are for the unit. Raises `NeffbuildError` for one that may be another's too, and
    for more than the ranks could have."""
    own = _of(start.unit.shape, entries(root, start.row))
    for entry in own:
        if len(entry.shapes) > 1:
            fits = " and ".join(sorted(shape.bucket_name for shape in entry.shapes))
            raise NeffbuildError(
                f"entry {entry.key} may be of {fits}: their graphs take inputs of the same shapes",
                hint="leave all but one of these buckets out, the engine has one program for them",
            )
    finished = [entry.key for entry in own if entry.fault is None]
    ranks = start.unit.config.serve.tensor_parallel_size
    if len(finished) > ranks:
        raise NeffbuildError(
            f"entries {' and '.join(finished)} are both of {start.unit.bucket_name}, and each of its "
            f"ranks ({ranks}) has one at most",
            hint="the engine compiles graphs with the inputs of a step that are none",
        )
    return own


def _of(shape: Shape, found: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in found if shape in entry.shapes]


def _left(start: Start, root: Path, own: Sequence[Entry]) -> str:
    """What a start has left in place of the unit's entry, in words."""
    name = start.unit.bucket_name
    if own:
        return "; ".join(
            f"entry {entry.key} of {name} is not finished: {entry.fault}" for entry in own
        )
    others = entries(root, start.row)
    unstated = [entry for entry in others if entry.unstated is not None]
    if unstated:
        said = "; ".join(
            f"entry {entry.key} does not say what it is of: {entry.unstated}" for entry in unstated
        )
        return f"there is no entry of {name}, and {said}"
    keys = ", ".join(entry.key for entry in others) or "none"
    return f"there is no entry of {name} among those it left: {keys}"


def _artifact(start: Start, root: Path, own: Sequence[Entry]) -> Artifact:
    found = entries(root, start.row)
    strangers = [entry for entry in found if not entry.shapes]
    for entry in strangers:
        _say(f"entry {entry.key} is of no unit ({entry.unstated or 'no such bucket'}): not stored")
    made = _made(root, start.unit.recipe, own)
    return Artifact(
        files=made.files,
        statistics={
            **made.statistics,
            "engine_entries_of_no_unit": [entry.key for entry in strangers],
        },
        graph_digest=made.graph_digest,
        others=[
            _made(root, recipe, others)
            for shape, recipe in row_recipes(start.unit, start.row).items()
            if (others := _of(shape, found)) and _certain(start, others)
        ],
    )


def _certain(start: Start, found: Sequence[Entry]) -> bool:
    """Whether entries that fit another unit of the row are all that it needs; if not, it says so itself."""
    ranks = start.unit.config.serve.tensor_parallel_size
    whole = all(entry.fault is None and len(entry.shapes) == 1 for entry in found)
    return whole and len(found) <= ranks


def _made(root: Path, recipe: Mapping[str, Any], found: Sequence[Entry]) -> OtherArtifact:
    graphs = sorted(digest_file(root / str(entry.found.graph)) for entry in found)
    return OtherArtifact(
        recipe=recipe,
        files={name: path for entry in found for name, path in artifact_files(root, entry).items()},
        statistics={"engine_keys": [entry.key for entry in found]},
        graph_digest=graphs[0] if len(graphs) == 1 else digest_document(graphs),
    )


def _say(line: str) -> None:
    sys.stdout.write(f"neffbuild: {line}\n")
    sys.stdout.flush()
