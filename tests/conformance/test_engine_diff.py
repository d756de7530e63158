"""`neffbuild diff CONFIG --engine-log FILE | --engine-cache DIR` as a user types it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
from cli_samples import EAGLE3, INDUCTOR, Project, Ran
from engine_samples import (
    NEFF,
    PAIRS,
    VLLM_WARM_UP,
    extracting,
    graph_inputs,
    prefilling,
    said,
    steps,
    vllm_config,
    warming,
    write_entry,
)
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.engine_options import same_version
from neffbuild.grid.expand import WarmUp, expand
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape

VLLM: dict[str, Any] = {
    **INDUCTOR,
    "engine": "vllm",
    "target": "x86-64-v3+avx512",
    "versions": INDUCTOR["versions"] | {"vllm": "0.32.0"},
}


@pytest.fixture
def config(project: Project) -> str:
    return project.write(toolchain=INDUCTOR)


def with_log(project: Project, config: str, *lines: str) -> Ran:
    (project.root / "serve.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return project.call("diff", config, "--engine-log", "serve.log", "--json")


def found(ran: Ran) -> dict[str, list[str]]:
    """Kind → names, of a comparison that found something."""
    assert ran.status == 1, ran
    assert ran.document["different"]
    kinds: dict[str, list[str]] = {}
    for one in ran.document["differences"]:
        kinds.setdefault(one["kind"], []).append(one["name"])
    assert {kind: len(names) for kind, names in kinds.items()} == {
        kind: ran.document["counts"][kind] for kind in kinds
    }
    return kinds


def test_an_engine_that_compiles_what_is_planned(project: Project, config: str) -> None:
    ran = with_log(project, config, extracting(PAIRS), *warming(PAIRS))
    assert ran.status == 0, ran
    assert ran.document["counts"]["matching"] == 6
    assert not ran.document["different"]
    text = project.call("diff", config, "--engine-log", "serve.log")
    assert text.status == 0
    assert text.out == (
        "config.yaml and the engine's log serve.log: 6 programs as planned, no difference\n"
    )


def test_a_target_more_and_one_less(project: Project, config: str) -> None:
    ran = with_log(project, config, extracting([*PAIRS[1:], (8, 1024), (8, 4096)]))
    assert found(ran) == {
        "missing": ["decode_b1_ctx1024"],
        "extra": ["decode_b8_ctx1024", "decode_b8_ctx4096"],
    }
    text = project.call("diff", config, "--engine-log", "serve.log").out
    assert "- decode_b1_ctx1024  planned, and not compiled by the engine" in text
    assert "+ decode_b8_ctx4096  compiled by the engine, and not planned" in text
    assert text.endswith("5 programs as planned, 1 missing, 2 extra\n")


def test_another_width(project: Project, config: str) -> None:
    """As with a max_model_len of the engine's that is not the config's."""
    pairs = [(rows, 8192 if context == 4096 else context) for rows, context in PAIRS]
    ran = with_log(project, config, extracting(pairs))
    assert found(ran) == {"other_width": [f"decode_b{rows}_ctx4096" for rows in (1, 2, 4)]}
    one = ran.document["differences"][0]
    assert one["detail"] == "planned with context_len 4096; the engine has context_len 8192"
    assert (one["plan"]["block_table_width"], one["engine"]["block_table_width"]) == (128, 256)


def test_an_engine_without_context_buckets(project: Project, config: str) -> None:
    """Its programs at max_model_len are others than ours, and those below are missing."""
    ran = with_log(project, config, extracting([(rows, 4096) for rows in (1, 2, 4)]))
    names = found(ran)
    assert names["missing"] == [f"decode_b{rows}_ctx1024" for rows in (1, 2, 4)]
    assert names["other_width"] == [f"decode_b{rows}_ctx4096" for rows in (1, 2, 4)]
    plain = project.write("plain.yaml", toolchain=INDUCTOR, additional_config=...)
    assert with_log(project, plain, extracting([(rows, 4096) for rows in (1, 2, 4)])).status == 0
    names = found(with_log(project, plain, extracting(PAIRS)))
    assert names["other_width"] == ["decode_b1", "decode_b2", "decode_b4"]
    assert names["extra"] == [f"decode_b{rows}_ctx1024" for rows in (1, 2, 4)]


class TestSpeculation:
    @pytest.fixture
    def config(self, project: Project) -> str:
        return project.write(toolchain=INDUCTOR, speculative_config=EAGLE3)

    def test_each_target_is_a_program_of_every_family(self, project: Project, config: str) -> None:
        ran = with_log(
            project,
            config,
            extracting(PAIRS),
            said("Capturing EAGLE3 decode graphs for batch size: 4"),
        )
        assert (ran.status, ran.document["counts"]["matching"]) == (0, 18)
        assert found(with_log(project, config, extracting(PAIRS[:-1])))["missing"] == [
            "draft_b4_s6_ctx4096",
            "decode_b4_s6_ctx4096",
            "decode_b4_s1_ctx4096",
        ]

    def test_another_number_of_drafts_is_another_width(self, project: Project, config: str) -> None:
        speculation = "SpeculativeConfig(method='eagle3', model='/srv/draft', num_spec_tokens=3)"
        ran = with_log(project, config, vllm_config(speculation=speculation), extracting(PAIRS))
        names = found(ran)
        assert names["setting"] == ["num_speculative_tokens"]
        assert len(names["other_width"]) == 12
        one = next(one for one in ran.document["differences"] if one["kind"] == "other_width")
        assert (one["plan"]["query_len"], one["engine"]["query_len"]) == (6, 4)
        assert ran.document["counts"]["matching"] == 6

    def test_an_engine_that_does_not_speculate(self, project: Project, config: str) -> None:
        names = found(with_log(project, config, vllm_config(), extracting(PAIRS)))
        assert (len(names["missing"]), len(names["extra"])) == (18, 6)


def test_an_engine_that_drafts_where_nothing_is_planned(project: Project, config: str) -> None:
    line = said("Capturing EAGLE3 decode graphs for batch size: 4")
    assert found(with_log(project, config, extracting(PAIRS), line)) == {
        "setting": ["speculative_config"]
    }


def test_ranks_that_disagree(project: Project, config: str) -> None:
    other = extracting(PAIRS[:-1], process="Worker_TP1 pid=4012")
    ran = with_log(project, config, extracting(PAIRS), other)
    assert found(ran) == {"missing": ["decode_b4_ctx4096"]}
    assert ran.document["counts"]["matching"] == 5
    assert ran.document["differences"][0]["detail"].endswith("by the engine in every process")
    assert "name different decode targets" in ran.document["notes"][0]


def test_a_log_of_several_starts(project: Project, config: str) -> None:
    """As of an engine that was restarted with the right options, and then again with wrong ones."""
    right, wrong = ([vllm_config(), extracting(one)] for one in (PAIRS, PAIRS[:-1]))
    ran = with_log(project, config, *wrong, *right)
    assert (ran.status, ran.document["engine"]["starts"]) == (0, 2)
    text = project.call("diff", config, "--engine-log", "serve.log").out
    assert "note: the log holds 2 starts of the engine: the last one is compared" in text
    assert found(with_log(project, config, *right, *wrong)) == {"missing": ["decode_b4_ctx4096"]}
    for unfinished in ([vllm_config()], [vllm_config(), *steps(PAIRS)[:6]]):
        ran = with_log(project, config, *right, *unfinished)
        assert ran.status == 2
        assert "it holds 2 starts, and only the last counts" in ran.error["message"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Parallel trace fork failed (rank=0): child exited 1", "parallel trace"),
        ("neuronx-cc compilation failed with 70. Check compiler logs.", "neuronx-cc"),
        ("Compilation failed - terminating process for cleanup: no space", "compile"),
        ("Cache key mismatch: expected 'a', found 'b'", "a"),
        (f"Shared compilation timeout after 600.1s in /c/{'b' * 32}", "b" * 32),
    ],
)
def test_what_failed_without_a_target_is_a_difference(
    project: Project, config: str, line: str, name: str
) -> None:
    ran = with_log(project, config, extracting(PAIRS), said(line, level="ERROR"))
    assert found(ran) == {"failed": [name]}
    text = project.call("diff", config, "--engine-log", "serve.log").out
    assert f"! {name}  the engine says: {line.partition('. ')[0].partition(' in ')[0]}" in text
    assert text.endswith("6 programs as planned, 1 failed\n")
    # It says enough where the log begins later, and the plan can then not be compared.
    assert found(with_log(project, config, said(line, level="ERROR"))) == {"failed": [name]}


def test_what_failed_is_a_difference(project: Project, config: str) -> None:
    error = (
        "RuntimeError: Model graph extraction failed for decode (batch=4, seq=4096). Error: ITEN406"
    )
    ran = with_log(project, config, extracting(PAIRS), error)
    assert found(ran) == {"failed": ["decode_b4_ctx4096"]}
    assert ran.document["differences"][0]["detail"] == "its extraction failed: ITEN406"


@pytest.mark.parametrize(
    ("lines", "status", "said_to_user"),
    [
        (steps(PAIRS)[:6], 2, "does not name all decode targets of the engine: 2 of 6 are in it"),
        ([extracting(PAIRS)[:-20]], 2, "of 6 are in it"),
        ([extracting([*PAIRS, (16, 4096)])[:-1]], 1, ""),
        ([*steps(PAIRS)[:6], *steps([(16, 4096), *PAIRS])[:3]], 1, ""),
    ],
    ids=["some steps", "a cut list", "only its bracket is cut", "some, one of them not planned"],
)
def test_part_of_a_list_is_never_called_equal(
    project: Project, config: str, lines: list[str], status: int, said_to_user: str
) -> None:
    ran = with_log(project, config, *lines)
    assert ran.status == status
    if status == 2:
        assert said_to_user in ran.error["message"]
        assert "until its warm-up ends" in ran.error["hint"]
    else:
        assert found(ran)["extra"] == ["decode_b16_ctx4096"]
        assert "missing" not in found(ran)


class TestPrefill:
    BUCKETS = ((512, 0), (2048, 0))

    def test_it_is_not_covered_by_a_plan_of_decode(self, project: Project, config: str) -> None:
        ran = with_log(project, config, prefilling(self.BUCKETS), extracting(PAIRS))
        assert ran.status == 0
        assert ran.document["not_covered"] == ["prefill_s512", "prefill_s2048"]
        text = project.call("diff", config, "--engine-log", "serve.log").out
        assert "of a phase that the plan leaves out: prefill_s512, prefill_s2048" in text

    def test_an_engine_that_only_prefills(self, project: Project, config: str) -> None:
        ran = with_log(project, config, prefilling(self.BUCKETS))
        assert len(found(ran)["missing"]) == 6
        assert "names no decode targets" in ran.document["notes"][0]

    NEURON = MappingProxyType({"name": "neuronx", "target": "trn2"})

    @pytest.mark.parametrize("speculation", [..., EAGLE3], ids=["alone", "EAGLE3"])
    def test_a_plan_of_both(self, project: Project, speculation: Any) -> None:
        config = project.write(toolchain=self.NEURON, speculative_config=speculation)
        lines = [prefilling([(2048, 2048)]), extracting(PAIRS)]
        assert with_log(project, config, *lines).status == 0
        assert with_log(project, config, *lines).document["not_covered"] == []
        families = 1 if speculation is ... else 2
        segment = found(with_log(project, config, prefilling([(2048, 512)]), lines[1]))
        assert len(segment["other_width"]) == families
        assert len(found(with_log(project, config, lines[1]))["missing"]) == families

    def test_a_plan_of_prefill(self, project: Project) -> None:
        config = project.write(toolchain={**self.NEURON, "phases": "prefill"})
        ran = with_log(project, config, prefilling([(2048, 2048)]), extracting(PAIRS))
        assert ran.status == 0
        assert ran.document["not_covered"] == [
            f"decode_b{rows}_ctx{context}" for rows, context in PAIRS
        ]


class TestReplicas:
    """vLLM calls an engine that shares no collective with others one of one, however many there are."""

    @pytest.mark.parametrize(
        ("planned", "expert_parallel", "engine", "status"),
        [(4, False, 1, 0), (4, True, 1, 1), (4, True, 4, 0), (4, False, 2, 1), (1, True, 4, 1)],
    )
    def test_their_number(
        self, project: Project, planned: int, expert_parallel: bool, engine: int, status: int
    ) -> None:
        config = project.write(
            toolchain=INDUCTOR, data_parallel_size=planned, enable_expert_parallel=expert_parallel
        )
        ran = with_log(project, config, vllm_config(data_parallel_size=engine), extracting(PAIRS))
        assert ran.status == status, ran
        if status:
            assert found(ran) == {"setting": ["data_parallel_size"]}

    @pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "side by side"])
    @pytest.mark.parametrize("drifting", [0, 1, None])
    def test_one_that_drifts_where_lines_name_no_process(
        self, project: Project, drifting: int | None, in_turn: bool
    ) -> None:
        config = project.write(toolchain=INDUCTOR, data_parallel_size=2)

        def unnamed(line: str, process: int) -> str:
            return json.dumps({"message": line.partition("] ")[2], "process": process})

        configs = [unnamed(vllm_config(), rank) for rank in range(2)]
        lists = [
            unnamed(extracting(PAIRS[1:] if rank == drifting else PAIRS), 10 + rank)
            for rank in range(2)
        ]
        order = [configs[0], lists[0], configs[1], lists[1]] if in_turn else [*configs, *lists]
        ran = with_log(project, config, *order)
        assert ran.document["notes"][0].startswith(
            "the log holds 2 starts and does not say of which replicas"
        )
        if drifting is None:
            assert ran.status == 0, ran
        else:
            assert found(ran) == {"missing": ["decode_b1_ctx1024"]}
        assert ran.document["engine"]["starts"] == 1


class TestWhatClientsSaid:
    @pytest.mark.parametrize(
        "prompt",
        [
            "why does neuronx-cc compilation failed with 70 appear?",
            "Initializing a V1 LLM engine (v0.1.0) with config: dtype=torch.float16",
            said("Extracting 1 decode compile targets: [(64, 8192)]"),
            said("Lock holder process died - cache invalidated", level="ERROR"),
        ],
    )
    @pytest.mark.parametrize("level", ["INFO", "ERROR"])
    def test_it_is_not_the_engines(
        self, project: Project, config: str, prompt: str, level: str
    ) -> None:
        request = f"Received request cmpl-1: prompt: {prompt!r}, params: SamplingParams(n=1)"
        line = said(request, process="APIServer pid=3", level=level)
        ran = with_log(project, config, vllm_config(), extracting(PAIRS), line)
        assert (ran.status, ran.document["notes"]) == (0, []), ran


PARTS = st.tuples(
    st.sampled_from(["", "v", "0!", "1!"]),
    st.lists(st.sampled_from(["0", "00", "1", "01", "32"]), min_size=1, max_size=4).map(".".join),
    st.sampled_from(["", "rc1", "-rc1", ".rc.1", "c1", "a", "alpha0", "_pre_1", "b2", "beta2"]),
    st.sampled_from(["", ".post1", "-1", "post", "-r1", ".rev1"]),
    st.sampled_from(["", ".dev0", "dev", "-dev7", "_dev_7"]),
)


@given(PARTS, PARTS)
def test_versions_are_equal_as_packages_are(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    left, right = "".join(one), "".join(other)
    assert same_version(left, right) == (Version(left) == Version(right))
    near = "".join((*one[:1], one[1] + ".0", *one[2:]))
    assert same_version(left, near)


@pytest.mark.parametrize(
    ("logged", "status"), [("0.24.0", 0), ("0.24.1+cpu", 0), ("0.21.0", 1), ("0.1.dev1+gabc", 0)]
)
def test_vllm_neuron_is_for_a_series_of_vllm(project: Project, logged: str, status: int) -> None:
    versions = {"vllm-neuron": "0.24.0.1.1.0"}
    toolchain = {"name": "neuronx", "target": "trn2", "phases": "decode", "versions": versions}
    config = project.write(toolchain=toolchain)
    ran = with_log(project, config, vllm_config(version=logged), extracting(PAIRS))
    assert ran.status == status, ran
    if status:
        assert found(ran) == {"setting": ["version"]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n" * 100,
        b"INFO: Application startup complete.\n",
        bytes(range(256)) * 1000,
        b"\xff" * (3 << 20),
        vllm_config().encode(),
    ],
    ids=["empty", "blank", "another log", "binary", "one long line", "a config alone"],
)
def test_a_log_that_says_nothing(project: Project, config: str, content: bytes) -> None:
    (project.root / "serve.log").write_bytes(content)
    ran = project.call("diff", config, "--engine-log", "serve.log", "--json")
    assert ran.status == 2
    assert ran.error["field"] == "--engine-log"
    assert "Extracting … decode compile targets" in ran.error["hint"]


def test_bytes_that_are_no_text_hide_nothing(project: Project, config: str) -> None:
    noise = bytes(range(256)) * 50
    (project.root / "serve.log").write_bytes(
        noise + b"\n" + extracting(PAIRS).encode() + b"\r\n" + noise
    )
    assert project.call("diff", config, "--engine-log", "serve.log").status == 0


def test_a_log_from_a_pipe(project: Project, config: str) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(extracting(PAIRS).encode())
    ran = project.run("diff", config, "--engine-log", "-", stdin=read)
    assert ran.status == 0, ran


WRONG = {
    "no file": (["--engine-log", "none.log"], "there is no file none.log"),
    "a folder": (["--engine-log", "."], "is a directory, not a log"),
    "both": (["--engine-log", "a", "--engine-cache", "b"], "exclude each other"),
    "a tag": (["--engine-log", "a", "--from", "x"], "--from is of two tags"),
    "a check": (["--engine-cache", "a", "--check"], "--check is of two tags"),
    "no cache": (["--engine-cache", "none"], "none is not there"),
    "an empty cache": (["--engine-cache", "home"], "nothing in the engine's cache"),
    "nothing": ([], "--from is missing"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(project: Project, config: str, words: list[str], message: str) -> None:
    ran = project.call("diff", config, *words, "--json")
    assert ran.status == 2
    assert message in ran.error["message"]


OTHER_PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {
    "another backend": ({"backend": "inductor"}, {"missing": ["step_any"]}),
    "eager": ({"enforce_eager": True}, {"missing": ["step_any"]}),
    "nothing compiled": ({"mode": "<CompilationMode.NONE: 0>"}, {"missing": ["step_any"]}),
    "its own mode": (
        {"mode": "<CompilationMode.VLLM_COMPILE: 3>", "ends": "[512, 2048]", "sizes": "[8]"},
        {
            "missing": ["step_any"],
            "extra": [f"compile range {one}" for one in ("(1, 512)", "(8, 8)", "(513, 2048)")],
        },
    ),
    "another length": ({"max_seq_len": 8192}, {"setting": ["max_model_len"]}),
    "another type": ({"dtype": "float32"}, {"setting": ["dtype"]}),
    "stages": ({"pipeline_parallel_size": 2}, {"setting": ["pipeline_parallel_size"]}),
    "replicas": ({"data_parallel_size": 4}, {"setting": ["data_parallel_size"]}),
    "another version": ({"version": "0.11.0"}, {"setting": ["version"]}),
}


class TestVllm:
    @pytest.fixture
    def config(self, project: Project) -> str:
        return project.write(toolchain=VLLM, additional_config=...)

    def test_one_program_for_every_step(self, project: Project, config: str) -> None:
        ran = with_log(project, config, vllm_config(captures="[1, 2, 4]"), *VLLM_WARM_UP)
        assert (ran.status, ran.document["counts"]["matching"]) == (0, 1)
        assert ran.document["notes"] == ["graphs are captured, not compiled, for 1, 2, 4 tokens"]

    def test_an_earlier_start_with_another_backend(self, project: Project, config: str) -> None:
        eager = vllm_config(enforce_eager=True, dtype="float32")
        ran = with_log(project, config, eager, *VLLM_WARM_UP, vllm_config(), *VLLM_WARM_UP)
        assert (ran.status, ran.document["engine"]["starts"]) == (0, 2)
        ran = with_log(project, config, vllm_config(), *VLLM_WARM_UP, eager, *VLLM_WARM_UP)
        assert found(ran) == {"setting": ["dtype"], "missing": ["step_any"]}

    @pytest.mark.parametrize(
        ("changes", "differences"), OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS
    )
    def test_what_is_another_program(
        self, project: Project, config: str, changes: Any, differences: Any
    ) -> None:
        ran = with_log(project, config, vllm_config(**changes), *VLLM_WARM_UP)
        assert found(ran) == differences

    @pytest.mark.parametrize(
        ("pin", "logged", "status"),
        [
            ("0.32.0", "0.32.0", 0),
            ("0.32.0+cpu", "0.32.0", 0),
            ("0.32.0", "0.32.0+cpu", 0),
            ("0.32.0+cpu", "0.32.0+cu129", 0),
            ("v0.32.0", "0.32.0", 0),
            ("0.32", "0.32.0", 0),
            ("0.32", "0.32.1", 1),
            ("0.32.0rc1", "0.32.0-rc1", 0),
            ("0.32.0rc1", "0.32.0-rc2", 1),
            ("0.32.0", "0.32.0.post1", 1),
            ("0.32.0", "0.32.1", 1),
            ("0.32.0", "0.32.0rc1", 1),
            ("0.32.0", "0.1.dev1+gabc1234", 1),
            ("0.1.dev1+gabc1234", "0.1.dev1+gabc1234", 0),
            ("0.1.dev1+gabc1234", "0.1.dev1+gabc1234.d20261130.cpu", 1),
            ("0.1.dev1+gabc1234.cpu", "0.1.dev1+gabc1234", 0),
            ("0.1.dev1+gabc1234", "0.1.dev1+gdef5678", 1),
            ("0.1.dev1", "0.1.dev1+gdef5678", 0),
            ("0.33.1rc2.dev123+g1234567", "0.33.1rc2.dev123+g1234567.precompiled", 0),
        ],
    )
    def test_versions_that_differ(
        self, project: Project, pin: str, logged: str, status: int
    ) -> None:
        toolchain = VLLM | {"versions": VLLM["versions"] | {"vllm": pin}}
        config = project.write("v.yaml", toolchain=toolchain, additional_config=...)
        ran = with_log(project, config, vllm_config(version=logged), *VLLM_WARM_UP)
        assert ran.status == status, ran
        if status:
            assert found(ran) == {"setting": ["version"]}
            text = project.call("diff", config, "--engine-log", "serve.log").out
            assert f"~ version  planned for vLLM {pin}; the engine is vLLM {logged}" in text

    def test_a_version_that_is_not_known_is_said(self, project: Project, config: str) -> None:
        ran = with_log(project, config, vllm_config(version="dev"), *VLLM_WARM_UP)
        assert ran.status == 0
        [note] = ran.document["notes"]
        assert "does not know its version, which may be another than 0.32.0" in note
        pins = {tool: pin for tool, pin in VLLM["versions"].items() if tool != "vllm"}
        unpinned = project.write(
            "u.yaml", toolchain=VLLM | {"versions": pins}, additional_config=...
        )
        with patch("neffbuild.toolchain.inductor.identity.installed_vllm", return_value=None):
            ran = with_log(project, unpinned, vllm_config(), *VLLM_WARM_UP)
        assert ran.status == 0
        [note] = ran.document["notes"]
        assert "pin toolchain.versions.vllm" in note
        with patch("neffbuild.toolchain.inductor.identity.installed_vllm", return_value="0.31.0"):
            ran = with_log(project, unpinned, vllm_config(), *VLLM_WARM_UP)
        assert found(ran) == {"setting": ["version"]}

    def test_what_broke_down(self, project: Project, config: str) -> None:
        line = "neuronx-cc compilation failed with 70. Check compiler logs."
        assert found(with_log(project, config, vllm_config(), line)) == {"failed": ["neuronx-cc"]}

    def test_ranges_that_are_compiled_are_another(self, project: Project, config: str) -> None:
        line = said("Compiling a graph for compile range (1, 2048) takes 3.2 s")
        assert found(with_log(project, config, line)) == {
            "missing": ["step_any"],
            "extra": ["compile range (1, 2048)"],
        }

    def test_a_config_that_is_cut_off(self, project: Project, config: str) -> None:
        line = vllm_config()
        ran = with_log(project, config, line[: line.index("'backend': 'neff")])
        assert ran.status == 2
        assert "cut off" in ran.error["message"]

    def test_an_engine_with_buckets(self, project: Project, config: str) -> None:
        names = found(with_log(project, config, extracting(PAIRS)))
        assert names["missing"] == ["step_any"]
        assert len(names["extra"]) == 6


ALL, BUT_ONE = slice(None), slice(1, None)


class TestCache:
    """A cache of the engine's own, as it is after a start."""

    @pytest.fixture
    def bucketer(self, project: Project, config: str) -> Bucketer:
        loaded = load_config(project.root / config)
        return Bucketer.from_config(loaded, query_len_support=QueryLenSupport.VARLEN)

    @pytest.fixture
    def shapes(self, bucketer: Bucketer) -> list[Shape]:
        return [gridded.shape for gridded in expand(bucketer, WarmUp.FULL_PRODUCT).shapes]

    def fill(
        self, project: Project, bucketer: Bucketer, shapes: list[Shape], **options: Any
    ) -> Path:
        root = project.root / "compile_cache"
        for number, shape in enumerate(shapes):
            write_entry(root, number, graph_inputs(bucketer, shape), **options)
        return root

    def compared(self, project: Project, config: str) -> Ran:
        return project.call("diff", config, "--engine-cache", "compile_cache", "--json")

    @pytest.mark.parametrize(
        "options", [{}, {"below": "rank0", "finished": False}, {"below": "0_8.rank12"}]
    )
    def test_it_holds_what_is_planned(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape], options: Any
    ) -> None:
        root = self.fill(project, bucketer, shapes, **options)
        (root / "nki").mkdir()
        (root / ".abc.compilation_metadata.lock").touch()
        ran = self.compared(project, config)
        assert ran.status == 0, ran
        assert ran.document["counts"]["matching"] == 6
        unfinished = "6 of them are not finished: the engine compiles them at its start"
        assert (unfinished in ran.document["notes"]) == (options.get("finished") is False)

    def test_what_differs(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        prefill = PrefillShape(Family.PREFILL, 2048)
        wider = DecodeShape(Family.TARGET, 4, 1, 8192)
        engine = [*shapes[1:-1], wider, DecodeShape(Family.TARGET, 8, 1, 1024), prefill]
        self.fill(project, bucketer, engine)
        ran = self.compared(project, config)
        names = found(ran)
        assert names["missing"][0] == "decode_b1_ctx1024"
        assert "decode_b8_ctx1024" in names["extra"]
        assert names["other_width"] == ["decode_b4_ctx4096"]

    def test_an_entry_under_anothers_name(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes)
        write_entry(root, 99, graph_inputs(bucketer, shapes[0]), stated="f" * 32)
        ran = self.compared(project, config)
        assert found(ran) == {"failed": [f"{99:032x}"]}
        assert f"states the cache_key '{'f' * 32}'" in ran.document["differences"][0]["detail"]

    def test_what_is_finished_by_its_own_word_alone(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        """Judged as an import judges: names of files are not enough."""
        root = self.fill(project, bucketer, shapes)
        short, empty, none = (root / f"{number:032x}" for number in range(3))
        with (short / f"graph_{short.name}.neff").open("rb+") as file:
            file.truncate(len(NEFF) - 1)
        (empty / "graph.hlo").write_bytes(b"")
        (none / ".compilation_complete").unlink()
        ran = self.compared(project, config)
        assert found(ran) == {"failed": [short.name, empty.name]}
        details = [one["detail"] for one in ran.document["differences"]]
        assert all("says that it is finished, and is not: " in one for one in details)
        assert f"states neff_size {len(NEFF)}" in details[0]
        assert "graph.hlo is empty" in details[1]
        assert ran.document["counts"]["matching"] == 6
        assert "1 of them are not finished" in ran.document["notes"][1]

    def test_an_entry_of_a_rank_is_one(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes[1:])
        write_entry(root / "dp0.rank1", 99, graph_inputs(bucketer, shapes[0]))
        ran = self.compared(project, config)
        assert (ran.status, ran.document["counts"]["matching"]) == (0, 6)

    def fill_ranks(
        self, project: Project, bucketer: Bucketer, held: dict[str, list[Shape]]
    ) -> None:
        for folder, shapes in held.items():
            root = project.root / "compile_cache" / folder
            root.mkdir(parents=True, exist_ok=True)
            for shape in shapes:
                key = crc32(repr(shape).encode())
                write_entry(root, key, graph_inputs(bucketer, shape))

    def test_what_one_rank_lacks_is_missing_in_it(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        self.fill_ranks(project, bucketer, {"rank0": shapes, "rank1": shapes[1:]})
        ran = self.compared(project, config)
        assert found(ran) == {"missing": ["decode_b1_ctx1024"]}
        assert ran.document["counts"]["matching"] == 5
        text = project.call("diff", config, "--engine-cache", "compile_cache").out
        assert (
            "- decode_b1_ctx1024  planned, and not compiled by the engine in every process: "
            "not in rank1\n"
        ) in text
        assert text.endswith("compile_cache: 5 programs as planned, 1 missing\n")

    @pytest.mark.parametrize(
        ("holds", "named"),
        [
            ({"rank0": ALL, "rank1": ALL}, None),
            # What is at the root is every rank's.
            ({"": slice(1), "rank0": BUT_ONE, "rank1": BUT_ONE}, None),
            ({"": ALL, "rank0": slice(0)}, None),
            ({"rank0": ALL, "rank1": slice(0)}, "rank1"),
            (
                {"dp0.rank0": ALL, "dp0.rank1": BUT_ONE, "dp1.rank0": BUT_ONE},
                "dp0.rank1, dp1.rank0",
            ),
            (
                {"rank0": ALL} | {f"rank{rank}": BUT_ONE for rank in range(1, 33)},
                "rank1, rank2, rank3, rank4 and 28 more",
            ),
        ],
        ids=["none", "root and ranks", "an empty folder", "an empty rank", "two servers", "many"],
    )
    def test_which_ranks_lack_it(
        self,
        project: Project,
        config: str,
        bucketer: Bucketer,
        shapes: list[Shape],
        holds: dict[str, slice],
        named: str | None,
    ) -> None:
        held = {folder: shapes[which] for folder, which in holds.items()}
        self.fill_ranks(project, bucketer, held)
        ran = self.compared(project, config)
        if named is None:
            assert (ran.status, ran.document["counts"]["matching"]) == (0, 6), ran
        else:
            assert set(found(ran)) == {"missing"}
            details = [one["detail"] for one in ran.document["differences"]]
            assert all(detail.endswith(f": not in {named}") for detail in details), details

    def test_servers_of_prefill_and_of_decode_that_share_a_cache(self, project: Project) -> None:
        toolchain = {"name": "neuronx", "target": "trn2"}
        config = project.write("both.yaml", toolchain=toolchain)
        plan = project.call("plan", config, "--json").document
        bucketer = Bucketer.from_config(
            load_config(project.root / config),
            query_len_support=QueryLenSupport.VARLEN,
        )
        decode = [
            gridded.shape
            for gridded in expand(bucketer, WarmUp.FULL_PRODUCT).shapes
            if isinstance(gridded.shape, DecodeShape)
        ]
        prefill: list[Shape] = [
            PrefillShape(Family.PREFILL, one["num_batched_tokens"], one["kv_segment"])
            for one in plan["units"]
            if one["family"] == "prefill"
        ]
        held = {f"p.rank{rank}": prefill for rank in (0, 1)}
        held |= {f"d.rank{rank}": decode for rank in (0, 1)}
        self.fill_ranks(project, bucketer, held)
        ran = self.compared(project, config)
        assert (ran.status, ran.document["counts"]["matching"]) == (0, 7), ran
        self.fill_ranks(project, bucketer, {"d.rank2": decode[1:]})
        assert found(self.compared(project, config)) == {"missing": ["decode_b1_ctx1024"]}

    def test_another_width_in_one_rank(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        wider = DecodeShape(Family.TARGET, 4, 1, 8192)
        self.fill_ranks(project, bucketer, {"rank0": shapes, "rank1": [*shapes[:-1], wider]})
        ran = self.compared(project, config)
        assert found(ran) == {"other_width": ["decode_b4_ctx4096"]}
        assert ran.document["differences"][0]["detail"].endswith(
            "the engine has context_len 8192: not in rank1"
        )

    def test_of_a_rank_that_cannot_be_read_nothing_is_known(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        self.fill_ranks(project, bucketer, {"rank0": shapes})
        for shape in range(6):
            (project.root / "compile_cache" / "rank1" / f"{shape:032x}").mkdir(parents=True)
        ran = self.compared(project, config)
        assert ran.status == 1
        assert not ran.document["different"]
        assert ran.document["counts"]["unread"] == 6

    def test_captures_inside_an_entry_are_of_one_program_for_all(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        """A compile removes all but the first of them: they say nothing of the other ranks."""
        root = self.fill(project, bucketer, shapes, below="rank0", finished=False)
        for entry in sorted(root.iterdir())[:3]:
            (entry / "rank1").mkdir()
            (entry / "rank1" / "graph.hlo").write_bytes(b"hlo")
        assert self.compared(project, config).status == 0

    def test_a_lock_without_an_entry_is_none(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes)
        (root / f".{'d' * 32}.compilation_metadata.lock").touch()
        ran = self.compared(project, config)
        assert (ran.status, ran.document["counts"]["unread"]) == (0, 0)

    def test_an_entry_that_is_being_compiled_may_not_say_yet_what_it_is(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes)
        with (root / f".{'d' * 32}.compilation_metadata.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ran = self.compared(project, config)
        assert ran.status == 1
        [unread] = ran.document["unread"]
        assert unread["name"] == "d" * 32
        assert "it is not finished: " in unread["reason"]

    def test_what_cannot_be_told_is_said_and_is_not_called_equal(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes)
        (root / ("a" * 32)).mkdir()
        # One that would be read if links were followed.
        elsewhere = write_entry(project.root / "elsewhere", 98, graph_inputs(bucketer, shapes[0]))
        (root / ("b" * 32)).symlink_to(elsewhere)
        (root / ("c" * 32)).write_bytes(b"")
        inside = write_entry(root, 97, graph_inputs(bucketer, shapes[0]))
        (inside / "rank0").symlink_to(elsewhere)
        bad = write_entry(root, 99, graph_inputs(bucketer, shapes[0]))
        (bad / "fxgraph.txt").unlink()
        os.mkfifo(bad / "fxgraph.txt")
        (bad / ".artifact_metadata_v0.json").write_bytes(b"[" * 100_000)
        ran = self.compared(project, config)
        assert ran.status == 1, ran
        assert not ran.document["different"]
        assert ran.document["counts"]["unread"] == 5
        names = [bad.name, inside.name, "a" * 32, "b" * 32, "c" * 32]
        reasons = {one["name"]: one["reason"] for one in ran.document["unread"]}
        assert sorted(reasons) == sorted(names)
        assert "is a link" in reasons["b" * 32]
        text = project.call("diff", config, "--engine-cache", "compile_cache")
        assert text.status == 1
        assert all(f"? {name}  it " in text.out for name in names)
        assert text.out.endswith("compile_cache: 6 programs as planned, 5 unread\n")

    def test_of_much_that_is_unread_some_is_named(
        self, project: Project, config: str, bucketer: Bucketer, shapes: list[Shape]
    ) -> None:
        root = self.fill(project, bucketer, shapes[1:])
        for number in range(100, 120):
            (root / f"{number:032x}").mkdir()
        text = project.call("diff", config, "--engine-cache", "compile_cache").out
        assert text.count("\n? ") == 8
        assert "… and 12 more that are unread" in text
        assert text.endswith("5 programs as planned, 1 missing, 20 unread\n")
