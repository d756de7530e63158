"""`neffbuild explain` and `neffbuild doctor`."""

from __future__ import annotations

import hashlib
import json

import cli_samples
import pytest
from cli_samples import EAGLE3, INDUCTOR, Project


def test_explain_shows_every_ingredient_and_what_is_left_out(project: Project) -> None:
    config = project.write(toolchain=INDUCTOR, port=8000, speculative_config=EAGLE3)
    unit = "decode_b2_s1_ctx1024"
    document = project.call("explain", config, unit, "--json").document
    canonical = json.dumps(
        document["recipe"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert hashlib.sha256(canonical.encode()).hexdigest() == document["key"]
    reasons = {one["option"]: one["reason"] for one in document["left_out"]}
    assert reasons["port"] == "where the server listens and how it talks to clients"
    assert reasons["max_num_seqs"] == "stated by the shape"
    assert "does not draft" in reasons["speculative_config.num_speculative_tokens"]

    shown = project.call("explain", config, unit).out
    assert f"key  {document['key']}" in shown
    assert "serve.block_size = 32" in shown
    assert 'toolchain.versions.torch = "2.13.0"' in shown
    assert "shape.num_seqs = 2" in shown
    assert "left out:\n" in shown
    assert "  port: where the server listens" in shown
    assert "serve.port" not in shown


def test_explain_compares_two_units_of_a_config(project: Project) -> None:
    config = project.write(toolchain=INDUCTOR)
    ran = project.call("explain", config, "decode_b1_ctx1024", "decode_b4_ctx4096", "--json")
    assert ran.document["differences"] == [
        {"path": "shape.num_seqs", "unit": 1, "other": 4},
        {"path": "shape.context_len", "unit": 1024, "other": 4096},
    ]
    assert ran.document["key"] != ran.document["other_key"]
    shown = project.call("explain", config, "decode_b1_ctx1024", "decode_b4_ctx4096").out
    assert "shape.num_seqs: 1 → 4" in shown


def test_explain_compares_the_unit_of_two_configs(project: Project) -> None:
    config = project.write(toolchain=INDUCTOR, port=1)
    other = project.write(
        "other.yaml", toolchain={**INDUCTOR, "target": "x86-64-v4"}, dtype="float32", extra=True
    )
    ran = project.call("explain", config, "decode_b1_ctx1024", other, "--json")
    differences = {one["path"]: (one["unit"], one["other"]) for one in ran.document["differences"]}
    assert differences.pop("toolchain.flags.vector_class") == ("avx2", "avx512")
    for flag in ("cpp.march", "cpp.simdlen"):
        assert differences.pop(f"toolchain.flags.{flag}")
    assert differences == {
        "serve.dtype": ("bfloat16", "float32"),
        "serve.extra": ("(absent)", True),
        "toolchain.target": ("x86-64-v3", "x86-64-v4"),
    }
    assert (
        'serve.dtype: "bfloat16" → "float32"'
        in project.call("explain", config, "decode_b1_ctx1024", other).out
    )
    same = project.write("same.yaml", toolchain=INDUCTOR, port=2)
    shown = project.call("explain", config, "decode_b1_ctx1024", same).out
    assert "the recipes are the same" in shown


def test_explain_of_a_vllm_line_takes_the_unit_first(project: Project) -> None:
    line = ["--", "vllm", "serve", "./model", "--max-model-len", "512", "--max-num-seqs", "2"]
    shown = project.call("explain", "decode_b2", *line)
    assert shown.status == 0
    assert "serve.max_model_len = 512" in shown.out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["decode_b1_ctx999"], "has no unit 'decode_b1_ctx999'", "nearest: decode_b1_"),
        (["decode_b1_ctx1024", "nope"], "has no unit 'nope'", "lists all 6"),
        ([], "CONFIG UNIT [OTHER]", "neffbuild plan"),
        (["a", "b", "c"], "CONFIG UNIT [OTHER]", "neffbuild plan"),
    ],
)
def test_explain_says_which_units_there_are(
    project: Project, words: list[str], message: str, hint: str
) -> None:
    ran = project.call("explain", project.write(), *words, "--json")
    assert ran.status == 2
    assert message in ran.error["message"]
    assert hint in ran.error["hint"]


def test_explain_of_a_shape_that_cannot_occur_says_why(project: Project) -> None:
    draft = {**cli_samples.DRAFT, "max_position_embeddings": 1024}
    (project.root / "draft/config.json").write_text(json.dumps(draft), encoding="utf-8")
    config = project.write(toolchain=INDUCTOR, speculative_config=EAGLE3)
    ran = project.call("explain", config, "draft_b1_s6_ctx4096", "--json")
    assert ran.status == 2
    assert "cannot_occur" in ran.error["message"]
    assert "the draft's limit is 1024 positions" in ran.error["message"]


def test_doctor_says_what_is_installed_and_what_can_run(project: Project) -> None:
    document = project.call("doctor", "--json").document
    toolchains = {one["name"]: one for one in document["toolchains"]}
    assert set(toolchains) >= {"inductor", "hostile"}
    subjects = {one["subject"] for one in toolchains["inductor"]["findings"]}
    assert {"torch", "g++", "x86-64-v3", "x86-64-v4"} <= subjects
    host = {one["subject"]: one for one in document["host"]}
    assert str(project.cache) in host["local cache"]["detail"]
    shown = project.call("doctor").out
    assert shown.startswith("neffbuild ")
    assert "\ntoolchain inductor: " in shown


def test_doctor_says_what_is_missing_and_what_to_do(project: Project) -> None:
    env = {"PATH": str(project.root), "NEFFBUILD_CACHE": "/proc/nowhere"}
    document = project.run("doctor", "--json", env=env).document
    [inductor] = [one for one in document["toolchains"] if one["name"] == "inductor"]
    assert not inductor["ok"]
    [compiler] = [one for one in inductor["findings"] if one["subject"] == "g++"]
    assert (compiler["ok"], compiler["needed"]) == (False, True)
    shown = project.run("doctor", env=env).out
    assert "toolchain inductor: not ready" in shown
    assert "NO g++: not installed\n     install g++" in shown


def test_doctor_survives_a_broken_toolchain(project: Project) -> None:
    info = project.root / "plugins/broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[neffbuild.toolchains]\nbroken = broken:Toolchain\n")
    (info.parent / "broken.py").write_text("import no_such_module\n")
    env = {"PYTHONPATH": str(info.parent)}
    document = project.run("doctor", "--json", env=env).document
    toolchains = {one["name"]: one for one in document["toolchains"]}
    assert not toolchains["broken"]["ok"]
    assert "no_such_module" in toolchains["broken"]["findings"][0]["detail"]
    assert "inductor" in toolchains
    # Whoever asks for it is told as well.
    ran = project.run("plan", project.write(toolchain={"name": "broken"}), "--json", env=env)
    assert ran.status == 2
    assert ran.error["kind"] == "missing_extra"
