"""From what people write of a serve config to the one `ServeConfig` it means.

Spellings that the engine takes for the same are the same here; what it would refuse, or read otherwise
than its author means, is refused; a default the engine picks is written in, with a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.config import buckets, vllm_options
from neffbuild.config.findings import Findings, nearest
from neffbuild.config.model import ModelConfig
from neffbuild.config.model_files import load_model
from neffbuild.config.serve import (
    VLLM_VERSION,
    AdditionalConfig,
    NeuronConfig,
    ServeConfig,
    SpeculativeConfig,
)
from neffbuild.config.values import (
    MAX_INTEGER,
    human_readable_integer,
    json_option,
    plain,
    shown,
    truth,
    whole_number,
)

SPECULATION_METHODS = ("eagle3",)
"""Methods whose program families are known here."""

_BUCKETS = "serve.additional_config.neuron_config"
_LISTS = frozenset(NeuronConfig.model_fields)

# Integers of the schema and the least value of each.
_INTEGERS = {
    "max_num_seqs": 1,
    "block_size": 1,
    "max_num_batched_tokens": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "cp_kv_cache_interleave_size": 1,
    "num_gpu_blocks_override": 1,
}
_BOOLEANS = ("enable_expert_parallel", "enable_prefix_caching")
_KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")

_DTYPES = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}
# Models whose activations overflow float16; vLLM refuses it for them.
_NOT_IN_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """What the engine's API server picks when an option is not set.

    `max_num_seqs` and `max_num_batched_tokens` are multiplied by the ranks of one replica where
    `per_rank` says so.
    """

    engine: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    per_rank: bool = False


ENGINE_DEFAULTS = {
    "inductor": EngineDefaults(f"vLLM {VLLM_VERSION} on CPU", 128, 128, 2048, per_rank=True),
    "neuronx": EngineDefaults("vLLM Neuron", 32, 256, 2048),
}
"""By toolchain, since each serves on one platform."""
OTHER_DEFAULTS = EngineDefaults(f"vLLM {VLLM_VERSION}", 16, 256, 2048)


@dataclass(frozen=True, slots=True)
class Serving:
    """A normalised serve config and the architectures its models lead to."""

    serve: ServeConfig
    model: ModelConfig
    draft_model: ModelConfig | None


def normalise_serve(
    options: Mapping[str, Any], *, base: Path, toolchain: str, findings: Findings
) -> Serving:
    """The serve config that `options` (under vLLM's own names) mean.

    Relative model paths are relative to `base`; `toolchain` names the compiler, and so the engine
    whose defaults apply. Raises `ConfigError` listing every problem; adds notes to `findings`.
    """
    with findings.stage():
        given = _present(options)
        _join_speculation(given, findings)
        _rename_interleave(given, findings)
        fields = _schema_fields(given, findings)
        others = _other_options(given, findings)
        neuron, additional = _neuron_config(fields.pop("additional_config", {}), findings)
        speculation = _speculative_options(fields.pop("speculative_config", None), findings)
    with findings.stage():
        model = _target_model(fields["model"], others, base)
        draft = _draft_model(speculation, base) if speculation is not None else None
    with findings.stage():
        fields["dtype"] = _dtype(fields.get("dtype", "auto"), model, findings)
        fields["max_model_len"] = _max_model_len(fields.get("max_model_len"), model, findings)
        _fill_defaults(fields, neuron, others, toolchain, findings)
    with findings.stage():
        if speculation is not None and draft is not None:
            _resolve_speculation(speculation, draft, fields, findings)
        _check_heads(fields, neuron, model, findings)
        lists = _bucket_lists(neuron, speculation, fields, findings)
    with findings.stage():
        _check_context_parallel(fields, lists, findings)
    fields["additional_config"] = AdditionalConfig(
        neuron_config=NeuronConfig(**{**neuron, **lists}), **additional
    )
    if speculation is not None:
        fields["speculative_config"] = SpeculativeConfig(**speculation)
    return Serving(ServeConfig(**fields, **others), model, draft)


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not set: null, and on a command line the word `None` or nothing."""
    unset = (None, "", "None")
    return {
        name: value
        for name, value in options.items()
        if value is not None and not (name in vllm_options.NAMES and value in unset)
    }


def _join_speculation(given: dict[str, Any], findings: Findings) -> None:
    """`spec_method`, `spec_model` and `spec_tokens` are short for parts of `speculative_config`."""
    shorthands = {
        "spec_method": "method",
        "spec_model": "model",
        "spec_tokens": "num_speculative_tokens",
    }
    parts = {key: given.pop(name) for name, key in shorthands.items() if name in given}
    if not parts:
        return
    config = _object(given.get("speculative_config", {}), "serve.speculative_config", findings)
    if config is None:
        return
    for key, value in parts.items():
        if key in config:
            findings.problem(
                f"serve.speculative_config.{key}",
                value,
                f"serve.speculative_config.{key} is given twice, there and by its short option",
                "keep one of the two",
            )
    given["speculative_config"] = {**config, **parts}


def _rename_interleave(given: dict[str, Any], findings: Findings) -> None:
    old = given.pop("dcp_kv_cache_interleave_size", 1)
    if old in (1, "1"):
        return
    if given.get("cp_kv_cache_interleave_size", old) != old:
        findings.note(
            "serve.cp_kv_cache_interleave_size is overridden by dcp_kv_cache_interleave_size, "
            "as vLLM does"
        )
    given["cp_kv_cache_interleave_size"] = old


def _schema_fields(given: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The options of the schema, taken out of `given`, each of its type."""
    readers: dict[str, Callable[[Any, str, Findings], Any]] = {
        "model": _text,
        "dtype": _lower_text,
        "quantization": _lower_text,
        "kv_cache_dtype": _text,
        "max_model_len": _length,
        "gpu_memory_utilization": _fraction,
        **dict.fromkeys(_INTEGERS, _integer),
        **dict.fromkeys(_BOOLEANS, _boolean),
        **dict.fromkeys(("speculative_config", "additional_config"), _object),
        **dict.fromkeys(("kv_transfer_config", "compilation_config"), _plain_object),
    }
    fields: dict[str, Any] = {}
    for name, read in readers.items():
        if name in given:
            value = read(given.pop(name), f"serve.{name}", findings)
            if value is not None:
                fields[name] = value
    if "model" not in fields:
        findings.problem(
            "serve.model",
            None,
            "serve.model is not set; allowed: a directory with a config.json, such a file, or a "
            "model id in the local Hugging Face cache",
        )
    role = fields.get("kv_transfer_config", {}).get("kv_role")
    if role is not None and role not in _KV_ROLES:
        findings.refuse("serve.kv_transfer_config.kv_role", role, ", ".join(_KV_ROLES))
    return fields


def _other_options(given: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Every option that is not of the schema, in one spelling."""
    others: dict[str, Any] = {}
    for name, value in given.items():
        path = f"serve.{name}"
        if name in _LISTS:
            findings.problem(path, value, f"{path}: vLLM has no such option", _belongs(name))
            continue
        try:
            others[name] = _other_value(name, value)
        except ValueError as error:
            findings.problem(path, value, f"{path} is {shown(value)}: {error}")
        meant = nearest(name, vllm_options.NAMES)
        if name not in vllm_options.NAMES and meant is not None:
            findings.note(
                f"{path}: vLLM {VLLM_VERSION} has no such option; it is kept as given "
                f"(did you mean {meant}?)"
            )
    return others


def _other_value(name: str, value: Any) -> Any:
    if name in vllm_options.JSON and isinstance(value, str):
        return plain(json_option(value)) if value.lstrip()[:1] in ("{", "[") else value
    if name in vllm_options.HUMAN_READABLE and isinstance(value, str):
        number = human_readable_integer(value)
        if number is None:
            raise ValueError("not a size; allowed: an integer, or one like 128k, 25.6k, 128K")
        return number
    if name in vllm_options.LISTS and not isinstance(value, list):
        return [plain(value)]
    return plain(value)


def _neuron_config(
    additional: dict[str, Any], findings: Findings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`neuron_config`, its bucket lists still as given, and the rest of `additional_config`."""
    others = dict(additional)
    path = "serve.additional_config"
    for name in sorted(_LISTS & others.keys()):
        findings.problem(
            f"{path}.{name}",
            others[name],
            f"{path}.{name}: no engine reads it there",
            _belongs(name),
        )
    _refuse_dashes(others, ("neuron_config",), path, findings)
    neuron = _object(others.pop("neuron_config", None) or {}, _BUCKETS, findings)
    if neuron is None:
        return {}, {}
    _refuse_dashes(neuron, _LISTS, _BUCKETS, findings)
    for name in neuron:
        meant = nearest(name, _LISTS)
        if name not in _LISTS and meant is not None and "-" not in name:
            findings.note(f"{_BUCKETS}.{name} is kept as given (did you mean {meant}?)")
    given = {
        name: value if name in _LISTS else _plain(value, f"{_BUCKETS}.{name}", findings)
        for name, value in neuron.items()
        if value is not None
    }
    return given, {
        name: _plain(value, f"{path}.{name}", findings) for name, value in others.items()
    }


def _refuse_dashes(
    given: Mapping[str, Any], names: Iterable[str], path: str, findings: Findings
) -> None:
    """Inside JSON the engine reads underscores only: a dashed bucket list would be ignored."""
    for key in given:
        name = key.replace("-", "_")
        if name != key and name in names:
            findings.problem(
                f"{path}.{key}",
                given[key],
                f"{path}.{key}: the engine reads {name} only, with underscores",
                f"write {name}",
            )


def _belongs(name: str) -> str:
    return f"write it as additional_config.neuron_config.{name}"


def _speculative_options(given: dict[str, Any] | None, findings: Findings) -> dict[str, Any] | None:
    """`speculative_config` with its fields of their types, or None without speculation."""
    if given is None:
        return None
    path = "serve.speculative_config"
    config = {
        name: value
        for name, value in vllm_options.option_names(given, f"{path}.").items()
        if value is not None
    }
    for name in ("num_speculative_tokens", "max_model_len", "draft_tensor_parallel_size"):
        if name in config:
            config[name] = _integer(config[name], f"{path}.{name}", findings)
    if "num_speculative_tokens" not in config:
        findings.problem(
            f"{path}.num_speculative_tokens",
            None,
            f"{path}.num_speculative_tokens is not set; allowed: an integer of at least 1",
        )
    for name in config.keys() - {"model", "num_speculative_tokens"}:
        config[name] = _plain(config[name], f"{path}.{name}", findings)
    model = config.get("model")
    if not isinstance(model, str) or not model:
        findings.refuse(
            f"{path}.model", model, "the draft's directory, config.json, or cached model id"
        )
        model = ""
    if "method" not in config and "eagle3" in model.lower():
        findings.note(
            f"{path}.method is not set: eagle3, after the draft model's name, as vLLM does"
        )
        config["method"] = "eagle3"
    if config.get("method") not in SPECULATION_METHODS:
        findings.refuse(f"{path}.method", config.get("method"), ", ".join(SPECULATION_METHODS))
    return config


def _target_model(reference: str, others: Mapping[str, Any], base: Path) -> ModelConfig:
    """The architecture of `serve.model`; of `serve.hf_config_path` where that is set."""
    overrides = others.get("hf_overrides")
    elsewhere = others.get("hf_config_path")
    return load_model(
        str(elsewhere or reference),
        base,
        field="serve.hf_config_path" if elsewhere else "serve.model",
        revision=_revision(others),
        overrides=overrides if isinstance(overrides, dict) else None,
    )


def _draft_model(speculation: Mapping[str, Any], base: Path) -> ModelConfig:
    return load_model(
        str(speculation["model"]),
        base,
        field="serve.speculative_config.model",
        revision=_revision(speculation),
    )


def _revision(options: Mapping[str, Any]) -> str | None:
    # A commit of digits alone was read as a number.
    return str(options["revision"]) if "revision" in options else None


def _dtype(given: str, model: ModelConfig, findings: Findings) -> str:
    """The element type the engine computes in, `auto` resolved as vLLM does: what the checkpoint
    states, except that float32 (and what is not computed in) becomes bfloat16."""
    path = "serve.dtype"
    float16_overflows = model.model_type in _NOT_IN_FLOAT16
    if given == "auto":
        stated = model.stated_dtype
        usable = {"bfloat16"} if float16_overflows else {"bfloat16", "float16"}
        if stated in usable:
            return str(stated)
        findings.note(
            f"{path} is auto and the model's config.json states no dtype: bfloat16 assumed (vLLM looks "
            "at the weights)"
            if stated is None
            else f"{path} is auto: a {stated} model is served in bfloat16, as vLLM does"
        )
        return "bfloat16"
    if given not in _DTYPES:
        findings.refuse(path, given, ", ".join(["auto", *_DTYPES]))
        return given
    dtype = _DTYPES[given]
    if dtype == "float16" and float16_overflows:
        findings.refuse(
            path, given, "auto, bfloat16, float32", f"{model.model_type} overflows in float16"
        )
    return dtype


def _max_model_len(given: int | None, model: ModelConfig, findings: Findings) -> int:
    path = "serve.max_model_len"
    longest = model.max_position_embeddings
    if given is None:
        default = model.default_max_model_len
        if default is None:
            findings.refuse(
                path, None, "an integer of at least 1", "the model's config.json states no length"
            )
            return 0
        findings.note(f"{path} is not set: {default}, from the model's config.json")
        return default
    trained = model.text.get("model_max_length")
    if longest is not None and given > max(longest, trained if isinstance(trained, int) else 0):
        if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
            findings.note(
                f"{path} {given} is beyond the model's {longest} positions, as allowed by "
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
            )
        else:
            findings.refuse(
                path,
                given,
                f"1 to {longest}, the positions the model's config.json states",
                "vLLM refuses it too, unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set",
            )
    return given


def _fill_defaults(
    fields: dict[str, Any],
    neuron: Mapping[str, Any],
    others: Mapping[str, Any],
    toolchain: str,
    findings: Findings,
) -> None:
    """Write in what the engine's API server picks for the sizes that are not set."""
    defaults = ENGINE_DEFAULTS.get(toolchain, OTHER_DEFAULTS)
    ranks = fields.get("tensor_parallel_size", 1) * fields.get("pipeline_parallel_size", 1)
    scale = (ranks if defaults.per_rank else 1) * (
        2 if others.get("performance_mode") == "throughput" else 1
    )
    seqs = fields.get("max_num_seqs", defaults.max_num_seqs * scale)
    tokens = fields.get("max_num_batched_tokens")
    if tokens is None:
        tokens = defaults.max_num_batched_tokens * scale
        if others.get("enable_chunked_prefill") is False:
            tokens = max(tokens, fields["max_model_len"])
        tokens = min(tokens, seqs * fields["max_model_len"])
    assumed = {
        "max_num_seqs": min(seqs, tokens),
        "block_size": defaults.block_size,
        "max_num_batched_tokens": tokens,
    }
    missing = {name: value for name, value in assumed.items() if name not in fields}
    fields.update(missing)
    if not {"num_batched_tokens_buckets", "kv_segment_size_buckets"} & neuron.keys():
        missing.pop("max_num_batched_tokens", None)  # decode programs do not see it
    if missing:
        findings.note(
            f"not set, so the defaults of {defaults.engine} are assumed: "
            + ", ".join(f"serve.{name} {value}" for name, value in missing.items())
        )


def _resolve_speculation(
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


def _check_heads(
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


def _bucket_lists(
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
    elif "num_seqs_buckets" not in neuron:
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
    verify_path = f"{_BUCKETS}.verify_query_len_buckets"
    if speculation is None:
        if "verify_query_len_buckets" in neuron:
            findings.problem(
                verify_path,
                neuron["verify_query_len_buckets"],
                f"{verify_path} is set without serve.speculative_config; allowed: not set",
            )
    elif lengths := lists["verify_query_len_buckets"]:
        width = 1 + speculation["num_speculative_tokens"]
        buckets.check_last(
            lengths,
            width,
            verify_path,
            findings,
            top_name="1 + num_speculative_tokens,",
            hint=f"end the list with {width}",
        )
    elif "verify_query_len_buckets" not in neuron:
        lists["verify_query_len_buckets"] = (1 + speculation["num_speculative_tokens"],)
    return lists


def _check_context_parallel(
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


def _text(value: Any, path: str, findings: Findings) -> str | None:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a folder named 7, read as a number
    findings.refuse(path, value, "a text")
    return None


def _lower_text(value: Any, path: str, findings: Findings) -> str | None:
    text = _text(value, path, findings)
    return None if text is None else text.lower()


def _integer(value: Any, path: str, findings: Findings) -> int | None:
    number = value
    if isinstance(value, str):
        human = path.rpartition(".")[2] in vllm_options.HUMAN_READABLE
        number = human_readable_integer(value) if human else whole_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_INTEGER:
        findings.refuse(path, value, "an integer of at least 1")
        return None
    if isinstance(value, str):
        findings.note(f"{path} {value!r} is read as {number}")
    return number


def _length(value: Any, path: str, findings: Findings) -> int | None:
    if value in (-1, "-1") or (isinstance(value, str) and value.lower() == "auto"):
        findings.refuse(
            path,
            value,
            "an integer of at least 1",
            "the engine would fit it to its device's memory at start-up, which planning cannot know: "
            "pin the length it settles on",
        )
        return None
    return _integer(value, path, findings)


def _fraction(value: Any, path: str, findings: Findings) -> float | None:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 1:
        findings.refuse(path, value, "a number above 0, up to 1")
        return None
    if isinstance(value, str):
        findings.note(f"{path} {value!r} is read as {number}")
    return float(number)


def _boolean(value: Any, path: str, findings: Findings) -> bool | None:
    if isinstance(value, bool):
        return value
    boolean = truth(value) if isinstance(value, str) else None
    if boolean is None:
        findings.refuse(path, value, "true, false")
        return None
    findings.note(f"{path} {value!r} is read as {str(boolean).lower()}")
    return boolean


def _object(value: Any, path: str, findings: Findings) -> dict[str, Any] | None:
    """A mapping, or the JSON text of one; what is in it still as given."""
    try:
        opened = json_option(value) if isinstance(value, str) else value
    except ValueError as error:
        findings.problem(path, value, f"{path} is {shown(value)}: {error}; allowed: a mapping")
        return None
    if not isinstance(opened, dict):
        findings.refuse(path, value, "a mapping, or the JSON text of one")
        return None
    for key in opened:
        if not isinstance(key, str):
            findings.problem(
                path, key, f"{path}: the key {key!r} is not a text", "write it in quotes"
            )
            return None
    return opened


def _plain_object(value: Any, path: str, findings: Findings) -> dict[str, Any] | None:
    opened = _object(value, path, findings)
    plain_object: dict[str, Any] | None = _plain(opened, path, findings)
    return plain_object


def _plain(value: Any, path: str, findings: Findings) -> Any:
    """`value` in its one spelling, or None with a problem."""
    try:
        return plain(value)
    except ValueError as error:
        findings.problem(path, value, f"{path} is {shown(value)}: {error}")
        return None
