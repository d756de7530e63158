"""The route xla's graphs: `graph.hlo` files that vLLM Neuron has captured, one for each unit.

They are serialised HloModuleProto messages. Here they are taken by the unit they are filed under:

    HLO_DIR/decode_b4_ctx4096/graph.hlo    or    HLO_DIR/decode_b4_ctx4096.hlo
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache.canonical import digest_bytes
from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ToolchainRefusal
from neffbuild.toolchain.base import Captured, Unit

_LARGEST = (1 << 31) - 1
"""Bytes: no protobuf message is larger."""
_NAME_TAG = 0x0A
"""Field 1 of HloModuleProto, the module's name, which every writer puts first."""


@dataclass(frozen=True, slots=True)
class HloGraph:
    """`module` is the serialised HloModuleProto."""

    module: bytes


def filed_digest(config: BuildConfig, unit_name: str) -> str | None:
    """The digest of the graph that `toolchain.hlo_dir` has for a unit, as `capture_hlo` gives it; None
    where it has none that can be read."""
    if config.toolchain.hlo_dir is None:
        return None
    path = _graph_path(_places(Path(config.toolchain.hlo_dir), unit_name))
    try:
        return None if path is None else digest_bytes(path.read_bytes())
    except OSError:
        return None


def capture_hlo(unit: Unit) -> Captured:
    """The graph that `toolchain.hlo_dir` has for the unit; its digest is that of the file.

    Raises `ToolchainRefusal` where there is none, or it is no HLO.
    """
    folder = unit.config.toolchain.hlo_dir
    name = unit.bucket_name
    if folder is None:
        raise ToolchainRefusal(
            f"{name}: no graphs are given", hint="set toolchain.hlo_dir to where they are"
        )
    paths = _places(Path(folder), name)
    path = _graph_path(paths)
    if path is None:
        raise ToolchainRefusal(
            f"{folder} has no graph for {name}: neither {paths[0].relative_to(folder)} nor "
            f"{paths[1].relative_to(folder)} is there",
            field="toolchain.hlo_dir",
            value=folder,
            hint="capture it with vLLM Neuron, or compile without it (`--only`)",
        )
    try:
        size = path.stat().st_size
        content = path.read_bytes() if 0 < size <= _LARGEST else b""
    except OSError as error:
        raise ToolchainRefusal(
            f"{path} cannot be read: {error.strerror}", field="toolchain.hlo_dir", value=folder
        ) from error
    if not content or content[0] != _NAME_TAG:
        raise ToolchainRefusal(
            f"{path} is no HloModuleProto ({size} bytes)",
            field="toolchain.hlo_dir",
            value=folder,
            hint="HLO as text will not do: take graph.hlo as vLLM Neuron writes it",
        )
    return Captured(digest_bytes(content), HloGraph(content))


def _places(folder: Path, unit_name: str) -> tuple[Path, Path]:
    return folder / unit_name / "graph.hlo", folder / f"{unit_name}.hlo"


def _graph_path(places: tuple[Path, Path]) -> Path | None:
    return next((path for path in places if path.is_file()), None)
