"""From what people write of a serve config to the one `ServeConfig` it means.

Spellings that the engine takes for the same are the same here; what it would refuse, or read otherwise
than its author means, is refused; a default the engine picks is written in, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffbuild.config import engine, fitting, readers, vllm_options
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
    human_readable_integer,
    json_option,
    plain,
    shown,
)

SPECULATION_METHODS = ("eagle3", "dflash")
"""Methods whose program families are known here: both verify in the target and propose in one draft
program, from hidden states of the target's layers."""

_BUCKETS = "serve.additional_config.neuron_config"
_LISTS = frozenset(NeuronConfig.model_fields)

_INTEGERS = (
    "max_num_seqs",
    "block_size",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
    "num_gpu_blocks_override",
)
_BOOLEANS = ("enable_expert_parallel", "enable_prefix_caching")
_KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


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
        fields["dtype"] = engine.resolve_dtype(fields.get("dtype", "auto"), model, findings)
        fields["max_model_len"] = engine.resolve_max_model_len(
            fields.get("max_model_len"), model, findings
        )
        fields.setdefault("enable_prefix_caching", True)  # vLLM's default for decoders
        engine.fill_defaults(fields, neuron, others, toolchain, findings)
    with findings.stage():
        if speculation is not None and draft is not None:
            fitting.resolve_speculation(speculation, draft, fields, findings)
        fitting.check_heads(fields, neuron, model, findings)
        lists = fitting.bucket_lists(neuron, speculation, fields, findings)
    with findings.stage():
        fitting.check_context_parallel(fields, lists, findings)
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
        if value is not None
        and not (name in vllm_options.NAMES and value in unset)
        and not (name in vllm_options.JSON and value == "null")
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
    config = readers.mapping(
        given.get("speculative_config", {}), "serve.speculative_config", findings
    )
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
    reader_of: dict[str, Callable[[Any, str, Findings], Any]] = {
        "model": readers.text,
        "dtype": readers.lower_text,
        "quantization": readers.lower_text,
        "kv_cache_dtype": readers.text,
        "max_model_len": readers.length,
        "gpu_memory_utilization": readers.fraction,
        **dict.fromkeys(_INTEGERS, readers.integer),
        **dict.fromkeys(_BOOLEANS, readers.boolean),
        **dict.fromkeys(("speculative_config", "additional_config"), readers.mapping),
        **dict.fromkeys(("kv_transfer_config", "compilation_config"), readers.plain_mapping),
    }
    fields: dict[str, Any] = {}
    for name, read in reader_of.items():
        if name in given:
            value = read(given.pop(name), f"serve.{name}", findings)
            if value is not None:
                fields[name] = value
    mode = fields.get("compilation_config", {}).get("mode")
    if isinstance(mode, str) and mode.upper() in vllm_options.COMPILATION_MODES:
        number = vllm_options.COMPILATION_MODES.index(mode.upper())
        fields["compilation_config"] = {**fields["compilation_config"], "mode": number}
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
            others.update(plain({name: _other_value(name, value)}))
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
    if name == "hf_overrides" and not isinstance(value, str | dict):
        raise ValueError("allowed: a mapping")
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
    neuron = readers.mapping(others.pop("neuron_config", None) or {}, _BUCKETS, findings)
    if neuron is None:
        return {}, {}
    _refuse_dashes(neuron, _LISTS, _BUCKETS, findings)
    for name in neuron:
        meant = nearest(name, _LISTS)
        if name not in _LISTS and meant is not None and "-" not in name:
            findings.note(f"{_BUCKETS}.{name} is kept as given (did you mean {meant}?)")
    given = {
        name: value
        if name in _LISTS
        else readers.plain_value(value, f"{_BUCKETS}.{name}", findings)
        for name, value in neuron.items()
        if value is not None
    }
    return given, {
        name: readers.plain_value(value, f"{path}.{name}", findings)
        for name, value in others.items()
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
            config[name] = readers.integer(config[name], f"{path}.{name}", findings)
    if "num_speculative_tokens" not in config:
        findings.problem(
            f"{path}.num_speculative_tokens",
            None,
            f"{path}.num_speculative_tokens is not set; allowed: an integer of at least 1",
        )
    for name in config.keys() - {"model", "num_speculative_tokens"}:
        config[name] = readers.plain_value(config[name], f"{path}.{name}", findings)
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
