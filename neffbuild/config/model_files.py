"""Where a model's `config.json` is: a path, or a model id in the local Hugging Face cache.

Nothing here uses the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neffbuild.config.documents import read_model_json
from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig, model_config, overridden

_REPOSITORY = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
_REVISION = re.compile(r"[\w.][\w./-]*")


def load_model(
    reference: str,
    base: Path,
    *,
    field: str,
    revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The architecture that `reference` (an option of name `field`) leads to.

    `reference` is a directory with a `config.json`, such a file, or a model id; a relative path is
    relative to `base`. `overrides` are vLLM's `hf_overrides`. Raises `ConfigError` listing every
    place that was looked at.
    """
    file, name = _find(reference, base, field, revision)
    document = read_model_json(file)
    model = model_config(name, overridden(document, overrides or {}))
    return replace(model, folder=file.parent)


def _find(reference: str, base: Path, field: str, revision: str | None) -> tuple[Path, str]:
    if "://" in reference:
        raise ConfigError(
            f"{field} is {reference!r}, an address; allowed: a directory, a file, or a model id",
            field=field,
            value=reference,
            hint="set serve.hf_config_path to a local copy of the model's config.json",
        )
    try:
        path = base / Path(os.path.expandvars(reference)).expanduser()
        if path.is_file():
            return path, path.resolve().parent.name if path.name == "config.json" else path.stem
        if path.is_dir():
            if (path / "config.json").is_file():
                return path / "config.json", path.resolve().name
            raise ConfigError(
                f"{field} is {reference!r}: the directory {path} holds no config.json",
                field=field,
                value=reference,
                hint="neffbuild needs the model's config.json; its weights are optional",
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{field} is {reference!r}, which cannot be looked up: {error}",
            field=field,
            value=reference,
        ) from error
    looked = [str(path)]
    if _REPOSITORY.fullmatch(reference) and ".." not in reference:
        folder = _hub_cache() / ("models--" + reference.replace("/", "--"))
        for commit in _commits(folder, revision):
            file = folder / "snapshots" / commit / "config.json"
            if file.is_file():
                return file, reference
            looked.append(str(file))
        looked.append(str(folder / "refs" / (revision or "main")))
    raise ConfigError(
        f"{field} is {reference!r}, and no config.json was found; allowed: a directory with a "
        "config.json, such a file, or a model id in the local Hugging Face cache; looked at "
        + ", ".join(looked),
        field=field,
        value=reference,
        hint="name a directory that holds the model's config.json, or download the model first "
        "(nothing is fetched over the network here)",
    )


def _commits(folder: Path, revision: str | None) -> list[str]:
    """The snapshots of a cached repository to look in: the commit that the revision (`main` when
    none is given) names, then the revision itself, which may be a commit."""
    name = revision or "main"
    if not _REVISION.fullmatch(name) or ".." in name:
        return []
    commits = [revision] if revision else []
    try:
        commit = (folder / "refs" / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return commits
    return [commit, *commits] if _REVISION.fullmatch(commit) else commits


def _hub_cache() -> Path:
    """huggingface_hub's own order: `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `~/.cache`."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = os.environ.get(variable)
        if value:
            return Path(os.path.expandvars(value)).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"
