"""Where vLLM Neuron keeps its compile cache, by its own rule (its documentation, "Compilation cache")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from neffbuild.cache import files

BELOW = Path("neuron/compile_cache")
"""The compile cache below `$VLLM_CACHE_ROOT`, and below `$NEURON_LIBTORCH_CACHE_ROOT`."""

_REMOTE = frozenset({"nfs", "nfs4", "lustre"})


def vllm_neuron_cache_root(
    environment: Mapping[str, str],
    file_system: Callable[[Path], str | None] = files.file_system,
) -> Path:
    """`$VLLM_CACHE_ROOT`, or where it is not set the folder in the home directory; on NFS or Lustre one in
    /tmp, since the engine refuses to compile on those."""
    stated = environment.get("VLLM_CACHE_ROOT")
    if stated:
        return Path(stated).expanduser()
    home = Path(environment.get("HOME") or "~").expanduser()
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache").expanduser()
    if file_system(home) in _REMOTE:
        return Path(f"/tmp/vllm_neuron_wdir_{environment.get('USER') or 'unknown'}")
    return caches / "vllm"


def compile_cache(environment: Mapping[str, str]) -> Path:
    """The folder of the entries."""
    return vllm_neuron_cache_root(environment) / BELOW
