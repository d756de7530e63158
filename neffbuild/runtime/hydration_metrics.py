"""How the hydration went, beside the engine's own metrics: in the default registry of
`prometheus_client`, which vLLM serves at `/metrics`."""

from __future__ import annotations

from neffbuild.runtime.hydration import Hydration

_HELP = {
    "success": "1 when a manifest was hydrated at the start of this engine, 0 when it failed.",
    "seconds": "Seconds that the hydration took.",
    "bytes": "Bytes copied from the store.",
    "hits": "Units of the manifest that are in the local cache.",
    "misses": "Units of the manifest's plan that are not stored.",
}


def expose(hydration: Hydration) -> None:
    """Set `neffbuild_hydrate_…`, where `prometheus_client` is installed. Call it once per process."""
    try:
        from prometheus_client import Gauge
    except ImportError:
        return
    values = {
        "success": float(hydration.manifest is not None),
        "seconds": hydration.seconds,
        "bytes": float(hydration.bytes_copied),
        "hits": float(hydration.hits),
        "misses": float(hydration.misses),
    }
    for name, text in _HELP.items():
        # Several API servers report the same hydration, each its own copy of it.
        gauge = Gauge(f"neffbuild_hydrate_{name}", text, multiprocess_mode="max")
        gauge.set(values[name])
