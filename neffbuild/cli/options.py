"""What several commands take, declared once: the config (or a `vllm serve` line), stores, `--json`."""

from __future__ import annotations

import re
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
    from neffbuild.config.load import Overrides

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def json_option(command: _Command) -> _Command:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
    )(command)


class _Directory(click.Path):
    """A directory of this machine. An unset variable (`--cache "$CACHE"`) must not mean the working
    directory, nor a URL a folder in it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; name a directory", param, ctx)
        if isinstance(value, str) and "://" in value:
            self.fail(
                f"{value!r} is a URL; a local cache is a directory: put a URL into cache.remotes",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def cache_option(command: _Command) -> _Command:
    return click.option(
        "--cache",
        type=_Directory(path_type=Path, file_okay=False),
        help="Local cache directory (overrides the config's `cache.local`).",
    )(command)


def config_arguments(command: _Command) -> _Command:
    """`CONFIG [MORE…]`, or `-- vllm serve …` in place of CONFIG. Words arrive in `words`."""
    return click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG | -- vllm serve …"
    )(command)


def load_config(
    words: tuple[str, ...], cache: Path | None, sections: Overrides | None = None
) -> tuple[BuildConfig, tuple[str, ...]]:
    """The config that `words` name, and the other words: those after a config file, or those before a
    `vllm serve` line (`neffbuild explain UNIT -- vllm serve …`). `cache` and `sections` win over what
    the config says."""
    from neffbuild.config import load

    overrides = {**(sections or {}), **({"cache": {"local": str(cache)}} if cache else {})}
    if not words:
        raise ConfigError(
            "no serve config was given",
            hint="name a config file, or put a `vllm serve …` command line after `--`",
        )
    start = _vllm_start(words)
    if start is not None:
        _refuse_assignments(words[:start])
        return load.load_vllm_command(list(words[start:]), overrides), words[:start]
    return load.load_config(_config_file(words[0]), overrides), words[1:]


def _refuse_assignments(before: Sequence[str]) -> None:
    for word in before:
        if _ASSIGNMENT.match(word):
            raise ConfigError(
                f"{word!r} stands before `vllm serve`, where a shell would take it for a variable and "
                "neffbuild does not",
                value=word,
                hint=f"set it for neffbuild: {word} neffbuild … -- vllm serve …",
            )


def _config_file(word: str) -> Path:
    """The config file that a word names, which has to look like one."""
    if not word.strip():
        raise ConfigError(
            f"the config's name is {word!r}",
            value=word,
            hint="name a config file; in a script, the variable that should hold its name may be empty",
        )
    if "://" in word:
        raise ConfigError(
            f"{word!r} is a URL; a config is a local file here",
            value=word,
            hint="fetch the file first and name it by its path",
        )
    if re.match(r"(\S*/)?vllm\s+serve\s", word):
        raise ConfigError(
            "the whole `vllm serve` line is one word",
            value=word,
            hint="leave out the quotes around it: -- vllm serve MODEL --option value …",
        )
    return Path(word)


def require_config_or_store(words: Sequence[str]) -> None:
    """Raise `ConfigError` where the first word, which may be a config file or a store's directory,
    names nothing."""
    if not words or not words[0].strip() or _vllm_start(words) is not None:
        return
    try:
        Path(words[0]).stat()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file or directory {words[0]} (a config file or a store was expected)",
            value=words[0],
            hint="check the path; a store elsewhere is named by its URL (s3://BUCKET/PREFIX)",
        ) from None
    except (OSError, ValueError):
        return  # for whoever reads it to say


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


def only_config(
    words: tuple[str, ...], cache: Path | None, sections: Overrides | None = None
) -> BuildConfig:
    """The config that `words` are, refusing anything after it."""
    config, rest = load_config(words, cache, sections)
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
