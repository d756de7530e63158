"""The files of `scripts/ec2`, filled in."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import yaml
from render import render

FOLDER = Path(__file__).parents[2] / "scripts" / "ec2"
VALUES = {
    "ACCOUNT": "123456789012",
    "BUCKET": "artifacts",
    "CLUSTER": "neffbuild-farm",
    "CONFIG_MAP": "decode-config",
    "CPU_AMI": "ami-0123456789abcdef0",
    "HEAD_PROFILE": "neffbuild-head",
    "IMAGE": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/neffbuild@sha256:" + "0" * 64,
    "JOB_ROLE_ARN": "arn:aws:iam::123456789012:role/neffbuild-node",
    "KEY_PAIR": "farm",
    "KMS_KEY_ARN": "arn:aws:kms:eu-west-1:123456789012:key/12345678-90ab-cdef-1234-567890abcdef",
    "NEURON_AMI": "ami-0fedcba9876543210",
    "NODE_PROFILE": "neffbuild-node",
    "NODE_ROLE": "neffbuild-node",
    "PREFIX": "llama/decode",
    "REGION": "eu-west-1",
    "REMOTE": "s3://artifacts/llama/decode?region=eu-west-1",
    "SECURITY_GROUP": "sg-0123456789abcdef0",
    "SERVICE": "ec2.amazonaws.com",
    "SERVICE_ACCOUNT": "neffbuild",
    "SHARDS": "8",
    "SUBNET": "subnet-0123456789abcdef0",
}


def filled(name: str, **values: str) -> str:
    """The file with the names that it has given the values above, or these."""
    path = FOLDER / name
    names = string.Template(path.read_text(encoding="utf-8")).get_identifiers()
    return render(path, {name: {**VALUES, **values}[name] for name in names})


def document(name: str, **values: str) -> Any:
    """The same, parsed."""
    text = filled(name, **values)
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
