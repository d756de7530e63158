"""Keys: made once, read strictly, used through securesystemslib whoever holds them."""

from __future__ import annotations

import base64
import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Key, SSlibKey
from securesystemslib.signer import Signature as LibrarySignature
from securesystemslib.signer import Signer as LibrarySigner
from trust_samples import Signing, new_signing

from neffbuild.cache import signing
from neffbuild.cache.envelope import Envelope, Signature
from neffbuild.cache.signing import (
    generate_key,
    load_public_key,
    open_signing_key,
    signature_check,
    write_key_pair,
)
from neffbuild.config.errors import ConfigError, MissingExtra, StoreError

TEXT = Envelope("text/plain", b"payload")


def signed_by(*keys: Signing) -> Envelope:
    signatures = [one for key in keys for one in key.key.sign(TEXT.signed_bytes)]
    return TEXT.with_signatures(signatures)


class TestCheck:
    def test_one_good_signature_by_a_known_key_is_enough(
        self, release: Signing, stranger: Signing
    ) -> None:
        check = signature_check([release.key.public])
        assert check(signed_by(release)) is None
        assert check(signed_by(stranger, release)) is None
        both = signature_check([release.key.public, stranger.key.public])
        assert both(signed_by(stranger)) is None

    def test_signatures_by_others_say_nothing(self, release: Signing, stranger: Signing) -> None:
        check = signature_check([release.key.public])
        reason = check(signed_by(stranger))
        assert reason is not None
        assert stranger.key.keyid in reason
        assert release.key.keyid in reason
        assert check(TEXT.with_signatures([Signature("", b"x" * 64)])) is not None

    def test_a_bad_one_beside_a_good_one_of_the_same_key(self, release: Signing) -> None:
        [good] = release.key.sign(TEXT.signed_bytes)
        bad = Signature(good.keyid, bytes(64))
        check = signature_check([release.key.public])
        assert check(TEXT.with_signatures([bad, good])) is None
        reason = check(TEXT.with_signatures([bad, Signature(good.keyid, b"short")]))
        assert reason is not None
        assert "was changed" in reason

    def test_type_and_payload_are_both_signed(self, release: Signing) -> None:
        check = signature_check([release.key.public])
        signatures = signed_by(release).signatures
        for other in (Envelope("text/html", b"payload"), Envelope("text/plain", b"other")):
            assert check(other.with_signatures(signatures)) is not None

    def test_no_keys_believe_nothing(self, release: Signing) -> None:
        assert signature_check([])(signed_by(release)) is not None


class TestFiles:
    @pytest.mark.parametrize("algorithm", signing.ALGORITHMS)
    def test_every_algorithm_signs_and_verifies(self, tmp_path: Path, algorithm: str) -> None:
        made = new_signing(tmp_path, algorithm)
        assert stat.S_IMODE(made.private.stat().st_mode) == 0o600
        assert b"PRIVATE" not in made.public.read_bytes()
        assert load_public_key(str(made.public)) == made.key.public
        assert signature_check([load_public_key(str(made.public))])(signed_by(made)) is None

    def test_unknown_algorithm(self) -> None:
        with pytest.raises(ConfigError, match="allowed: ed25519, ecdsa, rsa"):
            generate_key("md5")

    @pytest.mark.parametrize("there", ["private", "public"])
    @pytest.mark.parametrize("dangling", [False, True])
    def test_a_key_is_never_overwritten(self, tmp_path: Path, there: str, dangling: bool) -> None:
        paths = {name: tmp_path / name for name in ("private", "public")}
        if dangling:
            paths[there].symlink_to(tmp_path / "elsewhere")
        else:
            paths[there].write_text("mine")
        with pytest.raises(ConfigError, match="never overwritten"):
            write_key_pair(generate_key(), paths["private"], paths["public"])
        assert [path.name for path in tmp_path.iterdir()] == [there]
        assert dangling or paths[there].read_text() == "mine"

    def test_a_key_that_cannot_be_written_leaves_no_half(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot write the key"):
            write_key_pair(generate_key(), tmp_path / "it.key", tmp_path / "none" / "it.pub")
        assert list(tmp_path.iterdir()) == []

    def test_a_private_key_is_not_a_public_one(self, release: Signing) -> None:
        with pytest.raises(ConfigError, match="is a private key") as caught:
            load_public_key(str(release.private))
        assert caught.value.field == "cache.keys"

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"junk",
            b"\xff\xfe",
            b"{",
            b"{}",
            b"[]",
            b'{"keytype": "rsa", "scheme": "none", "keyval": {"public": ""}}',
            b'{"keytype": "ed25519", "scheme": "ed25519", "keyval": {}}',
            b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        ],
    )
    def test_what_is_no_key_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "it.pub"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"it\.pub is not a public key"):
            load_public_key(str(path))
        with pytest.raises(ConfigError, match=r"it\.pub is not a private key"):
            open_signing_key(str(path))

    def test_what_is_wrong_with_a_private_key_is_said_without_it(self, tmp_path: Path) -> None:
        path = tmp_path / "it.key"
        path.write_bytes(generate_key().private_pem.replace(b"M", b"secret"))
        with pytest.raises(ConfigError) as caught:
            open_signing_key(str(path))
        assert "secret" not in f"{caught.value.message} {caught.value.hint}"

    def test_an_encrypted_key_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization as pem

        key = pem.load_pem_private_key(generate_key().private_pem, None)
        secret = pem.BestAvailableEncryption(b"x")
        path = tmp_path / "it.key"
        path.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, secret))
        with pytest.raises(ConfigError) as caught:
            open_signing_key(str(path))
        assert "not encrypted" in str(caught.value.hint)

    def test_files_that_are_not_there(self, tmp_path: Path) -> None:
        for use in (load_public_key, open_signing_key):
            with pytest.raises(ConfigError, match=r"none\.key: No such file"):
                use(str(tmp_path / "none.key"))

    def test_a_private_key_that_others_can_read_is_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = new_signing(tmp_path)
        assert caplog.text == ""
        made.private.chmod(0o640)
        open_signing_key(str(made.private))
        assert "chmod 600" in caplog.text

    def test_the_json_form_names_another_scheme(self, tmp_path: Path) -> None:
        """Key services sign with RSA in more ways than one; PEM does not say in which."""
        signer = CryptoSigner.generate_rsa(scheme="rsa-pkcs1v15-sha256", size=2048)
        path = tmp_path / "it.json"
        path.write_text(json.dumps(signer.public_key.to_dict()))
        key = load_public_key(str(path))
        assert key.scheme == "rsa-pkcs1v15-sha256"
        assert len(key.keyid) == 64
        made = signer.sign(TEXT.signed_bytes)
        envelope = TEXT.with_signatures([Signature(key.keyid, bytes.fromhex(made.signature))])
        assert signature_check([key])(envelope) is None

    def test_the_json_form_may_name_its_id(self, tmp_path: Path) -> None:
        public = CryptoSigner.generate_ed25519().public_key
        path = tmp_path / "it.json"
        path.write_text(json.dumps({**public.to_dict(), "keyid": "release-2026"}))
        assert load_public_key(str(path)).keyid == "release-2026"


class RecordedService(LibrarySigner):
    """A key service: it keeps a private key, and what it was asked for."""

    asked: list[tuple[str, bytes]]
    held: CryptoSigner
    failure: Exception | None
    extra: dict[str, Any]

    def __init__(self, uri: str, public: Key) -> None:
        self._uri = uri
        self._public = public

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: Any = None
    ) -> RecordedService:
        if priv_key_uri == "recorded:malformed":
            raise ValueError("no version in the name")
        return cls(priv_key_uri, public_key)

    @property
    def public_key(self) -> Key:
        return self._public

    def sign(self, payload: bytes) -> LibrarySignature:
        self.asked.append((self._uri, payload))
        if self.failure is not None:
            raise self.failure
        signature = self.held.sign(payload).signature
        return LibrarySignature(self._public.keyid, signature, dict(self.extra))


@pytest.fixture
def service() -> Iterator[type[RecordedService]]:
    RecordedService.asked = []
    RecordedService.held = CryptoSigner.generate_ecdsa()
    RecordedService.failure = None
    RecordedService.extra = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIGNER_FOR_URI_SCHEME, "recorded", RecordedService)
        yield RecordedService


class TestKeyServices:
    """Through the registry of securesystemslib, which has awskms, gcpkms, azurekms, hv and others."""

    def test_uri_and_bytes_arrive_as_given(self, service: type[RecordedService]) -> None:
        public = service.held.public_key
        key = open_signing_key("recorded:projects/p/keys/k/1", [public])
        envelope = TEXT.with_signatures(key.sign(TEXT.signed_bytes))
        assert service.asked == [("recorded:projects/p/keys/k/1", TEXT.signed_bytes)]
        assert key.keyid == public.keyid
        assert signature_check([public])(envelope) is None

    @pytest.mark.parametrize("count", [0, 2])
    def test_its_public_key_has_to_be_known(
        self, service: type[RecordedService], count: int
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            open_signing_key("recorded:k", [service.held.public_key] * count)
        assert caught.value.field == "--public-key"

    def test_signatures_that_the_public_key_does_not_confirm_are_not_written(
        self, service: type[RecordedService]
    ) -> None:
        other = CryptoSigner.generate_ecdsa().public_key
        with pytest.raises(ConfigError, match="not good by the public key") as caught:
            open_signing_key("recorded:k", [other]).sign(b"x")
        assert caught.value.field == "--public-key"

    def test_what_an_envelope_cannot_keep_is_refused(self, service: type[RecordedService]) -> None:
        service.extra = {"bundle": "…"}
        key = open_signing_key("recorded:k", [service.held.public_key])
        with pytest.raises(ConfigError, match=r"more than an envelope keeps \(bundle\)"):
            key.sign(b"x")

    def test_a_service_that_refuses_is_a_store_error(self, service: type[RecordedService]) -> None:
        service.failure = RuntimeError("AccessDenied: kms:Sign")
        key = open_signing_key("recorded:k", [service.held.public_key])
        with pytest.raises(StoreError, match=r"recorded:k: RuntimeError: AccessDenied") as caught:
            key.sign(b"x")
        assert caught.value.exit_status == 3

    def test_a_malformed_uri(self, service: type[RecordedService]) -> None:
        with pytest.raises(ConfigError, match="no version in the name"):
            open_signing_key("recorded:malformed", [service.held.public_key])

    def test_an_unknown_scheme_names_those_there_are(self) -> None:
        with pytest.raises(ConfigError) as caught:
            open_signing_key("kms2:alias/x")
        for scheme in ("awskms", "gcpkms", "azurekms", "hv"):
            assert scheme in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("uri", "extra"),
        [
            ("gcpkms:projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1", "gcpkms"),
            ("azurekms://vault.vault.azure.net/keys/k/1", "azurekms"),
            ("hv:k/1", "vault"),
        ],
    )
    def test_a_service_whose_library_is_missing_says_what_to_install(
        self, uri: str, extra: str
    ) -> None:
        public = CryptoSigner.generate_ecdsa().public_key
        with pytest.raises(MissingExtra) as caught:
            open_signing_key(uri, [public])
        assert f"securesystemslib[{extra}]" in str(caught.value.hint)

    def test_aws_is_asked_for_a_signature_over_the_digest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The real AWS signer, its answers recorded from the published interface of KMS."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
        from cryptography.hazmat.primitives.hashes import SHA256
        from securesystemslib.signer import _aws_signer

        private = ec.generate_private_key(ec.SECP256R1())
        asked: list[dict[str, Any]] = []

        class Client:
            def sign(self, **request: Any) -> dict[str, bytes]:
                asked.append(request)
                digest = request["Message"]
                return {"Signature": private.sign(digest, ec.ECDSA(Prehashed(SHA256())))}

        monkeypatch.setattr(_aws_signer.boto3, "client", lambda name: Client())
        public = SSlibKey.from_crypto(private.public_key())
        key = open_signing_key("awskms:alias/release", [public])
        envelope = TEXT.with_signatures(key.sign(TEXT.signed_bytes))
        assert signature_check([public])(envelope) is None
        [request] = asked
        assert request["KeyId"] == "alias/release"
        assert (request["MessageType"], request["SigningAlgorithm"]) == ("DIGEST", "ECDSA_SHA_256")


@pytest.mark.parametrize(
    "use",
    [
        lambda made: load_public_key(str(made.public)),
        lambda made: open_signing_key(str(made.private)),
        lambda made: generate_key(),
    ],
    ids=["verify", "sign", "make"],
)
def test_without_the_extra_it_is_named(
    use: Callable[[Signing], object], release: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "securesystemslib", None)
    with pytest.raises(MissingExtra) as caught:
        use(release)
    assert "neffbuild[sign]" in str(caught.value.hint)


def test_dsse_in_the_form_of_others(release: Signing) -> None:
    """What we sign, securesystemslib's own envelope verifies."""
    from securesystemslib.dsse import Envelope as LibraryEnvelope

    document = json.loads(signed_by(release).to_json())
    assert base64.b64decode(document["payload"]) == b"payload"
    accepted = LibraryEnvelope.from_dict(document).verify([release.key.public], 1)
    assert accepted.keys() == {release.key.keyid}
