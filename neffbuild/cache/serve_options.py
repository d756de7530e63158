"""Which serve options a recipe leaves out, per family, each with its reason.

The whole serve config is an ingredient of every recipe. What is named here is taken out again; what is
not named stays in and changes the key. A dotted path addresses a nested option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.serve import ServeConfig
from neffbuild.config.values import shown
from neffbuild.grid.shapes import Family

_BUCKETS = "additional_config.neuron_config"
_DRAFT = frozenset({Family.DRAFT, Family.DRAFT_PREFILL})
_PREFILL = frozenset({Family.PREFILL, Family.DRAFT_PREFILL})
_ALL = frozenset(Family)
_AUXILIARY_LAYERS = "eagle_aux_hidden_state_layer_ids"
_DFLASH_LAYERS = "target_layer_ids"


@dataclass(frozen=True, slots=True)
class Removal:
    """One option that the recipes of `families` leave out."""

    path: str
    reason: str
    families: frozenset[Family] = _ALL


def _removals(reason: str, *paths: str, families: frozenset[Family] = _ALL) -> tuple[Removal, ...]:
    return tuple(Removal(path, reason, families) for path in paths)


INERT: tuple[Removal, ...] = (
    *_removals(
        "a path or name: the architecture it leads to is an ingredient of its own",
        "model",
        "hf_config_path",
        "speculative_config.model",
    ),
    *_removals(
        "which weights are fetched: weights are never inside an artifact",
        "revision",
        "load_format",
        "download_dir",
        "model_loader_extra_config",
        "ignore_patterns",
        "hf_token",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "max_parallel_loading_workers",
        "pt_load_map_location",
        "use_tqdm_on_load",
        "lora_modules",
        "speculative_config.revision",
    ),
    *_removals(
        "the tokenizer never reaches a graph",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
    ),
    *_removals(
        "where the server listens and how it talks to clients",
        "host",
        "port",
        "uds",
        "grpc",
        "grpc_port",
        "root_path",
        "api_key",
        "api_server_count",
        "headless",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_ciphers",
        "enable_ssl_refresh",
        "allow_credentials",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allowed_local_media_path",
        "allowed_media_domains",
        "middleware",
        "h11_max_header_count",
        "h11_max_incomplete_event_size",
        "sse_keep_alive_interval",
        "stream_interval",
        "shutdown_timeout",
        "served_model_name",
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "trust_request_chat_template",
        "response_role",
        "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_server",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "return_tokens_as_token_ids",
        "enable_request_id_headers",
        "enable_prompt_tokens_details",
        "enable_server_load_tracking",
        "enable_force_include_usage",
        "enable_tokenizer_info_endpoint",
        "enable_offline_docs",
        "disable_fastapi_docs",
        "anthropic_disabled_thinking_effort",
        "cohere_format",
        "cohere_is_reasoning_model",
        "enable_scale_out",
        "fail_on_environ_validation",
        "fingerprint_mode",
        "fingerprint_value",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "renderer_num_workers",
        "tokens_only",
        "tool_strict_level",
        "trust_request_mm_kwargs",
        "max_log_len",
    ),
    *_removals(
        "logging, tracing and metrics",
        "disable_log_stats",
        "enable_log_requests",
        "enable_log_outputs",
        "enable_log_deltas",
        "enable_logging_iteration_details",
        "log_error_stack",
        "log_level",
        "logging_config",
        "uvicorn_log_level",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "log_config_file",
        "otlp_traces_endpoint",
        "collect_detailed_traces",
        "show_hidden_metrics_for_version",
        "aggregate_engine_logging",
        "cudagraph_metrics",
        "custom_histogram_buckets",
        "enable_mfu_metrics",
        "enable_per_request_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_events_config",
        "per_request_spec_decode_metrics",
        "profiler_config",
    ),
    *_removals(
        "where the engine keeps its own caches and dumps",
        "compilation_config.cache_dir",
        "compilation_config.debug_dump_path",
    ),
    *_removals(
        "how ranks find each other: addresses and ports",
        "master_addr",
        "master_port",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_supervisor_port",
        "kv_transfer_config.engine_id",
        "kv_transfer_config.kv_ip",
        "kv_transfer_config.kv_port",
    ),
    *_removals(
        "how processes are started and watched",
        "cpu_distributed_timeout_seconds",
        "distributed_timeout_seconds",
        "dp_supervisor_probe_failure_threshold",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "ray_workers_use_nsight",
    ),
    *_removals(
        "which of the ranks a process is, and its device: the rank scope is an ingredient of its own",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "device_ids",
        "kv_transfer_config.kv_rank",
        "node_rank",
    ),
    *_removals(
        "sampling settings, which reach a step as data",
        "seed",
        "generation_config",
        "override_generation_config",
    ),
)
"""What no graph of any family can see."""

FAMILY_REMOVALS: tuple[Removal, ...] = (
    *_removals(
        "only sizes the KV pool: num_kv_blocks is an ingredient of its own",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    ),
    *_removals(
        "stated by the shape",
        "max_num_seqs",
        f"{_BUCKETS}.num_seqs_buckets",
        f"{_BUCKETS}.decode_context_length_buckets",
        f"{_BUCKETS}.num_batched_tokens_buckets",
        f"{_BUCKETS}.verify_query_len_buckets",
        f"{_BUCKETS}.kv_segment_size_buckets",
    ),
    *_removals(
        "sizes prefill steps: a decode graph does not see it",
        "max_num_batched_tokens",
        families=_ALL - _PREFILL,
    ),
    *_removals(
        "the without-spec target does not draft: its graph sees the auxiliary layers alone",
        "speculative_config.num_speculative_tokens",
        families=frozenset({Family.TARGET_WITHOUT_SPEC, Family.PREFILL}),
    ),
    *_removals(
        "how the draft runs: the target's graph sees the auxiliary layers alone",
        "speculative_config.max_model_len",
        "speculative_config.draft_tensor_parallel_size",
        "speculative_config.quantization",
        families=_ALL - _DRAFT,
    ),
)
"""What the graph of some family cannot see, or what its shape or another ingredient states."""


def serve_ingredient(serve: ServeConfig, family: Family) -> dict[str, Any]:
    """The normalised serve config without what `family`'s recipe leaves out."""
    document = graph_options(serve)
    for removal in FAMILY_REMOVALS:
        if family in removal.families:
            _remove(document, removal.path.split("."))
    return document


def graph_options(serve: ServeConfig) -> dict[str, Any]:
    """The normalised serve config without what no graph can see (secrets and addresses included)."""
    document = serve.model_dump(mode="json")
    for removal in INERT:
        _remove(document, removal.path.split("."))
    return document


def removed_options(serve: ServeConfig, family: Family) -> Iterator[tuple[str, str]]:
    """(path, reason) of every option that is set in `serve` and left out for `family`."""
    document = serve.model_dump(mode="json")
    for removal in (*INERT, *FAMILY_REMOVALS):
        if family in removal.families and _present(document, removal.path.split(".")):
            yield removal.path, removal.reason


def auxiliary_layers(config: BuildConfig) -> list[int] | None:
    """Target layers whose hidden states a draft reads, as it states them; None without speculation.

    An EAGLE3 draft: `eagle_aux_hidden_state_layer_ids`, else vLLM's default for a target of n layers: 2,
    n // 2, n - 3. A DFlash draft: the same, or `dflash_config.target_layer_ids`. Raises `ConfigError` for
    what is no list of integers, and for a DFlash draft that states neither.
    """
    if config.draft_model is None:
        return None
    draft, name = config.draft_model.architecture, config.draft_model.name
    for section, key in (
        (None, _AUXILIARY_LAYERS),
        ("eagle_config", _AUXILIARY_LAYERS),
        ("dflash_config", _DFLASH_LAYERS),
    ):
        source = draft if section is None else draft.get(section)
        if isinstance(source, Mapping) and (stated := source.get(key)):
            return _layer_ids(stated, key, name)
    speculation = config.serve.speculative_config
    if speculation is not None and speculation.method == "dflash":
        return _layer_ids(None, _DFLASH_LAYERS, name)
    layers = config.model.num_hidden_layers
    return [2, layers // 2, layers - 3]


def _layer_ids(stated: Any, key: str, draft: str) -> list[int]:
    if not isinstance(stated, list) or not all(type(layer) is int for layer in stated):
        raise ConfigError(
            f"config.json of model {draft}: {key} is {shown(stated)}; allowed: a list of integers",
            field=key,
            value=stated,
        )
    return list(stated)


def _remove(document: dict[str, Any], path: list[str]) -> None:
    *parents, last = path
    for name in parents:
        child = document.get(name)
        if not isinstance(child, dict):
            return
        document = child
    document.pop(last, None)


def _present(document: dict[str, Any], path: list[str]) -> bool:
    value: Any = document
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return value is not None
