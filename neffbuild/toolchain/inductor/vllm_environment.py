"""Which `VLLM_` variables are ingredients of a unit: all of them, but those named here.

vLLM reads some hundred variables, many of which change the graph; one that nobody here has heard of
changes the key rather than being forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

INERT = frozenset(
    {
        # where things are kept
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE",
        "VLLM_MEDIA_CACHE",
        "VLLM_RPC_BASE_PATH",
        "VLLM_DEBUG_DUMP_PATH",
        "VLLM_MODEL_REDIRECT_PATH",
        "VLLM_TUNED_CONFIG_FOLDER",
        # addresses, ports, secrets
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "VLLM_API_KEY",
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_USAGE_STATS_SERVER",
        # logging and statistics
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_COLOR",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        # which plugins are loaded (what they change shows in the graph), how requests travel
        "VLLM_PLUGINS",
        "VLLM_RPC_TIMEOUT",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        # how processes are started, watched and stopped
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "VLLM_SERVER_DEV_MODE",
        # size of the KV pool, binding of threads
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        # vLLM's own compile cache, beside ours
        "VLLM_USE_AOT_COMPILE",
        "VLLM_FORCE_AOT_LOAD",
        "VLLM_DISABLE_COMPILE_CACHE",
    }
)
# Kubernetes tells every pod where its services are, one that is called vllm too.
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$|_PORT$")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL")
"""A recipe is pushed for everybody to read."""


def keyed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that enter recipes of engine vllm, and are handed to its workers."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("VLLM_")
        and name not in INERT
        and not _OF_A_SERVICE.search(name)
        and not _SECRET.search(name)
    }
