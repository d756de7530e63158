"""The options of `vllm serve`, as vLLM 0.32.0 declares them: names, arities, abbreviations.

Facts about vLLM, kept here so that its command line is read without importing it. An option that is
not here (a newer vLLM's, a plugin's) is kept as it was given.
"""

# One line per name would bury the few rules below.
# ruff: noqa: SIM905

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffbuild.config.errors import ConfigError

SWITCHES = frozenset(
    """
    aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
    cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization
    disable_sliding_window disable_uvicorn_access_log enable_auto_tool_choice
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
    enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas
    enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras
    enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics
    enable_prefix_caching enable_prompt_embeds enable_prompt_tokens_details
    enable_request_id_headers enable_return_routed_experts enable_scale_out
    enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh
    enable_tokenizer_info_endpoint enable_tower_connector_lora enable_trace_replay enforce_eager
    exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc
    headless interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill
    language_model_only log_error_stack long_prefill_token_threshold_adaptive
    mm_device_do_normalize mm_encoder_only numa_bind ray_workers_use_nsight return_sampling_mask
    return_tokens_as_token_ids scheduler_reserve_full_isl skip_mm_profiling skip_tokenizer_init
    sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay tokens_only
    trust_remote_code trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel
    use_replayssm use_tqdm_on_load
    """.split()
)
"""Take no value; `--no-NAME` turns one off where it is among `NEGATIONS`."""

NEGATIONS = frozenset(f"no_{name}" for name in SWITCHES) - frozenset(
    """
    no_aggregate_engine_logging no_data_parallel_multi_port_external_lb no_disable_log_stats no_grpc
    no_headless
    """.split()
)
"""The ways to turn a switch off that there are."""

NOT_OFF_BY_DEFAULT = frozenset(
    """
    async_scheduling cohere_is_reasoning_model dcp_q_replicate disable_cascade_attn
    disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
    enable_batch_sharded_sampling enable_chunked_prefill enable_flash_late_interaction
    enable_flashinfer_autotune enable_log_deltas enable_lora enable_prefix_caching
    mm_device_do_normalize scheduler_reserve_full_isl swa_bounded_replay use_tqdm_on_load
    """.split()
)
"""Switches that are on, or decided by the engine, unless `--no-NAME` is given."""

LISTS = frozenset(
    """
    allowed_media_domains api_key collect_detailed_traces cpu_offload_params
    cudagraph_capture_sizes ignore_patterns kv_cache_dtype_skip_layers logits_processors
    lora_modules lora_target_modules numa_bind_cpus numa_bind_nodes offload_params
    served_model_name sleep_preserve_parameter_names
    """.split()
)
"""Take one or more values."""

JSON = frozenset(
    """
    additional_config allowed_headers allowed_methods allowed_origins attention_config
    aux_output_config compilation_config custom_histogram_buckets default_chat_template_kwargs
    default_mm_loras diffusion_config ec_manager_config ec_transfer_config engram_config
    eplb_config fault_tolerance_config hf_overrides ir_op_priority kernel_config
    kv_events_config kv_transfer_config limit_mm_per_prompt logging_config media_io_kwargs
    mm_processor_kwargs model_class_overrides model_loader_extra_config
    override_generation_config pooler_config profiler_config pt_load_map_location
    quantization_config reasoning_config speculative_config structured_outputs_config
    watermark_config weight_transfer_config
    """.split()
)
"""Take a JSON value, or its parts one by one: `--NAME.part VALUE`, `--NAME.list+ VALUE`."""

VALUES = frozenset(
    """
    all2all_backend allowed_local_media_path anthropic_disabled_thinking_effort api_server_count
    attention_backend block_size chat_template chat_template_content_format code_revision
    cohere_format config_format convert cp_kv_cache_interleave_size
    cpu_distributed_timeout_seconds cpu_offload_gb data_parallel_address data_parallel_backend
    data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
    data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    decode_context_parallel_size device_ids disable_access_log_for_endpoints
    distributed_executor_backend distributed_timeout_seconds download_dir
    dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_sync_interval dtype elastic_ep_max_dp_size
    expert_placement_strategy fingerprint_mode fingerprint_value gdn_prefill_backend
    generation_config gpu_memory_utilization grpc_port h11_max_header_count
    h11_max_incomplete_event_size hf_config_path host io_processor_plugin jit_monitor_mode
    kda_decode_backend kda_prefill_backend kv_cache_dtype kv_cache_memory_bytes
    kv_cache_metrics_sample kv_offloading_backend kv_offloading_size linear_backend load_format
    log_config_file log_level logprobs_mode long_prefill_token_threshold lora_dtype
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
    mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_log_len max_logprobs max_lora_cls_labels max_lora_rank
    max_loras max_model_len max_num_active_seqs max_num_batched_tokens max_num_queued_reqs
    max_num_queued_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
    mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_impl
    moe_backend nnodes node_rank num_gpu_blocks_override offload_backend offload_group_size
    offload_num_in_group offload_prefetch_step optimization_level otlp_traces_endpoint
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size port
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit quantization reasoning_parser
    reasoning_parser_plugin renderer_num_workers replayssm_buffer_len response_role revision
    root_path runner safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_cls scheduling_policy seed
    show_hidden_metrics_for_version shutdown_timeout sparse_indexer_topk_backend spec_method
    spec_model spec_tokens sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile
    ssl_ciphers ssl_keyfile stream_interval tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_revision tool_call_parser tool_parser_plugin tool_server tool_strict_level
    ubatch_size uds uvicorn_log_level video_pruning_method video_pruning_rate watermark
    worker_cls worker_extension_cls
    """.split()
)
"""Take exactly one value."""

REPEATED = frozenset({"middleware"})
"""Take one value and may be given several times; all are kept."""

OPTIONAL_VALUE = frozenset({"hf_token"})
"""Take a value or none (which means true)."""

NAMES = SWITCHES | LISTS | JSON | VALUES | REPEATED | OPTIONAL_VALUE

NEVER_NONE = frozenset(
    """
    block_size compilation_config cp_kv_cache_interleave_size data_parallel_size
    dcp_kv_cache_interleave_size decode_context_parallel_size dtype gpu_memory_utilization
    kv_cache_dtype max_model_len max_num_batched_tokens max_num_seqs pipeline_parallel_size
    tensor_parallel_size
    """.split()
)
"""Of the options that the grid depends on, those that cannot be given as `None` or as nothing."""

HUMAN_READABLE = frozenset(
    """
    kv_cache_memory_bytes max_model_len max_num_batched_tokens max_num_queued_tokens
    max_num_scheduled_tokens safetensors_prefetch_block_size
    """.split()
)
"""Take sizes like `128k`."""

COMPILATION_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
"""Names of `compilation_config.mode`, in any case; each stands for its place here."""

ALIASES = {
    "device_memory_utilization": "gpu_memory_utilization",
    "model_tag": "model",
}

SHORT = {
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-r": "node_rank",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}
"""Single-dash spellings. `-O` is read apart: its value may be written on to it."""


def option_name(text: str) -> str:
    """The name of an option as vLLM's own code spells it: underscores, no alias."""
    name = text.replace("-", "_")
    return ALIASES.get(name, name)


def full_names(abbreviation: str) -> list[str]:
    """The options (`no_` forms included) whose names start with `abbreviation`: like any argparse
    parser, vLLM's takes a beginning that only one option has."""
    spellings = [*NAMES, *ALIASES, *NEGATIONS]
    return sorted(name for name in spellings if name.startswith(abbreviation))


def option_names(options: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """A file's options under the names vLLM's own code uses: `max-num-seqs` is `max_num_seqs`,
    `no-enforce-eager: true` is `enforce_eager: false`, `compilation-config.mode: 2` is
    `compilation_config: {mode: 2}`.

    Raises `ConfigError` when two spellings of one option are given, or a name is no text.
    """
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in options.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"{prefix}{key} is not an option name", value=key, hint="write it in quotes"
            )
        head, *parts = key.split(".")
        name = option_name(head)
        if parts and name in JSON:
            for part in reversed(parts):
                value = {part: value}
            if "." in spelled.get(name, ""):
                merge_parts(result[name], value)
                continue
        else:
            name = option_name(key)
        if name.startswith("no_") and name[3:] in SWITCHES:
            if value is False:  # vLLM passes nothing on for it
                continue
            name, value = name[3:], False
        if name in result:
            raise ConfigError(
                f"{prefix}{name} is given twice, as {spelled[name]!r} and as {key!r}",
                field=f"{prefix}{name}",
                value=value,
                hint="keep one of the two",
            )
        result[name], spelled[name] = value, key
    return result


def merge_parts(target: dict[str, Any], update: Mapping[str, Any]) -> None:
    """Join parts of one JSON option as vLLM does: objects are merged, lists appended to, anything else
    replaced."""
    for key, value in update.items():
        present = target.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            merge_parts(present, value)
        elif isinstance(value, list) and isinstance(present, list):
            present.extend(value)
        else:
            target[key] = value
