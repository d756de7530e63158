"""Every command's JSON: one document on stdout, valid against the schema in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cli_samples
import jsonschema
import neffs
import pytest
from cli_samples import EAGLE3, INDUCTOR, SCHEMAS, Project

from neffbuild.cli.main import _COMMANDS


@pytest.fixture(scope="module")
def documents(compiled: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Command line → what it printed, each validated as it was read."""
    project = compiled
    remote = str(tmp_path_factory.mktemp("json") / "remote")
    spec = project.write("spec.yaml", toolchain=INDUCTOR, speculative_config=EAGLE3)
    neuron = project.write("neuron.yaml", toolchain={"name": "neuronx", "target": "trn2"})
    report = project.call("report", "config.yaml", "--json").out
    (project.root / "report.json").write_text(report, encoding="utf-8")
    (project.root / "graph.neff").write_bytes(neffs.make_neff())
    (project.root / "serve.log").write_text("Extracting 1 decode compile targets: [(8, 4096)]\n")
    lines = [
        ["plan", "config.yaml"],
        ["plan", spec],
        ["compile", "config.yaml"],
        ["report", "config.yaml"],
        ["report", spec],
        ["merge-report", "report.json"],
        ["verify", "config.yaml"],
        ["verify", spec],
        ["push", "config.yaml", "--to", remote, "--tag", "t"],
        ["push", "config.yaml", "--to", remote],
        ["pull", remote, "--tag", "default:t", "--cache", f"{remote}-cache"],
        ["verify", remote],
        ["import", remote, "--cache", f"{remote}-imported"],
        ["env", neuron],
        ["keygen", "--out", f"{remote}-key"],
        ["promote", remote, "--from", "default:t", "--to", "default:stable"],
        ["diff", remote, "--from", "default:t", "--to", "default:stable"],
        ["diff", "config.yaml", "--engine-log", "serve.log"],
        ["gc", remote],
        ["explain", "config.yaml", "decode_b1_ctx1024"],
        ["explain", "config.yaml", "decode_b1_ctx1024", "decode_b2_ctx1024"],
        ["explain", "config.yaml", "decode_b1_ctx1024", "config.yaml"],
        ["inspect", "graph.neff"],
        ["replay", "config.yaml", "--steps", "20"],
        ["doctor"],
        ["pull", remote, "--tag", "default:none"],
    ]
    return {" ".join(line): project.call(*line, "--json").document for line in lines}


def test_every_command_is_shown_and_every_schema_met(documents: dict[str, Any]) -> None:
    assert {line.split()[0] for line in documents} == _COMMANDS.keys()
    met = {document["schema"] for document in documents.values()}
    published = {json.loads(path.read_text())["$id"] for path in SCHEMAS.glob("*.json")}
    # A line of `compile --json-lines`, of which no command prints one alone.
    assert met == published - {"neffbuild.event/1"}


def test_the_documentation_names_every_schema() -> None:
    page = (cli_samples.REPOSITORY / "docs/json.md").read_text(encoding="utf-8")
    for path in SCHEMAS.glob("*.json"):
        assert f"schemas/{path.name}" in page
        assert json.loads(path.read_text())["$id"] in page


def test_schemas_say_no_to_what_is_missing(documents: dict[str, Any]) -> None:
    """A schema without `required` would accept anything."""
    for name, document in {one["schema"]: one for one in documents.values()}.items():
        validator = jsonschema.Draft202012Validator(cli_samples.schema(name))
        assert set(cli_samples.schema(name)["required"]) <= document.keys()
        for required in cli_samples.schema(name)["required"]:
            less = {key: value for key, value in document.items() if key != required}
            assert not validator.is_valid(less), f"{name} without {required}"


def test_schemas_know_every_field_that_is_printed(documents: dict[str, Any]) -> None:
    """Additions are allowed to a contract, not without writing them into it."""

    def check(value: Any, schema: dict[str, Any], where: str) -> None:
        known = schema.get("properties")
        if isinstance(value, dict) and known is not None:
            assert set(value) <= set(known), where
            for name, item in value.items():
                check(item, known[name], f"{where}.{name}")
        elif isinstance(value, list):
            for item in value:
                check(item, schema.get("items", {}), f"{where}[]")

    for line, document in documents.items():
        check(document, cli_samples.schema(document["schema"]), line)


def test_a_plan_says_everything_of_every_shape(documents: dict[str, Any]) -> None:
    plan = documents["plan spec.yaml"]
    assert plan["toolchain"]["name"] == "inductor"
    assert plan["counts"]["units"] == 18
    assert plan["counts"]["by_family"] == {
        "target-with-spec": 6,
        "target-without-spec": 6,
        "draft": 6,
    }
    widest = next(one for one in plan["units"] if one["bucket_name"] == "draft_b4_s6_ctx4096")
    assert widest == {
        "bucket_name": "draft_b4_s6_ctx4096",
        "family": "draft",
        "num_seqs": 4,
        "query_len": 6,
        "context_len": 4096,
        "num_batched_tokens": None,
        "kv_segment": None,
        "rank_scope": "all",
        "block_table_width": 128,
        "window_table_width": None,
        "status": "missing",
        "need": "required",
        "needs": None,
        "symbolic": False,
        "key": widest["key"],
        "reason": None,
    }


def test_shapes_that_cannot_occur_are_listed_and_not_counted(project: Project) -> None:
    draft = {**cli_samples.DRAFT, "max_position_embeddings": 1024}
    (project.root / "draft/config.json").write_text(json.dumps(draft), encoding="utf-8")
    config = project.write(toolchain=INDUCTOR, speculative_config=EAGLE3)
    plan = project.call("plan", config, "--json").document
    cannot = [one for one in plan["units"] if one["status"] == "cannot_occur"]
    assert len(cannot) == plan["counts"]["cannot_occur"] == 3
    assert plan["counts"]["units"] == 15
    for one in cannot:
        assert one["family"] == "draft"
        assert one["key"] is None
        assert "the draft's limit is 1024 positions" in one["reason"]
    assert "3 shapes cannot occur" in project.call("plan", config).out


def test_json_is_the_only_thing_on_stdout(project: Project) -> None:
    ran = project.run("compile", project.write(), "--json")
    assert ran.document["counts"]["built"] == 6
    # Progress is for people, and goes elsewhere.
    assert "[6/6] built" in ran.err
    assert "\x1b" not in ran.err


def test_log_lines_can_be_json(project: Project) -> None:
    project.write()
    assert project.run("compile", "config.yaml").status == 0
    blob = max((project.cache / "v1/blobs").rglob("*"), key=Path.is_file)
    blob.write_bytes(b"x")
    entry = next((project.cache / "v1/entries").rglob("*.json"))
    entry.write_bytes(b"{")
    ran = project.run("--log-format", "json", "plan", "config.yaml", "--json")
    assert ran.document["counts"]["missing"] >= 1
    for line in ran.err.splitlines():
        assert {"time", "level", "event"} <= json.loads(line).keys()
