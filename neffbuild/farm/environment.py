"""What a worker sees of the environment: the keyed variables and a short list that changes no artifact."""

from __future__ import annotations

from collections.abc import Mapping

PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    # Which cores of a device this process was given: by a person, a container, or Ray for a task.
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
    # Not read by any compiler: it is where processes of this host find each other's locks.
    "XDG_RUNTIME_DIR",
)
"""Passed to workers without entering the key. TMPDIR is set too, to the unit's own scratch folder."""

_PUBLISHING = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"})

_FIXED = {
    # One unit is one worker's work. More threads per worker oversubscribe the host, and a server that
    # has threads must not be forked.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Compilers iterate over sets; the order must not differ between two builds of one unit.
    "PYTHONHASHSEED": "0",
}


def worker_environment(
    ambient: Mapping[str, str], keyed: Mapping[str, str], store_url: str
) -> dict[str, str]:
    """The whole environment of a worker: nothing of `ambient` but what is listed here.

    `keyed` is the environment in the units' recipes (it wins over everything else). Proxy and AWS
    variables are passed only to workers that publish to a store across the network.
    """
    passed = {name: ambient[name] for name in PASSED if name in ambient}
    if "://" in store_url and not store_url.startswith("file://"):
        passed |= {
            name: value
            for name, value in ambient.items()
            if name.startswith("AWS_") or name.upper() in _PUBLISHING
        }
    return {**_FIXED, **passed, **keyed}
