"""Real engines over their HTTP port: what starts them warm, and what must not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import engines
import pytest
from conftest import Release, Served, serve

MODEL_INFO = "vllm-model_executor-models-llama-LlamaForCausalLM.json"
NOTHING_COMPILED = {"inductor": {}, "aot_autograd": {}, "kernels_generated": 0}


def strict_host(folder: Path, cache: Path, model_infos: Path | None = None) -> engines.Host:
    host = engines.Host(folder)
    host.variables |= {"NEFFBUILD_CACHE": str(cache), "NEFFBUILD_STRICT": "1"}
    if model_infos is not None:
        shutil.copytree(model_infos, host.vllm_cache / "modelinfos")
    return host


def entry_of(cache: Path) -> dict:
    [file] = (cache / "v1/entries").glob("*/*.json")
    return json.loads(file.read_text())


def damage(cache: Path) -> None:
    """One bit of the program in a store."""
    program = entry_of(cache)["files"]["program.wrapper.so"]["digest"]
    blob = cache / "v1/blobs/sha256" / program[:2] / program
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)


def test_a_first_start_compiles_one_program_for_every_batch(cold: Served, release: Release):
    counted = cold.counted
    assert [counted[name] for name in ("hits", "misses", "compiles")] == [0, 1, 1]
    assert counted["dynamo_graphs"] == 1
    [alone], batch, beside = cold.answers
    assert alone == batch[0] == beside[0]
    assert batch == beside
    assert all(len(set(tokens)) > 4 for tokens in batch)
    # `neffbuild compile` met the same graph, and made the same program of it.
    ours, engines_own = (
        entry_of(Path(cache))
        for cache in (release.config.parent / "cache", cold.host.folder / "cache")
    )
    assert ours["graph_digest"] == engines_own["graph_digest"]
    assert ours["graph_key"] == engines_own["graph_key"]
    # Beside it lies what vLLM found out about the model's class.
    beside_it = {name for name in ours["files"] if name.startswith("engine/")}
    assert beside_it == {f"engine/vllm/modelinfos/{MODEL_INFO}"}
    assert {
        name: file for name, file in ours["files"].items() if name not in beside_it
    } == engines_own["files"]


def test_the_program_computes_what_eager_vllm_computes(
    cold: Served, model: Path, place: Path, model_infos: Path
):
    host = strict_host(place / "eager", place / "none", model_infos)
    eager = serve(host, model, compilation_config=None, enforce_eager=True)
    assert eager.answers == cold.answers


def test_an_engine_says_in_its_log_that_it_compiles_what_is_planned(
    cold: Served, release: Release, model: Path, place: Path
):
    [log] = cold.host.folder.glob("serve-*.log")
    done = engines.neffbuild("diff", release.config, "--engine-log", log)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 program as planned, no difference" in done.stdout
    other = engines.write_config(place / "longer", model, max_model_len=1024)
    done = engines.neffbuild("diff", other, "--engine-log", log)
    assert done.returncode == 1
    assert "planned with max_model_len 1024; the engine has 512" in done.stdout


def test_another_host_starts_from_what_it_pulled_and_compiles_nothing(
    cold: Served, release: Release, model: Path, place: Path
):
    """Another user and home, another path of model, of store and of virtual environment; vLLM's cache
    empty; every compiler a trap."""
    folder = place / "elsewhere"
    moved = shutil.copytree(model, folder / "models" / "moved")
    host = engines.Host(
        folder / "host",
        python=engines.linked_environment(folder / "environment"),
        path=str(engines.path_without_compilers(folder / "bin")),
        user=engines.other_user(),
    )
    cache = release.pull(host.folder / "cache")
    host.variables |= {"NEFFBUILD_CACHE": str(cache), "NEFFBUILD_STRICT": "1"}
    host.hand_over()
    first = serve(host, moved)
    counted = first.counted
    assert first.answers == cold.answers
    assert [counted[name] for name in ("hits", "misses", "compiles")] == [1, 0, 0]
    assert {name: counted[name] for name in NOTHING_COMPILED} == NOTHING_COMPILED
    assert first.init_seconds < cold.init_seconds / 2

    # vLLM's own cache now has what Dynamo traced, with a reference to the program.
    shutil.rmtree(host.folder / "probe")
    (host.folder / "probe").mkdir()
    host.hand_over()
    again = serve(host, moved)
    counted = again.counted
    assert again.answers == cold.answers
    assert [counted[name] for name in ("hits", "misses", "compiles")] == [1, 0, 0]
    assert counted["dynamo_graphs"] == 0
    assert (folder / "compilers.log").read_text() == ""


def test_a_damaged_program_is_never_loaded(
    cold: Served, release: Release, model: Path, place: Path, model_infos: Path
):
    cache = release.pull(place / "damaged" / "cache")
    damage(cache)
    untouched = shutil.copytree(cache, place / "damaged" / "again")
    said = engines.refused(strict_host(place / "damaged" / "strict", cache, model_infos), model)
    assert "IntegrityError" in said
    assert "program.wrapper.so" in said or "does not have the digest" in said

    host = strict_host(place / "damaged" / "lenient", untouched, model_infos)
    host.variables["NEFFBUILD_STRICT"] = "0"
    healed = serve(host, model)
    counted = healed.counted
    assert [counted[name] for name in ("hits", "misses", "compiles")] == [0, 1, 1]
    assert healed.answers == cold.answers


MISSES = {
    "another dtype": ({"dtype": "bfloat16"}, "the manifest is for dtype float32"),
    "other layer names": (
        {"hf_overrides": {"architectures": ["RenamedLlamaForCausalLM"]}},
        "one is there for other layer names ('model.layers.0.self_attn.attn' for "
        "'renamed.model.layers.0.self_attn.attn')",
    ),
}


@pytest.mark.parametrize(("options", "said"), MISSES.values(), ids=MISSES)
def test_what_no_program_was_compiled_for_is_refused_in_strict_mode(
    options, said, release: Release, model: Path, short_path: Path, model_infos: Path
):
    host = strict_host(short_path / "host", release.pull(short_path / "cache"), model_infos)
    log = engines.refused(host, model, **options)
    assert "no program for the graph" in log
    assert said in log


def test_a_program_of_another_vllm_is_refused(
    release: Release, model: Path, short_path: Path, model_infos: Path
):
    host = strict_host(short_path / "host", release.pull(short_path / "cache"), model_infos)
    shutil.rmtree(host.folder / "metadata")
    engines.write_version(host.folder / "metadata", "99.0+cpu")
    log = engines.refused(host, model)
    assert f"for vllm '{engines.installed_version()}', this process runs '99.0+cpu'" in log
