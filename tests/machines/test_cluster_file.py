"""The Ray cluster file, by Ray's own schema and by EC2's model of what it asks for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
from botocore.validate import ParamValidator
from machine_samples import VALUES, document


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    found: dict[str, Any] = document("ray-cluster.yaml")
    return found


@pytest.fixture(scope="module")
def nodes(cluster: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = cluster["available_node_types"]
    return found


def test_ray_takes_it(cluster: dict[str, Any]) -> None:
    found = find_spec("ray")
    if found is None or found.origin is None:
        pytest.skip("ray is not installed")
    # Not imported: that takes seconds, and the schema is a file.
    schema = Path(found.origin).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(cluster, json.loads(schema.read_text(encoding="utf-8")))


def test_its_numbers_fit_together(cluster: dict[str, Any], nodes: dict[str, Any]) -> None:
    assert cluster["head_node_type"] in nodes
    workers = {name: node for name, node in nodes.items() if name != cluster["head_node_type"]}
    assert cluster["max_workers"] == sum(node["max_workers"] for node in workers.values())
    assert all(node["min_workers"] == 0 for node in workers.values())


def test_ec2_takes_what_its_nodes_ask_for(nodes: dict[str, Any]) -> None:
    model = botocore.session.get_session().get_service_model("ec2")
    known = set(model.shape_for("InstanceType").enum)
    for name, node in nodes.items():
        request = dict(node["node_config"])
        assert request["InstanceType"] in known
        # As Ray turns it into a request.
        [request["SubnetId"]] = request.pop("SubnetIds")
        request |= {"MinCount": 1, "MaxCount": 1}
        report = ParamValidator().validate(
            request, model.operation_model("RunInstances").input_shape
        )
        assert not report.has_errors(), f"{name}: {report.generate_report()}"


def test_units_that_need_a_device_find_one_and_the_rest_runs_on_spot(
    cluster: dict[str, Any], nodes: dict[str, Any]
) -> None:
    from neffbuild.farm.ray_rules import DEVICE

    assert nodes["trn"]["resources"][DEVICE] >= 1
    assert nodes["trn"]["node_config"]["InstanceType"].startswith("trn")
    assert nodes["cpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert DEVICE not in nodes["cpu"]["resources"]
    assert nodes[cluster["head_node_type"]]["resources"] == {"CPU": 0}


def test_the_head_may_start_these_nodes_and_no_others(
    cluster: dict[str, Any], nodes: dict[str, Any]
) -> None:
    policy = {one["Sid"]: one for one in document("ray-head-policy.json")["Statement"]}
    workers = [
        node["node_config"] for name, node in nodes.items() if name != cluster["head_node_type"]
    ]
    equal = policy["StartNodesOfThisCluster"]["Condition"]["StringEquals"]
    assert set(equal["ec2:InstanceType"]) == {node["InstanceType"] for node in workers}
    parts = policy["FromTheseParts"]["Resource"]
    for node in workers:
        assert node["IamInstanceProfile"] == {"Name": VALUES["NODE_PROFILE"]}
        named = [
            f":image/{node['ImageId']}",
            f":key-pair/{node['KeyName']}",
            f":subnet/{node['SubnetIds'][0]}",
            f":security-group/{node['SecurityGroupIds'][0]}",
        ]
        assert all(any(part.endswith(name) for part in parts) for name in named)


def test_nodes_are_closed_where_they_can_be(nodes: dict[str, Any]) -> None:
    for node in nodes.values():
        request = node["node_config"]
        # Session tokens only, and not from within a container.
        assert request["MetadataOptions"] == {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        }
        assert all(disk["Ebs"]["Encrypted"] for disk in request["BlockDeviceMappings"])


def test_ray_of_the_head_is_ray_of_the_nodes(cluster: dict[str, Any]) -> None:
    """One environment for all, and the head's address as Ray hands it over."""
    assert len(cluster["setup_commands"]) == 3
    assert "worker_setup_commands" not in cluster
    assert cluster["worker_start_ray_commands"][-1].endswith("--address=$RAY_HEAD_IP:6379")
    assert (
        "--autoscaling-config=~/ray_bootstrap_config.yaml" in cluster["head_start_ray_commands"][-1]
    )
