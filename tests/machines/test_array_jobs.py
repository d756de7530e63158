"""The AWS Batch and Kubernetes jobs: taken by their services' own models, and running the commands that
neffbuild has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.session
import pytest
import submit_batch
from botocore.stub import Stubber
from botocore.validate import ParamValidator
from cli_samples import UNITS, Project
from machine_samples import FOLDER, VALUES, document
from render import Unfit

KUBERNETES = "1.33"
"""The first release in which all that the job uses is stable."""


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    found: dict[str, Any] = document("batch-job-definition.json")
    return found


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    found: dict[str, Any] = document("indexed-job.yaml")
    return found


class TestOnBatch:
    def test_the_service_takes_the_definition(self, definition: dict[str, Any]) -> None:
        model = botocore.session.get_session().get_service_model("batch")
        shape = model.operation_model("RegisterJobDefinition").input_shape
        assert not ParamValidator().validate(definition, shape).has_errors()
        assert definition["type"] in model.shape_for("JobDefinitionType").enum
        resources = definition["containerProperties"]["resourceRequirements"]
        assert {one["type"] for one in resources} <= set(model.shape_for("ResourceType").enum)
        actions = {one["action"] for one in definition["retryStrategy"]["evaluateOnExit"]}
        assert actions == set(model.shape_for("RetryAction").enum)

    def test_reclaimed_machines_are_retried_and_failures_are_not(
        self, definition: dict[str, Any]
    ) -> None:
        retry = definition["retryStrategy"]
        assert 1 < retry["attempts"] <= 10
        assert len(retry["evaluateOnExit"]) <= 5

        def decided(**exit: str) -> str:
            for rule in retry["evaluateOnExit"]:
                conditions = {name: glob for name, glob in rule.items() if name != "action"}
                if all(_globs(glob, exit.get(name, "")) for name, glob in conditions.items()):
                    return str(rule["action"])
            return "RETRY"  # as the service does where nothing matches

        assert decided(onStatusReason="Host EC2 (instance i-0) terminated.") == "RETRY"
        assert decided(onReason="CannotPullContainerError: Error response") == "RETRY"
        assert decided(onExitCode="3") == "RETRY"  # the store was not reached
        assert decided(onExitCode="130") == "RETRY"  # interrupted
        for code in ("1", "2", "4", "70", "137", "30"):
            assert decided(onExitCode=code, onStatusReason="Essential container exited") == "EXIT"

    def test_a_child_compiles_its_shard(self, project: Project, definition: dict[str, Any]) -> None:
        remote = str(project.root / "remote")
        parameters = {**definition["parameters"], "config": project.write(), "remote": remote}
        command = [
            parameters[word.removeprefix("Ref::")] if word.startswith("Ref::") else word
            for word in definition["containerProperties"]["command"]
        ]
        assert command.pop(0) == "neffbuild"
        child = {"AWS_BATCH_JOB_ARRAY_INDEX": "0", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}
        ran = project.run(*command, env=child)
        assert ran.status == 0
        assert ran.out.startswith("shard 1/3: 2 of 6 units")

    def submitted(self, *words: str) -> list[tuple[str, dict[str, Any]]]:
        """The requests that the script makes, each held to the service's model by the client."""
        given = [
            "--image",
            VALUES["IMAGE"],
            "--job-role",
            VALUES["JOB_ROLE_ARN"],
            "--queue",
            "spot",
        ]
        arguments = submit_batch.parsed([*given, "--remote", VALUES["REMOTE"], *words])
        client = boto3.client(
            "batch", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        made: list[tuple[str, dict[str, Any]]] = []
        client.meta.events.register(
            "provide-client-params.batch",
            lambda params, model, **_: made.append((model.name, dict(params))),
        )
        arn = "arn:aws:batch:eu-west-1:123456789012:job-definition/neffbuild-shard:1"
        with Stubber(client) as stub:
            stub.add_response(
                "register_job_definition",
                {"jobDefinitionName": "d", "jobDefinitionArn": arn, "revision": 1},
            )
            for number in range(2):
                stub.add_response("submit_job", {"jobName": "j", "jobId": f"job-{number}"})
            ids = submit_batch.submit(client, arguments)
        assert list(ids.values()) == [f"job-{number}" for number in range(len(made) - 1)]
        return made

    def test_the_script_submits_an_array_and_a_push_after_it(
        self, definition: dict[str, Any]
    ) -> None:
        registered, array, push = self.submitted("--shards", "8", "--tag", "llama:v1")
        assert registered == ("RegisterJobDefinition", definition)
        assert array[1]["arrayProperties"] == {"size": 8}
        assert array[1]["jobDefinition"] == push[1]["jobDefinition"]
        assert push[1]["dependsOn"] == [{"jobId": "job-0"}]
        assert push[1]["containerOverrides"]["command"][-2:] == ["--tag", "llama:v1"]
        assert "arrayProperties" not in push[1]

    def test_without_a_tag_nothing_is_pushed(self) -> None:
        assert [name for name, _ in self.submitted("--shards", "2")] == [
            "RegisterJobDefinition",
            "SubmitJob",
        ]

    @pytest.mark.parametrize("shards", ["1", "0", "10001", "many"])
    def test_an_array_there_cannot_be_is_refused(
        self, shards: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            self.submitted("--shards", shards)
        assert ended.value.code == 2
        assert "--shards" in capsys.readouterr().err

    def test_values_that_break_the_definition_are_refused(self) -> None:
        with pytest.raises(Unfit, match="REMOTE"):
            self.submitted("--shards", "2", "--remote", 's3://a/b", "x": "')

    def test_the_script_runs_where_it_lies(self) -> None:
        done = subprocess.run(
            [sys.executable, str(FOLDER / "submit_batch.py"), "--help"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0
        assert "--shards" in done.stdout


class TestOnKubernetes:
    def test_the_api_takes_it(self, job: dict[str, Any]) -> None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        kubernetes_validate.validate(job, KUBERNETES, strict=True)

    def test_its_numbers_fit_together(self, job: dict[str, Any]) -> None:
        spec = job["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] == spec["maxFailedIndexes"] == 8
        pod = spec["template"]["spec"]
        # Both are asked for by `backoffLimitPerIndex` and the failure policy.
        assert pod["restartPolicy"] == "Never"
        assert "backoffLimit" not in spec
        [container] = pod["containers"]
        for rule in spec["podFailurePolicy"]["rules"]:
            if on := rule.get("onExitCodes"):
                assert on["containerName"] == container["name"]
                assert on["values"] == sorted(set(on["values"]))
                assert 0 not in on["values"]
                assert not {3, 130, 137} & set(on["values"])  # these may pass
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["requests"]["memory"] == "120Gi"

    def test_a_pod_compiles_its_shard(self, project: Project, job: dict[str, Any]) -> None:
        [container] = job["spec"]["template"]["spec"]["containers"]
        places = {
            "/config/serve.yaml": project.write(),
            "/cache": str(project.root / "pod-cache"),
            VALUES["REMOTE"]: str(project.root / "remote"),
        }
        words = [places.get(word, word) for word in [*container["command"], *container["args"]]]
        assert words.pop(0) == "neffbuild"
        environment = {one["name"]: one["value"] for one in container["env"]}
        environment |= {"HOME": str(project.root / "tmp"), "JOB_COMPLETION_INDEX": "5"}
        ran = project.run(*words, env=environment)
        assert ran.status == 0
        assert ran.out.startswith("shard 6/8: 1 of 6 units")
        assert len(UNITS) == 6
        # What would not fit a read-only file system.
        assert (project.root / "pod-cache" / "v1").is_dir()

    def test_its_files_are_where_the_config_looks_for_them(self, job: dict[str, Any]) -> None:
        volumes: Iterator[dict[str, Any]] = iter(job["spec"]["template"]["spec"]["volumes"])
        config = next(volume for volume in volumes if volume["name"] == "config")["configMap"]
        assert {item["key"]: item["path"] for item in config["items"]} == {
            "serve.yaml": "serve.yaml",
            "config.json": "model/config.json",
        }


def _globs(glob: str, text: str) -> bool:
    """As AWS Batch matches: `*` at the end only."""
    assert json.dumps(glob).count("*") <= 1
    return text.startswith(glob[:-1]) if glob.endswith("*") else text == glob
