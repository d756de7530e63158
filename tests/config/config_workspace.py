"""A small valid config on disk, to change one thing at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}
SERVE: dict[str, Any] = {
    "model": "model",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "block_size": 32,
}
EAGLE3 = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5}
DRAFT = {**MODEL, "num_hidden_layers": 1, "max_position_embeddings": 2048}


class Workspace:
    """A folder with a target model, a draft model and a config file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "config.yaml"
        self.write_model("model", MODEL)
        self.write_model("draft", DRAFT)

    def write_model(self, name: str, document: dict[str, Any]) -> None:
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "config.json").write_text(json.dumps(document), encoding="utf-8")

    def write(self, serve: dict[str, Any] | None = None, **sections: Any) -> Path:
        """The valid config with `serve` laid over it; a value of `...` takes an option away."""
        merged = {**copy.deepcopy(SERVE), **(serve or {})}
        merged = {name: value for name, value in merged.items() if value is not ...}
        self.file.write_text(yaml.safe_dump({"serve": merged, **sections}), encoding="utf-8")
        return self.file

    def load(self, serve: dict[str, Any] | None = None, **sections: Any) -> BuildConfig:
        return load_config(self.write(serve, **sections))

    def refused(self, serve: dict[str, Any] | None = None, **sections: Any) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            self.load(serve, **sections)
        assert str(self.file) in caught.value.message
        return caught.value


def neuron(**lists: Any) -> dict[str, Any]:
    """`additional_config` with these bucket lists."""
    return {"additional_config": {"neuron_config": lists}}
