"""Which place a bucket and prefix are, however they are reached."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

_PARTITIONS = {
    ".amazonaws.com": "aws",
    ".api.aws": "aws",
    ".amazonaws.com.cn": "aws-cn",
    ".amazonaws.eu": "aws-eusc",
}
_PORTS = {"http": 80, "https": 443}


def aws_partition(endpoint: str) -> str | None:
    """The part of AWS that an endpoint belongs to, or None where it is not AWS's. Names of buckets are
    unique in each: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
    host = urlsplit(endpoint).hostname or ""
    partition = next((p for domain, p in _PARTITIONS.items() if host.endswith(domain)), None)
    return "aws-us-gov" if partition == "aws" and ".us-gov-" in host else partition


def place(endpoint: str, bucket: str, prefix: str) -> str:
    """One text for one place: the partition where the endpoint is AWS's, because a bucket is the same
    in whichever region and by whichever of its endpoints it is asked for; else the endpoint's scheme,
    host and port, and its path where it has one."""
    parts = urlsplit(endpoint)
    where = aws_partition(endpoint)
    if where is None:
        port = parts.port or _PORTS[parts.scheme]
        where = f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"
    return f"s3 {where} {bucket}/{quote(prefix)}"
