"""What several commands take, declared once: the config (or a `vllm serve` line), stores, `--json`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.config.build import BuildConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])


def json_option(command: _Command) -> _Command:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
    )(command)


def cache_option(command: _Command) -> _Command:
    return click.option(
        "--cache",
        type=click.Path(path_type=Path, file_okay=False),
        help="Local cache directory (overrides the config's `cache.local`).",
    )(command)


def config_arguments(command: _Command) -> _Command:
    """`CONFIG [MORE…]`, or `-- vllm serve …` in place of CONFIG. Words arrive in `words`."""
    return click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG | -- vllm serve …"
    )(command)


def load_config(words: tuple[str, ...], cache: Path | None) -> tuple[BuildConfig, tuple[str, ...]]:
    """The config that `words` name, and the other words: those after a config file, or those before a
    `vllm serve` line (`neffbuild explain UNIT -- vllm serve …`)."""
    from neffbuild.config import load

    overrides = {"cache": {"local": str(cache)}} if cache else {}
    if not words:
        raise ConfigError(
            "no serve config was given",
            hint="name a config file, or put a `vllm serve …` command line after `--`",
        )
    start = _vllm_start(words)
    if start is not None:
        return load.load_vllm_command(list(words[start:]), overrides), words[:start]
    return load.load_config(Path(words[0]), overrides), words[1:]


def _vllm_start(words: Sequence[str]) -> int | None:
    """Where a `vllm serve …` or `python -m vllm.… …` line begins, or None."""
    for index, (word, following) in enumerate(pairwise((*words, ""))):
        name = PurePath(word).name
        if (name == "vllm" and (following == "serve" or index == 0)) or (
            name.startswith("python") and following == "-m"
        ):
            return index
    return None


def config_words(words: Sequence[str], cache: Path | None) -> str:
    """The arguments that name the same config and cache to another command, quoted for a shell."""
    own = ["--cache", str(cache)] if cache else []
    start = _vllm_start(words)
    if start is not None:
        return shlex.join([*own, "--", *words[start:]])
    return shlex.join([*words[:1], *own])


def only_config(words: tuple[str, ...], cache: Path | None) -> BuildConfig:
    """The config that `words` are, refusing anything after it."""
    config, rest = load_config(words, cache)
    if rest:
        raise ConfigError(
            f"unexpected argument {rest[0]!r} beside the config",
            value=rest[0],
            hint="one config at a time; quote names with spaces",
        )
    return config


def local_store(config: BuildConfig) -> DirectoryStore:
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.config.build import cache_directory

    return DirectoryStore(cache_directory(config.cache))
