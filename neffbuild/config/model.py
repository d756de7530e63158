"""A model's architecture: its Hugging Face `config.json`, normalised, without weights or paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`architecture` is the normalised `config.json`: what enters recipes and what graphs are built
    from. `name` is for people (the folder's or the model's name) and enters nothing."""

    name: str
    architecture: Mapping[str, Any]
