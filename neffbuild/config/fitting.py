"""What must fit what: buckets the limits, heads the ranks, shares the blocks, the draft its target.

`fields` are the options of the schema that are set, sizes all among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffbuild.config import buckets
from neffbuild.config.findings import Findings
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import NeuronConfig
from neffbuild.config.values import shown

_BUCKETS = "serve.additional_config.neuron_config"


def resolve_speculation(
    speculation: dict[str, Any], draft: ModelConfig, fields: Mapping[str, Any], findings: Findings
) -> None:
    """Check what depends on target and draft, and write in the draft's limit and its ranks."""
    path = "serve.speculative_config"
    longest = fields["max_model_len"]
    tokens = speculation["num_speculative_tokens"]
    if tokens >= longest:
        findings.refuse(
            f"{path}.num_speculative_tokens",
            tokens,
            f"1 to {longest - 1}, so that a step of 1 + K tokens fits max_model_len {longest}",
        )
    own = draft.max_position_embeddings or longest
    limit = min(own, longest)
    given = speculation.setdefault("max_model_len", limit)
    if given > limit:
        findings.refuse(
            f"{path}.max_model_len",
            given,
            f"1 to {limit} (serve.max_model_len is {longest}, the draft's own maximum {own})",
        )
    ranks = fields.get("tensor_parallel_size", 1)
    if speculation.setdefault("draft_tensor_parallel_size", ranks) not in (1, ranks):
        findings.refuse(
            f"{path}.draft_tensor_parallel_size",
            speculation["draft_tensor_parallel_size"],
            " or ".join(map(str, sorted({1, ranks}))),
        )


def check_heads(
    fields: Mapping[str, Any], neuron: Mapping[str, Any], model: ModelConfig, findings: Findings
) -> None:
    """Whether the model's heads divide among the ranks, where its config states heads."""
    if "num_attention_heads" not in model.text:
        return
    tp = fields.get("tensor_parallel_size", 1)
    dcp = fields.get("decode_context_parallel_size", 1)
    path = "serve.decode_context_parallel_size"
    heads = model.num_attention_heads
    if heads % tp:
        findings.refuse(
            "serve.tensor_parallel_size", tp, f"a divisor of the model's {heads} attention heads"
        )
    if dcp == 1:
        return
    if neuron.get("attention_dp_size", 1) != 1:
        findings.problem(
            path,
            dcp,
            f"{path} is {dcp} together with neuron_config.attention_dp_size "
            f"{shown(neuron['attention_dp_size'])}; allowed: one of the two",
        )
    if model.uses_mla:
        return
    kv_heads = model.num_key_value_heads
    if tp <= kv_heads:
        findings.problem(
            path,
            dcp,
            f"{path} is {dcp} with tensor_parallel_size {tp}; allowed: 1, unless tensor_parallel_size "
            f"is larger than the model's {kv_heads} KV heads",
        )
    elif dcp > tp // kv_heads:
        findings.refuse(
            path,
            dcp,
            f"1 to {tp // kv_heads} (tensor_parallel_size {tp} over {kv_heads} KV heads)",
        )
    if (heads // kv_heads) % dcp:
        findings.refuse(
            path, dcp, f"a divisor of the model's {heads // kv_heads} query heads per KV head"
        )


def bucket_lists(
    neuron: Mapping[str, Any],
    speculation: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    findings: Findings,
) -> dict[str, tuple[int, ...] | None]:
    """The five lists, checked; `num_seqs` and (with speculation) `verify_query_len` filled in."""
    lists: dict[str, tuple[int, ...] | None] = {}
    for name in NeuronConfig.model_fields:
        hint = (
            "leave the option out to do without context buckets"
            if name == "decode_context_length_buckets"
            else None
        )
        lists[name] = (
            buckets.ascending_integers(
                neuron[name], f"{_BUCKETS}.{name}", findings, empty_hint=hint
            )
            if name in neuron
            else None
        )
    length, seqs = fields["max_model_len"], fields["max_num_seqs"]
    if rows := lists["num_seqs_buckets"]:
        buckets.check_last(
            rows,
            seqs,
            f"{_BUCKETS}.num_seqs_buckets",
            findings,
            top_name="serve.max_num_seqs",
            hint=f"end the list with {seqs}, or set max_num_seqs to {rows[-1]}",
        )
    else:
        lists["num_seqs_buckets"] = buckets.powers_of_two(seqs)
    if contexts := lists["decode_context_length_buckets"]:
        buckets.check_contexts(
            contexts, length, f"{_BUCKETS}.decode_context_length_buckets", findings
        )
    if tokens := lists["num_batched_tokens_buckets"]:
        top = min(fields["max_num_batched_tokens"], length)
        buckets.check_last(
            tokens,
            top,
            f"{_BUCKETS}.num_batched_tokens_buckets",
            findings,
            top_name="the smaller of max_num_batched_tokens and max_model_len,",
            hint=f"end the list with {top}, or set max_num_batched_tokens to {tokens[-1]}",
        )
    if segments := lists["kv_segment_size_buckets"]:
        buckets.check_segments(
            segments, tokens, fields["block_size"], f"{_BUCKETS}.kv_segment_size_buckets", findings
        )
    lists["verify_query_len_buckets"] = _query_lengths(
        neuron, lists["verify_query_len_buckets"], speculation, findings
    )
    return lists


def _query_lengths(
    neuron: Mapping[str, Any],
    lengths: tuple[int, ...] | None,
    speculation: Mapping[str, Any] | None,
    findings: Findings,
) -> tuple[int, ...] | None:
    """Tokens per row of a with-spec program: at least one draft, at most all."""
    path = f"{_BUCKETS}.verify_query_len_buckets"
    given = neuron.get("verify_query_len_buckets")
    if speculation is None:
        if given is not None:
            findings.problem(
                path,
                given,
                f"{path} is set without serve.speculative_config; allowed: not set",
            )
        return None
    width = 1 + speculation["num_speculative_tokens"]
    if given is None:
        return (width,)
    if lengths is None:  # refused as it is
        return None
    if lengths[0] < 2:
        findings.refuse(
            path,
            list(lengths),
            f"integers from 2 to {width}: a row of one token holds no draft",
            "the without-spec program serves such rows",
        )
    else:
        buckets.check_last(
            lengths,
            width,
            path,
            findings,
            top_name="1 + num_speculative_tokens,",
            hint=f"end the list with {width}",
        )
    return lengths


def check_context_parallel(
    fields: dict[str, Any], lists: Mapping[str, tuple[int, ...] | None], findings: Findings
) -> None:
    """What decode context parallelism asks of the sizes: every rank's share is whole blocks."""
    dcp = fields.get("decode_context_parallel_size", 1)
    if dcp == 1:
        return
    tp, block = fields.get("tensor_parallel_size", 1), fields["block_size"]
    path = "serve.decode_context_parallel_size"
    if tp % dcp:
        findings.refuse(path, dcp, f"a divisor of tensor_parallel_size {tp}")
    _check_interleave(fields, block, findings)
    stride = block * dcp
    sizes = [
        *(
            (f"{_BUCKETS}.decode_context_length_buckets", size)
            for size in lists["decode_context_length_buckets"] or ()
        ),
        ("serve.max_model_len", fields["max_model_len"]),
    ]
    for name, size in sizes:
        if size % stride:
            findings.problem(
                name,
                size,
                f"{name} {size} is not a multiple of block_size × decode_context_parallel_size "
                f"= {stride}; allowed: multiples of {stride}",
                f"the nearest are {', '.join(str(near) for near in _nearest_multiples(size, stride))}",
            )
        elif size % (buckets.P_MAX * dcp):
            findings.note(
                f"{name} {size} is not a multiple of {buckets.P_MAX} × decode_context_parallel_size = "
                f"{buckets.P_MAX * dcp}: a rank's share is no whole kernel tile"
            )
    tokens = lists["num_batched_tokens_buckets"] or ()
    uneven = [size for size in tokens if size % stride]
    if uneven and uneven[-1] == tokens[-1]:
        findings.problem(
            f"{_BUCKETS}.num_batched_tokens_buckets",
            list(tokens),
            f"{_BUCKETS}.num_batched_tokens_buckets ends with {tokens[-1]}, not a multiple of "
            f"block_size × decode_context_parallel_size = {stride}; allowed: multiples of {stride}",
        )
    elif uneven:
        findings.note(
            f"{_BUCKETS}.num_batched_tokens_buckets: {uneven} are not multiples of block_size × "
            f"decode_context_parallel_size = {stride}; the engine drops them"
        )


def _check_interleave(fields: dict[str, Any], block: int, findings: Findings) -> None:
    path = "serve.cp_kv_cache_interleave_size"
    connector = str(fields.get("kv_transfer_config", {}).get("kv_connector", ""))
    if "nixl" in connector.lower():
        # Blocks travel between workers whole, so a rank must own whole blocks.
        if "cp_kv_cache_interleave_size" not in fields:
            findings.note(f"{path} is not set: block_size {block}, as {connector} needs")
            fields["cp_kv_cache_interleave_size"] = block
        elif fields["cp_kv_cache_interleave_size"] != block:
            findings.refuse(
                path,
                fields["cp_kv_cache_interleave_size"],
                f"block_size {block}, with {connector} and decode context parallelism",
            )
        return
    interleave = fields.get("cp_kv_cache_interleave_size", 1)
    if block % interleave:
        findings.refuse(path, interleave, f"a divisor of block_size {block}")


def _nearest_multiples(size: int, stride: int) -> list[int]:
    below = size // stride * stride
    return [multiple for multiple in (below, below + stride) if multiple]
