"""What nodes may do on AWS: enough, and nothing beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from machine_samples import FOLDER, VALUES, document, filled
from moto.iam.policy_validation import IAMPolicyDocumentValidator, IAMTrustPolicyDocumentValidator

POLICIES = ("store-policy.json", "store-kms-policy.json", "ray-head-policy.json")
# EC2 knows no resources for these: they are allowed on everything or not at all.
UNLIMITED = {"ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeImages"}


def as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def statements(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document(name)["Statement"]
    return found


def test_every_policy_is_known_here() -> None:
    assert {path.name for path in FOLDER.glob("*-policy.json")} == {*POLICIES, "trust-policy.json"}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_well_formed(name: str) -> None:
    IAMPolicyDocumentValidator(filled(name)).validate()
    # As IAM counts them: without white space, in a role's inline policies.
    assert len(json.dumps(document(name), separators=(",", ":"))) < 10_240


@pytest.mark.parametrize("service", ["ec2.amazonaws.com", "ecs-tasks.amazonaws.com"])
def test_the_role_is_for_one_service(service: str) -> None:
    IAMTrustPolicyDocumentValidator(filled("trust-policy.json", SERVICE=service)).validate()
    [statement] = document("trust-policy.json", SERVICE=service)["Statement"]
    assert statement["Principal"] == {"Service": service}


@pytest.mark.parametrize("name", POLICIES)
def test_every_statement_is_limited(name: str) -> None:
    for statement in statements(name):
        assert statement["Effect"] == "Allow"
        actions = as_list(statement["Action"])
        assert not any("*" in action or "?" in action for action in actions)
        assert {"NotAction", "NotResource", "Principal"}.isdisjoint(statement)
        if set(actions) <= UNLIMITED:
            assert statement["Resource"] == "*"
            assert statement["Condition"]["StringEquals"]["aws:RequestedRegion"] == VALUES["REGION"]
            continue
        for resource in as_list(statement["Resource"]):
            # Only the last part of a name is open, never its service, account or bucket.
            head, _, tail = resource.rpartition("/")
            assert "*" not in head
            assert tail == "*" or "*" not in tail
            assert resource.count(":") >= 5


def test_the_store_policy_ends_at_the_prefix() -> None:
    for statement in statements("store-policy.json"):
        for resource in as_list(statement["Resource"]):
            if resource == "arn:aws:s3:::artifacts":
                assert statement["Action"] == "s3:ListBucket"
                assert statement["Condition"] == {"StringLike": {"s3:prefix": "llama/decode/v1/*"}}
            else:
                assert resource.startswith("arn:aws:s3:::artifacts/llama/decode/v1/")


def test_a_head_starts_and_ends_nodes_of_its_own_cluster_only() -> None:
    started = [s for s in statements("ray-head-policy.json") if s["Action"] == "ec2:RunInstances"]
    [nodes] = [s for s in started if s["Resource"].__class__ is str]
    assert nodes["Condition"]["StringEquals"]["aws:RequestTag/ray-cluster-name"] == "neffbuild-farm"
    [ended] = [
        s
        for s in statements("ray-head-policy.json")
        if "ec2:TerminateInstances" in as_list(s["Action"])
    ]
    tag = ended["Condition"]["StringEquals"]["aws:ResourceTag/ray-cluster-name"]
    assert tag == "neffbuild-farm"


def test_iam_takes_them_as_they_are() -> None:
    iam = botocore.session.get_session().get_service_model("iam")
    for name in POLICIES:
        request = {"RoleName": "node", "PolicyName": "neffbuild", "PolicyDocument": filled(name)}
        shape = iam.operation_model("PutRolePolicy").input_shape
        assert not ParamValidator().validate(request, shape).has_errors()


def rendered(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "render.py"), *words], capture_output=True, text=True
    )


def test_files_are_filled_in_from_the_command_line() -> None:
    words = [f"{name}={VALUES[name]}" for name in ("BUCKET", "PREFIX")]
    done = rendered(str(FOLDER / "store-policy.json"), *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document("store-policy.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["BUCKET=artifacts"], "needs PREFIX=…"),
        (["BUCKET=artifacts", "PREFIX=a", "REGION=x"], "has no REGION"),
        (["BUCKET=*", "PREFIX=a"], "BUCKET='*'"),
        (["BUCKET=art?facts", "PREFIX=a"], "BUCKET='art?facts'"),
        (["BUCKET=artifacts", "PREFIX="], "PREFIX=''"),
        (["BUCKET=artifacts", 'PREFIX=a","arn:aws:s3:::other'], "PREFIX="),
        (["BUCKET=artifacts", "PREFIX=a\n"], "PREFIX="),
        (["BUCKET"], "NAME=VALUE"),
    ],
)
def test_values_that_would_mean_something_else_are_refused(words: list[str], said: str) -> None:
    done = rendered(str(FOLDER / "store-policy.json"), *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = rendered(str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert "none.json" in done.stderr
    assert rendered().returncode == 2
