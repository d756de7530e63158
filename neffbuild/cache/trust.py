"""Whom to believe, from the `cache` section of a config and the keys it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neffbuild.cache.tag import Trust
from neffbuild.config.build import CacheConfig
from neffbuild.config.errors import ConfigError

if TYPE_CHECKING:
    from neffbuild.cache.signing import SigningKey


def trust_of(cache: CacheConfig, signing: SigningKey | None = None) -> Trust:
    """Whom to believe by a `cache` section; the key we sign with ourselves is among them.

    Raises `ConfigError` where signatures are required and no key is named, or a key cannot be read.
    """
    if not cache.keys and signing is None:
        if cache.signature_required:
            raise ConfigError(
                "signatures are required, and there is no key to check them with",
                field="cache.keys",
                hint="name the public keys in `cache.keys`, or give them as options",
            )
        return Trust(min_sequence=cache.min_sequence)
    # Needs an optional package, and only where there are keys.
    from neffbuild.cache.signing import load_public_keys, signature_check

    keys = load_public_keys(cache.keys)
    if signing is not None:
        keys.append(signing.public)
    return Trust(cache.signature_required, cache.min_sequence, signature_check(keys))
