"""What vLLM Neuron settles, and what it refuses, when it starts: prefill first of all.

Checked before hours are spent compiling for an engine that would not come up. The rules of single bucket
lists are in `neffbuild.config.buckets` and hold for every engine.

Source: vLLM Neuron 0.24, `utils/bucket_utils.py` and the model runner's constructor; the option reference
of Neuron SDK 2.33.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from neffbuild.config.buckets import KV_SEGMENT_SIZES, P_MAX, powers_of_two
from neffbuild.config.build import BuildConfig
from neffbuild.config.findings import Findings
from neffbuild.config.serve import ServeConfig
from neffbuild.config.values import shown

SINGLE_SHOT_LIMIT = 16384
"""The longest `max_model_len` whose prompts may be prefilled in one step each."""

_NEURON = "serve.additional_config.neuron_config"
_ENCODERS = ("encoder_neuron_config", "vision_neuron_config")
"""The encoder's options: by the first name from Neuron SDK 2.33 on, by the second before."""


class PrefillBuckets(NamedTuple):
    """Tokens per prefill step, ascending, and the KV segment sizes (0: the KV cache is not read in
    segments). Each combination is a program."""

    num_batched_tokens: tuple[int, ...]
    kv_segments: tuple[int, ...]


PrefillRules = Callable[[BuildConfig, Findings], PrefillBuckets]
"""How an engine settles its prefill buckets. Problems and notes go to the findings."""


def neuron_prefill(config: BuildConfig, findings: Findings) -> PrefillBuckets:
    """The prefill buckets vLLM Neuron compiles for, a draft's being the same.

    What the engine would refuse at its start, in prefill or elsewhere, is a problem in `findings`; what
    it settles by itself a note. With a problem the buckets mean nothing.
    """
    serve = config.serve
    _check_experts(serve, findings)
    _check_attention(serve, findings)
    _check_sampling(serve, findings)
    _check_transfer(serve, findings)
    _check_encoder(serve, findings)
    _note_encoder(config, findings)
    buckets = _segmented(serve, findings) if _segments(serve) else _single_shot(serve, findings)
    return _on_whole_shards(serve, buckets, findings)


def _most_tokens(serve: ServeConfig) -> int:
    """Tokens of the largest prefill step."""
    return min(serve.max_num_batched_tokens or serve.max_model_len, serve.max_model_len)


def _segments(serve: ServeConfig) -> tuple[int, ...] | None:
    """The KV segments as configured, or as the engine sets them where prompts come in parts."""
    configured = serve.neuron_config.kv_segment_size_buckets
    if configured is not None:
        return configured
    most = _most_tokens(serve)
    return (most,) if most < serve.max_model_len else None


def _segmented(serve: ServeConfig, findings: Findings) -> PrefillBuckets:
    neuron, most = serve.neuron_config, _most_tokens(serve)
    if neuron.kv_segment_size_buckets is None:
        _settle_segment(serve, most, findings)
        return PrefillBuckets((most,), (most,))
    (segment,) = neuron.kv_segment_size_buckets
    if segment < most:
        findings.note(
            f"{_NEURON}.kv_segment_size_buckets is [{segment}], the only prefill bucket, while a step may "
            f"hold {most} tokens: set max_num_batched_tokens to {segment}"
        )
    elif segment > most:
        findings.note(
            f"serve.max_num_batched_tokens: the engine raises {most} to the segment size {segment}"
        )
    return PrefillBuckets((segment,), (segment,))


def _settle_segment(serve: ServeConfig, most: int, findings: Findings) -> None:
    """Whether the engine can make a segment of the largest step, as it does when none is configured."""
    path = "serve.max_num_batched_tokens"
    sizes, allowed = _segment_sizes(serve)
    longest = serve.max_model_len
    if most not in sizes:
        single = longest <= SINGLE_SHOT_LIMIT
        cached = " and enable_prefix_caching to false" if serve.enable_prefix_caching else ""
        findings.problem(
            path,
            most,
            f"{path} is {most}, below max_model_len {longest}, so that prompts are prefilled in segments of "
            f"that size; allowed: {allowed}" + (f", or at least {longest}" if single else ""),
            f"set it to {longest}{cached} to prefill every prompt in one step" if single else None,
        )
        return
    tokens = serve.neuron_config.num_batched_tokens_buckets
    if tokens not in (None, (most,)):
        findings.problem(
            f"{_NEURON}.num_batched_tokens_buckets",
            list(tokens or ()),
            f"{_NEURON}.num_batched_tokens_buckets is {list(tokens or ())} while prompts are prefilled in "
            f"segments of {most} (max_num_batched_tokens, below max_model_len {longest}); "
            f"allowed: [{most}]",
            "a segment is what one prefill step computes",
        )


def _single_shot(serve: ServeConfig, findings: Findings) -> PrefillBuckets:
    longest = serve.max_model_len
    path = "serve.max_num_batched_tokens"
    sizes, allowed = _segment_sizes(serve)
    if longest > SINGLE_SHOT_LIMIT:
        findings.problem(
            path,
            serve.max_num_batched_tokens,
            f"{path} is {serve.max_num_batched_tokens}, so that a prompt of any length up to max_model_len "
            f"{longest} is prefilled in one step, which is supported up to {SINGLE_SHOT_LIMIT}; "
            f"allowed: {allowed}",
            f"set it to one of these, or max_model_len to at most {SINGLE_SHOT_LIMIT}",
        )
    elif serve.enable_prefix_caching:
        findings.problem(
            "serve.enable_prefix_caching",
            True,
            "serve.enable_prefix_caching is true (the default) while every prompt is prefilled in one step "
            f"(max_num_batched_tokens {serve.max_num_batched_tokens} is not below max_model_len {longest}); "
            "allowed: false, or prefill in segments",
            "set enable_prefix_caching to false"
            + (f", or max_num_batched_tokens to one of {allowed}" if sizes else ""),
        )
    most = _most_tokens(serve)
    tokens = serve.neuron_config.num_batched_tokens_buckets or powers_of_two(most, first=P_MAX)
    return PrefillBuckets(tokens, (0,))


def _segment_sizes(serve: ServeConfig) -> tuple[list[int], str]:
    """The steps that are a segment of a longer prompt, and how a message names them."""
    below = [size for size in KV_SEGMENT_SIZES if size < serve.max_model_len]
    sizes = [size for size in below if size % serve.block_size == 0]
    none = f"no size below max_model_len is a multiple of block_size {serve.block_size}"
    return sizes, ", ".join(map(str, sizes)) or none


def _on_whole_shards(
    serve: ServeConfig, buckets: PrefillBuckets, findings: Findings
) -> PrefillBuckets:
    """Under decode context parallelism a prefill step's tokens are spread over the ranks by blocks: the
    engine drops buckets that do not divide, and needs the largest."""
    if serve.decode_context_parallel_size == 1:
        return buckets
    stride = serve.block_size * serve.decode_context_parallel_size
    tokens = buckets.num_batched_tokens
    whole = tuple(size for size in tokens if size % stride == 0)
    if tokens[-1] not in whole:
        segmented = serve.neuron_config.kv_segment_size_buckets is not None
        path = f"{_NEURON}.kv_segment_size_buckets" if segmented else "serve.max_num_batched_tokens"
        findings.problem(
            path,
            tokens[-1],
            f"{path}: the largest prefill bucket is {tokens[-1]}, not a multiple of block_size × "
            f"decode_context_parallel_size = {stride}; allowed: multiples of {stride}",
        )
        return buckets
    if whole != tokens and serve.neuron_config.num_batched_tokens_buckets is None:
        dropped = sorted(set(tokens) - set(whole))
        findings.note(
            f"prefill buckets {dropped} are not multiples of block_size × "
            f"decode_context_parallel_size = {stride}; the engine drops them"
        )
    return buckets._replace(num_batched_tokens=whole)


def _check_experts(serve: ServeConfig, findings: Findings) -> None:
    path = f"{_NEURON}.ep_degree"
    degree = _extra(serve, "ep_degree")
    if degree in (None, 1):
        return
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        findings.refuse(path, degree, "an integer of at least 1")
    elif not serve.enable_expert_parallel:
        findings.problem(
            path,
            degree,
            f"{path} is {degree} without serve.enable_expert_parallel; allowed: 1, or not set",
            "set enable_expert_parallel to true",
        )
    elif (ranks := serve.tensor_parallel_size * serve.data_parallel_size) % degree:
        findings.refuse(
            path,
            degree,
            f"a divisor of {ranks} ranks (tensor_parallel_size {serve.tensor_parallel_size} × "
            f"data_parallel_size {serve.data_parallel_size})",
        )


def _check_attention(serve: ServeConfig, findings: Findings) -> None:
    ranks, replicas = _extra(serve, "attention_dp_size"), serve.data_parallel_size
    whole = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1
    if ranks is not None and not (whole and replicas % ranks == 0):
        findings.refuse(
            f"{_NEURON}.attention_dp_size",
            ranks,
            f"a divisor of data_parallel_size {replicas}",
            "attention is spread over replicas: set data_parallel_size to a multiple of it",
        )


def _check_sampling(serve: ServeConfig, findings: Findings) -> None:
    path = f"{_NEURON}.on_device_sampling_config"
    if _extra(serve, "on_device_sampling_config") is not None:
        return
    options = serve.model_extra or {}
    if options.get("async_scheduling") is True:
        findings.problem(
            path,
            None,
            f"serve.async_scheduling is true and {path} is not set; allowed: a mapping, such as "
            "{all_greedy: true}",
            "sample on the device, or set async_scheduling to false",
        )
    elif serve.speculative_config is not None:
        findings.note(f"{path} is not set: the engine needs it for speculation")


def _check_transfer(serve: ServeConfig, findings: Findings) -> None:
    if serve.decode_context_parallel_size == 1 or serve.kv_transfer_config is None:
        return
    interleave = serve.cp_kv_cache_interleave_size
    if interleave != serve.block_size:
        findings.refuse(
            "serve.cp_kv_cache_interleave_size",
            interleave,
            f"block_size {serve.block_size}, with KV transfer and decode context parallelism",
            "a rank must own whole blocks, for blocks travel between workers",
        )


def _check_encoder(serve: ServeConfig, findings: Findings) -> None:
    others = serve.additional_config.model_extra or {}
    given = [name for name in _ENCODERS if others.get(name) is not None]
    if len(given) > 1:
        findings.problem(
            f"serve.additional_config.{given[1]}",
            others[given[1]],
            f"serve.additional_config.{given[1]} is set beside {given[0]}, another name of the same; "
            "allowed: one of them",
            f"keep {given[0]} from Neuron SDK 2.33 on, {given[1]} before",
        )
    if (serve.model_extra or {}).get("mm_encoder_only") is True:
        findings.problem(
            "serve.mm_encoder_only",
            True,
            "serve.mm_encoder_only is true: the worker runs an encoder alone, whose programs are not "
            "planned; allowed: false",
            "plan the workers that run the language model",
        )


def _note_encoder(config: BuildConfig, findings: Findings) -> None:
    """An encoder's programs are of a list of its own, and not among what is planned here."""
    others = config.serve.additional_config.model_extra or {}
    options = next((others[name] for name in _ENCODERS if others.get(name) is not None), None)
    has_encoder = options is not None or "vision_config" in config.model.architecture
    if not has_encoder or others.get("mm_language_model_only") is True:
        return
    sizes = options.get("num_vision_tokens_buckets") if isinstance(options, dict) else None
    many = f" (one for each of {shown(sizes)})" if sizes else ""
    findings.note(
        f"the programs of {config.model.name}'s encoder{many} are not planned; the engine compiles them "
        "when it starts"
    )


def _extra(serve: ServeConfig, name: str) -> Any:
    return (serve.neuron_config.model_extra or {}).get(name)
