"""Compile a config on AWS Batch: one array job, a shard for each child; then push the whole under a tag.

    python scripts/ec2/submit_batch.py --image IMAGE --job-role ARN --queue QUEUE \\
        --remote s3://BUCKET/PREFIX --shards 8 --tag NAME:TAG

Credentials and region are those of the usual AWS configuration. Prints the ids of the jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from render import Unfit, render

_DEFINITION = Path(__file__).with_name("batch-job-definition.json")
_SIZES = range(2, 10_001)
"""Of an array job, as AWS Batch allows them."""


def submit(client: Any, arguments: argparse.Namespace) -> dict[str, str]:
    """Register the job definition and submit the jobs; their ids by what they do."""
    values = {
        "IMAGE": arguments.image,
        "JOB_ROLE_ARN": arguments.job_role,
        "REMOTE": arguments.remote,
    }
    definition = client.register_job_definition(**json.loads(render(_DEFINITION, values)))
    job = {
        "jobQueue": arguments.queue,
        "jobDefinition": definition["jobDefinitionArn"],
        "parameters": {"config": arguments.config},
    }
    shards = client.submit_job(
        jobName="neffbuild-shards", arrayProperties={"size": arguments.shards}, **job
    )
    ids = {"compile": shards["jobId"]}
    if arguments.tag:
        command = ["neffbuild", "push", "Ref::config", "--remote", "Ref::remote"]
        pushed = client.submit_job(
            jobName="neffbuild-push",
            # Of a whole array: when every child has succeeded.
            dependsOn=[{"jobId": shards["jobId"]}],
            containerOverrides={"command": [*command, "--tag", arguments.tag]},
            **job,
        )
        ids["push"] = pushed["jobId"]
    return ids


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", required=True, help="with neffbuild and the config in it")
    parser.add_argument("--job-role", required=True, metavar="ARN", help="what jobs may do on AWS")
    parser.add_argument("--queue", required=True, help="job queue: its name or ARN")
    parser.add_argument("--remote", required=True, metavar="URL", help="s3://BUCKET/PREFIX")
    parser.add_argument("--config", default="/config/serve.yaml", help="path in the image")
    parser.add_argument("--shards", required=True, type=int, help="children of the array job")
    parser.add_argument("--tag", metavar="NAME:TAG", help="push what was compiled under this tag")
    arguments = parser.parse_args(words)
    if arguments.shards not in _SIZES:
        parser.error(f"--shards is {arguments.shards}; allowed: {_SIZES[0]} to {_SIZES[-1]}")
    return arguments


def main(words: list[str]) -> int:
    arguments = parsed(words)
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        ids = submit(boto3.client("batch"), arguments)
    except (Unfit, BotoCoreError, ClientError) as error:
        sys.stderr.write(f"submit_batch.py: error: {error}\n")
        return 2 if isinstance(error, Unfit) else 3
    for what, job in ids.items():
        sys.stdout.write(f"{what}: {job}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
