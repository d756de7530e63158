"""What commands that read or write tags share: whom to believe, and whose name to sign with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.signing import SigningKey
    from neffbuild.cache.tag import TagRef, Trust
    from neffbuild.config.build import CacheConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)


def reading_options(keys: str = "--key") -> Callable[[_Command], _Command]:
    """Whom to believe: `--config` and what overrides its `cache` section. `keys` is what the option
    for public keys is called."""

    def decorate(command: _Command) -> _Command:
        for option in (
            click.option(
                "--require-signature",
                is_flag=True,
                help="Refuse what is not signed (the default where there are keys).",
            ),
            click.option(
                keys,
                "keys",
                multiple=True,
                metavar="FILE",
                help="Public key to believe; repeatable (overrides `cache.keys`).",
            ),
            click.option(
                "--config",
                "config_file",
                type=_FILE,
                help="Config whose `cache` section says whom to believe, and where the cache is.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def min_sequence_option(command: _Command) -> _Command:
    return click.option(
        "--min-sequence",
        type=click.IntRange(min=0),
        metavar="N",
        help="Lowest sequence that the tag may have (overrides `cache.min_sequence`).",
    )(command)


def signing_options(command: _Command) -> _Command:
    """Whose name to sign with, and for how long."""
    for option in (
        click.option(
            "--expires",
            metavar="DURATION",
            help="How long the tag is good: 12h, 30d, 8w (default: for ever).",
        ),
        click.option("--public-key", type=_FILE, help="Public half of --key, where that is a URI."),
        click.option(
            "--key",
            metavar="FILE|URI",
            envvar="NEFFBUILD_SIGNING_KEY",
            help="Private key to sign with: a file, or awskms:…, gcpkms:…, azurekms:…, hv:… "
            "(default: $NEFFBUILD_SIGNING_KEY).",
        ),
    ):
        command = option(command)
    return command


def cache_settings(
    config_file: Path | None,
    cache: Path | None,
    keys: Sequence[str],
    require_signature: bool,
    min_sequence: int | None = None,
) -> CacheConfig:
    """The `cache` section of a config, or the defaults, with what the command line overrides."""
    from neffbuild.config.build import CacheConfig, expanded_path
    from neffbuild.config.load import load_config

    given: dict[str, Any] = {}
    if cache is not None:
        given["local"] = str(cache)
    if keys:
        given["keys"] = [str(expanded_path(key, Path.cwd())) for key in keys]
    if keys or require_signature:
        given["require_signature"] = True
    if min_sequence is not None:
        given["min_sequence"] = min_sequence
    if config_file is not None:
        return load_config(config_file, {"cache": given}).cache
    return CacheConfig(**{**given, "keys": tuple(given.get("keys", ()))})


def trust_of(cache: CacheConfig, signing: SigningKey | None = None) -> Trust:
    """As `neffbuild.cache.trust.trust_of`."""
    from neffbuild.cache import trust

    return trust.trust_of(cache, signing)


def signing_key(key: str | None, public_key: Path | None, cache: CacheConfig) -> SigningKey | None:
    """The key to sign with, or None where there is none and none is needed."""
    if key is None:
        if cache.signature_required:
            raise ConfigError(
                "signatures are required, and there is no key to sign with",
                field="--key",
                hint="give --key FILE or URI, or set NEFFBUILD_SIGNING_KEY; `neffbuild keygen` makes a key",
            )
        return None
    from neffbuild.cache.signing import load_public_keys, open_signing_key

    return open_signing_key(key, load_public_keys([str(public_key)] if public_key else cache.keys))


def expiry(duration: str | None) -> datetime | None:
    """When a tag written now expires."""
    from neffbuild.config.duration import parse_duration

    if duration is None:
        return None
    return datetime.now(UTC) + parse_duration(duration, field="--expires")


def tag_ref(text: str, config_file: Path | None, cache: CacheConfig) -> TagRef:
    """NAME:TAG, or with a config a TAG of its `cache.name`."""
    from neffbuild.cache.tag import TagRef

    return TagRef.parse(text, default_name=cache.name if config_file else None)


def tag_or_digest(text: str, config_file: Path | None, cache: CacheConfig) -> TagRef | str:
    """A tag as `tag_ref` takes it, or a digest of an index or manifest."""
    from neffbuild.cache.canonical import is_digest

    return text if is_digest(text) else tag_ref(text, config_file, cache)
