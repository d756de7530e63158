"""What inductor contributes to recipes, and what it refuses before anything is compiled."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from toolchain_samples import decode, speculative_build, tiny_build

from neffbuild.config.errors import ConfigError, ToolchainRefusal
from neffbuild.config.model import ModelConfig
from neffbuild.config.serve import SpeculativeConfig
from neffbuild.grid.shapes import DECODE_FAMILIES, Family, PrefillShape
from neffbuild.toolchain.inductor import InductorToolchain, cpu_level, findings, identity
from neffbuild.toolchain.inductor.cpu_level import LEVELS
from neffbuild.toolchain.inductor.identity import inductor_identity

TOOLCHAIN = InductorToolchain()


@pytest.fixture
def host(monkeypatch):
    """Make this host one with other CPU features."""

    def change(features):
        for module in (cpu_level, findings):
            monkeypatch.setattr(module, "host_features", lambda: frozenset(features))

    return change


@pytest.fixture
def installed(monkeypatch):
    def change(**versions):
        found = {name.replace("gxx", "g++"): version for name, version in versions.items()}
        monkeypatch.setattr(identity, "installed_versions", lambda: found)

    return change


def test_what_is_installed_is_named_exactly():
    found = inductor_identity(tiny_build())
    assert found.versions["torch"].startswith("2.")
    assert found.versions["g++"].count(".") == 2
    assert found.unresolved == ()
    assert found.symbolic_kv_blocks
    assert (found.name, found.target) == ("inductor", "x86-64-v3")


def test_what_is_neither_installed_nor_pinned_is_unresolved(installed):
    installed(torch="2.13.0")
    found = inductor_identity(tiny_build())
    assert "g++" not in found.versions
    assert [line.partition(":")[2].strip() for line in found.unresolved] == [
        "pin it with toolchain.versions.g++"
    ]
    assert "pin it with toolchain.versions.g++" in TOOLCHAIN.host_refusal(tiny_build())


def test_a_pin_stands_for_what_is_not_installed(installed):
    installed(torch="2.13.0")
    found = inductor_identity(tiny_build(versions={"g++": "12.2.0"}))
    assert found.versions == {"torch": "2.13.0", "g++": "12.2.0"}
    assert found.unresolved == ()


def test_a_pin_other_than_what_is_installed_plans_but_does_not_compile(installed):
    installed(torch="2.13.0", gxx="12.2.0")
    config = tiny_build(versions={"torch": "2.14.0"})
    assert inductor_identity(config).versions["torch"] == "2.14.0"
    assert TOOLCHAIN.refusal(config) is None
    assert "torch 2.14.0 is planned, 2.13.0 is installed" in TOOLCHAIN.host_refusal(config)
    assert TOOLCHAIN.host_refusal(tiny_build(versions={"torch": "2.13.0"})) is None


CHANGES = {
    "torch": {"versions": {"torch": "2.99.0"}},
    "compiler": {"versions": {"g++": "99.1.0"}},
    "target": {"target": "x86-64-v4"},
    "flag": {"flags": ("cpp.enable_floating_point_contract_flag=fast",)},
}


def test_every_change_of_the_toolchain_changes_what_enters_the_key():
    documents = [inductor_identity(tiny_build(**change)).document() for change in CHANGES.values()]
    documents.append(inductor_identity(tiny_build()).document())
    assert len({str(document) for document in documents}) == len(documents)


def test_one_flag_has_one_spelling_in_the_key():
    spellings = [
        "cpp.enable_unsafe_math_opt_flag=true",
        "--cpp.enable_unsafe_math_opt_flag=true",
        "cpp.enable_unsafe_math_opt_flag=True",
    ]
    assert len({inductor_identity(tiny_build(flags=(flag,))).flags for flag in spellings}) == 1


BAD_TOOLCHAINS = {
    "toolchain.target": ({"target": "x86-64-v9"}, "x86-64-v3, x86-64-v4, native"),
    "toolchain.route": ({"route": "jit"}, "allowed: aot"),
    "toolchain.engine": ({"engine": "vlm"}, "allowed: reference"),
    "toolchain.versions.gcc": ({"versions": {"gcc": "12"}}, "torch, g++"),
    "toolchain.flags": ({"flags": ("-O3",)}, "allowed names: cpp."),
    "toolchain.flags=": ({"flags": ("cpp.enable_unsafe_math_opt_flag",)}, "allowed values"),
    "toolchain.flags twice": (
        {"flags": ("cpp.enable_unsafe_math_opt_flag=true",) * 2},
        "given twice",
    ),
}


@pytest.mark.parametrize(("field", "case"), BAD_TOOLCHAINS.items(), ids=BAD_TOOLCHAINS)
def test_a_bad_toolchain_section_is_refused_by_name(field, case):
    options, allowed = case
    with pytest.raises(ConfigError) as refused:
        inductor_identity(tiny_build(**options))
    assert refused.value.field == field.rstrip("=").removesuffix(" twice")
    assert allowed in refused.value.message


def test_native_is_a_target_of_its_own_for_every_cpu(host):
    v4 = LEVELS["x86-64-v4"].features
    documents = {}
    for name, features in {
        "plain": v4,
        "virtualised": v4 | {"hypervisor", "constant_tsc"},
        "vnni": v4 | {"avx512_vnni"},
        "older": LEVELS["x86-64-v3"].features,
    }.items():
        host(features)
        documents[name] = inductor_identity(tiny_build(target="native")).document()
    assert documents["plain"] == documents["virtualised"]
    assert len({documents[name]["target"] for name in ("plain", "vnni", "older")}) == 3
    assert "vector_class=avx2" in documents["older"]["flags"]
    assert "vector_class=avx512" in documents["vnni"]["flags"]


def test_native_below_the_lowest_level_is_refused(host):
    host(LEVELS["x86-64-v3"].features - {"avx2"})
    with pytest.raises(ToolchainRefusal, match="lacks avx2"):
        inductor_identity(tiny_build(target="native"))


@pytest.mark.parametrize("engine", identity.ENGINES)
def test_a_changed_source_changes_the_digest(tmp_path, monkeypatch, engine):
    package = tmp_path / "neffbuild"
    sources = (*identity._SOURCES, *identity._ENGINE_SOURCES[engine])
    for name in sources:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(identity._PACKAGE / name, package / name)
    monkeypatch.setattr(identity, "_PACKAGE", package)
    digest = identity._source_digest.__wrapped__
    before = digest(engine)
    assert before == inductor_identity(tiny_build(engine=engine)).source_digest
    for name in sources:
        content = (package / name).read_bytes()
        (package / name).write_bytes(content + b"\n# changed\n")
        assert digest(engine) != before, name
        (package / name).write_bytes(content)


REFUSED = {
    "tensor_parallel_size is 8": {"serve": {"tensor_parallel_size": 8}},
    "pipeline_parallel_size is 2": {"serve": {"pipeline_parallel_size": 2}},
    "decode_context_parallel_size is 2": {"serve": {"decode_context_parallel_size": 2}},
    "quantization is 'fp8'": {"serve": {"quantization": "fp8"}},
    "kv_cache_dtype is 'fp8'": {"serve": {"kv_cache_dtype": "fp8"}},
    "dtype is 'float16'": {"serve": {"dtype": "float16"}},
    "no reference model for architecture": {"architecture": {"architectures": ["T5Model"]}},
}


@pytest.mark.parametrize(("reason", "change"), REFUSED.items(), ids=REFUSED)
def test_a_config_that_cannot_be_built_is_refused_with_its_reason(reason, change):
    config = tiny_build(**change)
    assert reason in TOOLCHAIN.refusal(config)
    with pytest.raises(ToolchainRefusal, match=reason):
        TOOLCHAIN.capture(type("U", (), {"config": config, "shape": decode(1)}))


def test_decode_programs_of_every_family_are_built():
    config = speculative_build([0, 1])
    for family in DECODE_FAMILIES:
        assert TOOLCHAIN.refusal(config, decode(2, 3, family=family)) is None


def test_prefill_programs_are_refused_with_a_reason():
    config = speculative_build([0, 1])
    assert "decode programs only" in TOOLCHAIN.refusal(config, PrefillShape(Family.PREFILL, 512))


DRAFTS_REFUSED = {
    "method is 'medusa'": {"serve": {"method": "medusa"}},
    "quantization": {"serve": {"quantization": "fp8"}},
    "parallel_drafting": {"serve": {"parallel_drafting": True}},
    "draft_vocab_size": {"draft": {"draft_vocab_size": 257}},
    "no reference draft": {"draft": {"architectures": ["MedusaModel"]}},
    "layers [1, 1]": {"layers": [1, 1]},
}


@pytest.mark.parametrize(("reason", "change"), DRAFTS_REFUSED.items(), ids=DRAFTS_REFUSED)
def test_speculation_that_cannot_be_built_is_refused_with_its_reason(reason, change):
    config = speculative_build(change.get("layers", [0, 1]))
    speculation = config.serve.speculative_config.model_dump() | change.get("serve", {})
    serve = config.serve.model_copy(update={"speculative_config": SpeculativeConfig(**speculation)})
    draft = ModelConfig("draft", {**config.draft_model.architecture, **change.get("draft", {})})
    assert reason in TOOLCHAIN.refusal(replace(config, serve=serve, draft_model=draft))


def test_doctor_says_what_is_missing(host, monkeypatch):
    host(LEVELS["x86-64-v3"].features)
    monkeypatch.setattr(findings, "installed_versions", lambda: {"torch": "2.13.0"})
    found = {finding.subject: finding for finding in TOOLCHAIN.findings()}
    assert found["torch"].ok
    assert not found["g++"].ok
    assert "install" in found["g++"].hint
    assert found["x86-64-v3"].ok
    assert not found["x86-64-v4"].ok
    assert "lacks avx512bw" in found["x86-64-v4"].detail
