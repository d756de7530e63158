"""What several commands take, declared once: the config (or a `vllm serve` line), stores, `--json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    """The config that `words` start with, and the words after it."""
    from neffbuild.config import load

    overrides = {"cache": {"local": str(cache)}} if cache else {}
    if not words:
        raise ConfigError(
            "no serve config was given",
            hint="name a config file, or put a `vllm serve …` command line after `--`",
        )
    if words[0] == "vllm":
        return load.load_vllm_command(list(words), overrides), ()
    return load.load_config(Path(words[0]), overrides), words[1:]


def only_config(words: tuple[str, ...], cache: Path | None) -> BuildConfig:
    """The config that `words` are, refusing anything after it."""
    config, rest = load_config(words, cache)
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r} after the config", value=rest[0])
    return config


def local_store(config: BuildConfig) -> DirectoryStore:
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.config.build import cache_directory

    return DirectoryStore(cache_directory(config.cache))


def own_store(cache: Path | None) -> DirectoryStore:
    """The local cache of commands that work without a serve config."""
    from neffbuild.cache.directory import DirectoryStore
    from neffbuild.config.build import CacheConfig, cache_directory

    return DirectoryStore(cache_directory(CacheConfig(local=str(cache) if cache else None)))
