"""The policy that farm nodes are given is what a farm asks of a bucket: all of it, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from cache_samples import ANYONE, fill, make_manifest
from s3_servers import S3Server

from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.s3 import S3Options, S3Store
from neffbuild.cache.s3.connection import S3Connection
from neffbuild.cache.tag import TagRef
from neffbuild.cache.tiered import Tier, TieredStore
from neffbuild.cache.transfer import push

sys.path.append(str(Path(__file__).parents[1] / "machines"))
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "ec2"))

from machine_samples import document

ACTIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
}


def allowing(
    policy: dict[str, Any], operation: str, request: dict[str, Any]
) -> dict[str, Any] | None:
    """The statement that allows a request, as S3 would find it."""
    resource = f"arn:aws:s3:::{request['Bucket']}"
    if "Key" in request:
        resource += f"/{request['Key']}"

    def allows(statement: dict[str, Any]) -> bool:
        actions, resources = (
            value if isinstance(value, list) else [value]
            for value in (statement["Action"], statement["Resource"])
        )
        prefix = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix")
        return (
            ACTIONS[operation] in actions
            and any(fnmatchcase(resource, each) for each in resources)
            and (prefix is None or fnmatchcase(request.get("Prefix", ""), prefix))
        )

    return next(filter(allows, policy["Statement"]), None)


class Enforced:
    """Refuses, in front of a server, what a policy does not allow."""

    def __init__(self, policy: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        self.used: set[str] = set()
        self.refused: list[tuple[str, str | None]] = []
        send = S3Connection.send

        def checked(
            connection: S3Connection, operation: str, key: str | None = None, **parameters: Any
        ) -> Any:
            request = {"Bucket": connection.options.bucket, **parameters}
            if key is not None:
                request["Key"] = key
            statement = allowing(policy, operation, request)
            if statement is None:
                self.refused.append((operation, key))
                error = {"Code": "AccessDenied", "Message": "no statement allows it"}
                status = {"HTTPStatusCode": 403}
                raise ClientError({"Error": error, "ResponseMetadata": status}, operation)  # type: ignore[typeddict-item]
            self.used.add(statement["Sid"])
            return send(connection, operation, key, **parameters)

        patch.setattr(S3Connection, "send", checked)


@pytest.fixture
def policy(request: pytest.FixtureRequest, bucket: str) -> dict[str, Any]:
    found: dict[str, Any] = document("store-policy.json", BUCKET=bucket, PREFIX="some/prefix")
    return found


@pytest.fixture
def bucket(moto: S3Server, new_bucket: Callable[[S3Server], str]) -> str:
    return new_bucket(moto)


def farm(store: DirectoryStore, remote: S3Store, folder: Path) -> None:
    """What shards, and whoever pushes after them, do with a remote."""
    tiered = TieredStore(store, [Tier(remote, readable=True, writable=True)])
    entries = fill(store, folder / "scratch", 3)
    keys = [entry.key for entry in entries]
    assert tiered.stored_keys(keys).keys() == set(keys)
    tiered.publish(keys)
    fourth = TieredStore(DirectoryStore(folder / "fourth"), tiered.tiers)
    assert fourth.back_fill(keys) == {}
    assert tiered.tiers[0].counts.faults == 0, tiered.tiers[0].counts.last_fault
    push(fourth.local, remote, make_manifest(entries), TagRef("llama", "v1"), trust=ANYONE)
    # One that turned out damaged goes, for the next build to be published.
    remote.delete(f"entries/{keys[0][:2]}/{keys[0]}.json")
    tiered.publish(keys)
    assert tiered.tiers[0].counts.published == 4


def test_a_farm_needs_no_more_than_the_policy_allows_and_all_of_it(
    local: DirectoryStore,
    moto: S3Server,
    bucket: str,
    policy: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enforced = Enforced(policy, monkeypatch)
    farm(local, S3Store(S3Options.parse(moto.url(bucket))), tmp_path)
    assert enforced.refused == []
    assert enforced.used == {statement["Sid"] for statement in policy["Statement"]}


def test_another_prefix_is_out_of_reach(
    local: DirectoryStore,
    moto: S3Server,
    bucket: str,
    policy: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enforced = Enforced(policy, monkeypatch)
    remote = S3Store(S3Options.parse(moto.url(bucket, prefix="some/other")))
    tiered = TieredStore(local, [Tier(remote, readable=True, writable=True)])
    [entry] = fill(local, tmp_path / "scratch", 1)
    tiered.publish([entry.key])
    assert enforced.refused
    assert tiered.tiers[0].counts.faults == 1
    assert moto.keys(bucket) == set()
