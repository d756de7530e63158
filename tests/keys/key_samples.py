"""Configs whose keys can be told without torch, a compiler or a particular host."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.plan import Plan
from neffbuild.config.build import BuildConfig
from neffbuild.config.load import load_config
from neffbuild.grid.shapes import Family, Shape
from neffbuild.toolchain.planning import plan_config
from neffbuild.toolchain.registry import load_toolchain

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DRAFT: dict[str, Any] = {**MODEL, "num_hidden_layers": 1, "draft_vocab_size": 512}
SERVE: dict[str, Any] = {
    "model": "model",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "block_size": 32,
    "tensor_parallel_size": 8,
    "additional_config": {"neuron_config": {"decode_context_length_buckets": [1024]}},
}
EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5}
TOOLCHAIN: dict[str, Any] = {
    "name": "inductor",
    "target": "x86-64-v3",
    # Pinned, so that a host without them has the same keys.
    "versions": {"torch": "2.13.0", "g++": "12.2.0"},
}

Keys = dict[Shape, str]


class Workspace:
    """A folder with two models and a config file, to change one thing at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "config.yaml"
        for name in ("model", "elsewhere/model"):
            self.write_model(name, MODEL)
        for name in ("draft", "elsewhere/draft"):
            self.write_model(name, DRAFT)

    def write_model(self, name: str, document: Mapping[str, Any]) -> None:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.json").write_text(json.dumps(document), encoding="utf-8")

    def load(self, serve: Mapping[str, Any] = {}, toolchain: Mapping[str, Any] = {}) -> BuildConfig:
        """The config with `serve` and `toolchain` laid over it, mappings merged; `...` takes an
        option away."""
        sections = {"serve": merged(SERVE, serve), "toolchain": merged(TOOLCHAIN, toolchain)}
        self.file.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return load_config(self.file)

    def plan(self, serve: Mapping[str, Any] = {}, toolchain: Mapping[str, Any] = {}) -> Plan:
        config = self.load(serve, toolchain)
        store = DirectoryStore(self.root / "no-cache")
        return plan_config(config, load_toolchain(config.toolchain.name), store)

    def keys(self, serve: Mapping[str, Any] = {}, toolchain: Mapping[str, Any] = {}) -> Keys:
        return keys_of(self.plan(serve, toolchain))


def keys_of(plan: Plan) -> Keys:
    return {unit.shape: unit.key for unit in plan.units if unit.key is not None}


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(base))
    for name, value in change.items():
        present = result.get(name)
        if value is ...:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(present, Mapping):
            result[name] = merged(present, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 → `{"a": {"b": 1}}`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    result: dict[str, Any] = value
    return result


def kept(before: Keys, after: Keys, family: Family) -> Iterator[bool]:
    """Of each shape of `family` that both have, whether it kept its key."""
    for shape, key in before.items():
        if shape.family is family and shape in after:
            yield after[shape] == key
