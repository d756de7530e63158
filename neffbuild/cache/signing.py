"""Keys: making, reading and using them, through `securesystemslib`.

A private key is a file (PEM, PKCS #8) or a URI of whatever `securesystemslib` has a signer for: cloud
key services, Vault, PKCS #11. A public key is a file: PEM, or `securesystemslib`'s JSON (`keytype`,
`scheme`, `keyval`, `keyid`) where the scheme is not the usual one of its kind of key.

Nothing here is imported before a key is used.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffbuild.cache.canonical import digest_document, parse_json
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.tag import SignatureCheck
from neffbuild.config.errors import ConfigError, MissingExtra, StoreError

if TYPE_CHECKING:
    from securesystemslib.signer import Key
    from securesystemslib.signer import Signer as LibrarySigner

ALGORITHMS = ("ed25519", "ecdsa", "rsa")
"""What `generate_key` can make; the first is the default."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):.+", re.DOTALL)
_EXTRAS = {"hv": "vault"}  # the others are named after their URI scheme
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key that can sign. `name` is the file or URI it was opened by, `public` its public half."""

    name: str
    public: Key
    signer: LibrarySigner

    @property
    def keyid(self) -> str:
        """What `Signature.keyid` says: SHA-256 of the public key with its type and scheme."""
        return self.public.keyid

    def sign(self, data: bytes) -> Sequence[Signature]:
        """The signature over `data`: a `neffbuild.cache.tag.Signer`.

        Raises `StoreError` when the key's service cannot be reached or refuses, `ConfigError` when
        what it signs is not good by the public key.
        """
        from securesystemslib.exceptions import UnverifiedSignatureError

        try:
            made = self.signer.sign(data)
        except Exception as error:
            # Any library of any key service: whatever it raises is why there is no signature.
            raise StoreError(
                f"cannot sign with {self.name}: {type(error).__name__}: {error}", value=self.name
            ) from error
        if made.unrecognized_fields:
            raise ConfigError(
                f"signatures by {self.name} hold more than an envelope keeps "
                f"({', '.join(sorted(made.unrecognized_fields))})",
                field="--key",
                value=self.name,
                hint="use a key file or a key service instead",
            )
        try:
            self.public.verify_signature(made, data)
        except UnverifiedSignatureError as error:
            raise ConfigError(
                f"what {self.name} signs is not good by the public key {self.keyid}",
                field="--public-key",
                value=self.name,
                hint="give the public key that belongs to it; one that is not used in the usual scheme "
                "of its kind needs the JSON form, which names the scheme",
            ) from error
        return [Signature(made.keyid, bytes.fromhex(made.signature))]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A new key: PEM of its private half (PKCS #8, not encrypted) and of its public half."""

    private_pem: bytes
    public_pem: bytes
    keyid: str


def signature_check(keys: Sequence[Key]) -> SignatureCheck:
    """The check that an envelope has a good signature by at least one of these keys. Signatures by
    others are ignored: they say nothing, good or bad."""
    known = {key.keyid: key for key in keys}

    def check(envelope: Envelope) -> str | None:
        from securesystemslib.exceptions import UnverifiedSignatureError
        from securesystemslib.signer import Signature as LibrarySignature

        changed = []
        for one in envelope.signatures:
            if one.keyid not in known:
                continue
            signature = LibrarySignature(one.keyid, one.sig.hex())
            try:
                known[one.keyid].verify_signature(signature, envelope.signed_bytes)
            except UnverifiedSignatureError:
                changed.append(one.keyid)
            else:
                return None
        if changed:
            return f"it is not what the key {changed[0]} signed: one of the two was changed"
        signers = {one.keyid for one in envelope.signatures}
        return f"it is signed by {_some(signers)}, and trusted are {_some(known)}"

    return check


def load_public_keys(paths: Iterable[str]) -> list[Key]:
    """The public keys in these files. Raises `ConfigError` naming the file, `MissingExtra`."""
    return [load_public_key(path) for path in paths]


def load_public_key(path: str) -> Key:
    """The public key in a file. Raises as `load_public_keys` does."""
    _require_library()
    data = _read(path, "public key", "cache.keys")
    if b"PRIVATE KEY" in data:
        raise ConfigError(
            f"{path} is a private key",
            field="cache.keys",
            value=path,
            hint="name the public key beside it; who verifies needs no private key",
        )
    read = _from_json if data.lstrip().startswith(b"{") else _from_pem
    try:
        return read(data)
    except Exception as error:
        raise ConfigError(
            f"{path} is not a public key that can be used: {error}",
            field="cache.keys",
            value=path,
            hint="allowed: PEM (`BEGIN PUBLIC KEY`) or securesystemslib's JSON form",
        ) from error


def open_signing_key(name: str, public: Sequence[Key] = ()) -> SigningKey:
    """The key in a file, or behind a URI (`awskms:…`, `gcpkms:…`, `azurekms:…`, `hv:…`, …).

    A URI says nothing of its public half: `public` must be that key alone. For a file it is ignored.
    Raises `ConfigError` and `MissingExtra`.
    """
    _require_library()
    scheme = _URI.fullmatch(name)
    if scheme is not None and not Path(name).exists():
        return _open_uri(name, scheme[1], public)
    return _open_file(name)


def generate_key(algorithm: str = ALGORITHMS[0]) -> KeyPair:
    """A new key of one of `ALGORITHMS`. Raises `ConfigError` for another, `MissingExtra`."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"cannot make a key for {algorithm!r}; allowed: {', '.join(ALGORITHMS)}",
            field="--algorithm",
            value=algorithm,
        )
    _require_library()
    from cryptography.hazmat.primitives import serialization
    from securesystemslib.signer import CryptoSigner

    make: dict[str, Callable[[], CryptoSigner]] = {
        "ed25519": CryptoSigner.generate_ed25519,
        "ecdsa": CryptoSigner.generate_ecdsa,
        "rsa": CryptoSigner.generate_rsa,
    }
    signer = make[algorithm]()
    private = serialization.load_pem_private_key(signer.private_bytes, None)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return KeyPair(signer.private_bytes, public, signer.public_key.keyid)


def write_key_pair(pair: KeyPair, private: Path, public: Path) -> None:
    """Write a key to two files that must not exist yet, the private one for its owner alone.

    Raises `ConfigError` when one exists or cannot be written; nothing is written then.
    """
    _write_new(private, pair.private_pem, 0o600)
    try:
        _write_new(public, pair.public_pem, 0o644)
    except BaseException:
        private.unlink()
        raise


def _open_uri(uri: str, scheme: str, public: Sequence[Key]) -> SigningKey:
    from securesystemslib.exceptions import UnsupportedLibraryError
    from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Signer

    if scheme not in SIGNER_FOR_URI_SCHEME:
        raise ConfigError(
            f"cannot sign with {uri!r}: there is no such file, and no signer for {scheme}:",
            field="--key",
            value=uri,
            hint=f"allowed: a file, or a URI with {', '.join(sorted(SIGNER_FOR_URI_SCHEME))}",
        )
    if len(public) != 1:
        raise ConfigError(
            f"which public key belongs to {uri} is not known ({len(public)} could be meant)",
            field="--public-key",
            value=uri,
            hint="give --public-key FILE",
        )
    try:
        signer = Signer.from_priv_key_uri(uri, public[0])
    except UnsupportedLibraryError as error:
        raise MissingExtra(
            f"cannot sign with {uri}: {error}",
            field="--key",
            value=uri,
            hint=f"pip install 'securesystemslib[{_EXTRAS.get(scheme, scheme)}]'",
        ) from error
    except Exception as error:
        # Each signer raises what its library does: a malformed URI, no region, no such module.
        raise ConfigError(
            f"cannot sign with {uri}: {type(error).__name__}: {error}", field="--key", value=uri
        ) from error
    return SigningKey(uri, public[0], signer)


def _open_file(path: str) -> SigningKey:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    data = _read(path, "private key", "--key")
    try:
        key: Any = load_pem_private_key(data, None)
        signer = CryptoSigner(key)
    except Exception as error:
        # What is wrong is said without the file's content: it may be a secret all the same.
        raise ConfigError(
            f"{path} is not a private key that can be used ({type(error).__name__})",
            field="--key",
            value=path,
            hint="allowed: PEM (PKCS #8, not encrypted) of an Ed25519, ECDSA or RSA key, as "
            "`neffbuild keygen` writes it",
        ) from error
    if Path(path).stat().st_mode & 0o077:
        _log.warning("others can read the private key %s; run `chmod 600` on it", path)
    return SigningKey(path, signer.public_key, signer)


def _from_pem(data: bytes) -> Key:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    key: Any = load_pem_public_key(data)
    return SSlibKey.from_crypto(key)


def _from_json(data: bytes) -> Key:
    from securesystemslib.signer import Key

    document = parse_json(data, "public key")
    keyid = document.pop("keyid", None) or digest_document(
        {name: document[name] for name in ("keytype", "scheme", "keyval")}
    )
    return Key.from_dict(keyid, document)


def _require_library() -> None:
    missing = [name for name in ("securesystemslib", "cryptography") if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"signatures need {' and '.join(missing)}, which is not installed",
            field="cache.keys",
            hint="pip install 'neffbuild[sign]'",
        )


def _read(path: str, what: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the {what} {path}: {getattr(error, 'strerror', None) or error}",
            field=field,
            value=path,
        ) from error


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        why = "it exists, and keys are never overwritten" if exists else error.strerror
        raise ConfigError(
            f"cannot write the key {path}: {why}",
            field="--out",
            value=str(path),
            hint="choose another --out",
        ) from error


def _some(keyids: Iterable[str]) -> str:
    listed = sorted(keyids)
    shown = ", ".join(one or "an unnamed key" for one in listed[:3])
    return shown + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "none"
