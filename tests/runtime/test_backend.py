"""`torch.compile(model, backend="neffbuild")`: hits, misses, strict mode, and never eager."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_samples as samples
import torch
import torch._dynamo
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

from neffbuild.cache.catalog import Hit, read_entry, write_manifest
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.loaded import materialise
from neffbuild.cache.recipe import graph_recipe, recipe_key
from neffbuild.config.errors import ConfigError, IntegrityError, MissingUnit, ToolchainRefusal
from neffbuild.models.decode import mark_num_blocks_symbolic, named_kv_caches
from neffbuild.runtime import backend
from neffbuild.runtime.loader import config_manifest
from neffbuild.toolchain.base import Artifact
from neffbuild.toolchain.inductor.capture import one_shape_callable

UNSAFE = ["cpp.enable_unsafe_math_opt_flag=true"]


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    """Nothing compiled, torch's own settings, no settings of ours, counters at zero."""
    for name in ("NEFFBUILD_CACHE", "NEFFBUILD_MANIFEST", "NEFFBUILD_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "counters", type(backend.counters)())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, suppress_errors=False):
        yield
    torch._dynamo.reset()


def counted() -> tuple[int, int, int]:
    counters = backend.counters
    return counters.hits, counters.misses, counters.compiles


def compiled_step(requests: samples.Requests, **options):
    """The model's step, one callable for one shape."""
    return torch.compile(
        one_shape_callable(requests.model), backend="neffbuild", dynamic=False, options=options
    )


def take_step(step, requests: samples.Requests, context_len: int):
    """Call it on copies of the KV caches; returns what it returned and the copies."""
    kv_caches = requests.copied_caches()
    mark_num_blocks_symbolic(kv_caches)
    with torch.no_grad():
        return step(*requests.step_inputs(context_len), kv_caches), kv_caches


def refusal_of(call, *arguments, **options):
    with pytest.raises(BackendCompilerFailed) as raised:
        call(*arguments, **options)
    # Whoever reads torch's message reads ours.
    assert raised.value.inner_exception.message in str(raised.value)
    return raised.value.inner_exception


def key_of(served: samples.Served, shape) -> str:
    manifest = config_manifest(served.config, served.store)
    [key] = [unit.key for unit in manifest.units if unit.shape == shape]
    return key


def test_torch_knows_the_backend_by_name():
    assert "neffbuild" in torch._dynamo.list_backends()


@pytest.mark.parametrize(("rows", "context"), [(1, 128), (4, 256)])
def test_what_the_farm_compiled_is_a_hit_and_the_same_artifact(served, monkeypatch, rows, context):
    monkeypatch.setenv("NEFFBUILD_CACHE", served.store.url)
    monkeypatch.setenv("NEFFBUILD_STRICT", "1")
    requests = samples.Requests(served.config, [context - 20] * rows)
    (tokens, logits), kv_caches = take_step(compiled_step(requests), requests, context)
    assert counted() == (1, 0, 0)

    outputs = requests.dispatcher(served).run(requests.batch()).outputs
    assert torch.equal(tokens, outputs["next_token_ids"])
    assert torch.equal(logits, outputs["logits"])
    dispatched = named_kv_caches(requests.kv_caches)
    for name, tensor in named_kv_caches(kv_caches).items():
        assert torch.equal(tensor, dispatched[name])
    key = key_of(served, samples.shape(rows, context))
    entry = config_manifest(served.config, served.store).entries[key]
    assert str(materialise(served.store, entry)) in Path("/proc/self/maps").read_text()


def manifest_references(served: samples.Served, folder: Path) -> dict[str, str]:
    manifest = config_manifest(served.config, served.store)
    file = folder / "manifest.json"
    file.write_bytes(manifest.to_json())
    return {"digest": manifest.digest, "file": str(file)}


@pytest.mark.parametrize("kind", ["digest", "file"])
def test_a_manifest_is_named_by_digest_or_file(served, tmp_path, monkeypatch, kind):
    # No pointer leads to it here, so that only its name can.
    store = tmp_path / "cache"
    subprocess.run(["cp", "-r", served.store.url, store], check=True)
    for pointer in (store / "v1/configs").iterdir():
        pointer.unlink()
    reference = manifest_references(served, tmp_path)[kind]
    requests = samples.Requests(served.config, [100])
    take = compiled_step(requests, strict=True, cache=str(store))
    assert isinstance(refusal_of(take_step, take, requests, 128), MissingUnit)
    monkeypatch.setenv("NEFFBUILD_MANIFEST", reference)
    take_step(compiled_step(requests, strict=True, cache=str(store)), requests, 128)
    assert counted() == (1, 1, 0)


BAD_SETTINGS = {
    "unknown option": ({"stric": True}, {}, "did you mean 'strict'"),
    "strict that is no bool": ({"strict": "yes"}, {}, "allowed: True, False"),
    "NEFFBUILD_STRICT": ({}, {"NEFFBUILD_STRICT": "yes"}, "allowed: 1, 0"),
    "flags that are no list": ({"flags": "a=b"}, {}, "list of name=value"),
    "target": ({"target": "z80"}, {}, "x86-64-v3"),
    "cache": ({"cache": 7}, {}, "allowed: a path"),
    "manifest not stored": ({"manifest": "0" * 64}, {}, "is not in"),
    "manifest no file": ({}, {"NEFFBUILD_MANIFEST": "nowhere.json"}, "No such file"),
}


@pytest.mark.parametrize(
    ("options", "environment", "said"), BAD_SETTINGS.values(), ids=BAD_SETTINGS
)
def test_bad_settings_are_refused(tmp_path, monkeypatch, options, environment, said):
    monkeypatch.setenv("NEFFBUILD_CACHE", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    step = torch.compile(lambda x: x + 1, backend="neffbuild", dynamic=False, options=options)
    error = refusal_of(step, torch.zeros(2))
    assert isinstance(error, ConfigError)
    assert said in f"{error.message} {error.hint}"


def test_strict_mode_names_unit_key_and_command(served):
    requests = samples.Requests(served.config, [100, 100])  # no program for two rows
    step = compiled_step(requests, strict=True, cache=served.store.url)
    with backend.unit("decode_b2_ctx128", config=str(served.path)):
        error = refusal_of(take_step, step, requests, 128)
    assert isinstance(error, MissingUnit)
    assert re.search(r"decode_b2_ctx128 \(key [0-9a-f]{64}\)", error.message)
    assert f"neffbuild compile {served.path} --only decode_b2_ctx128" in error.message
    # Outside of the context the unit has no name any more; the graph has.
    error = refusal_of(take_step, step, requests, 128)
    assert "decode_b2" not in error.message
    assert re.search(r"graph [0-9a-f]{64} \(key [0-9a-f]{64}\)", error.message)
    assert counted() == (0, 2, 0)


def test_strict_mode_says_when_the_unit_is_stored_for_another_graph(served):
    requests = samples.Requests(served.config, [100, 100])
    step = compiled_step(requests, strict=True, cache=served.store.url)
    with backend.unit("decode_b1_ctx128"):
        error = refusal_of(take_step, step, requests, 128)
    assert isinstance(error, MissingUnit)
    assert key_of(served, samples.shape(1, 128)) in error.message
    assert "another graph" in error.message


def test_the_same_graph_under_other_flags_is_a_miss(served):
    requests = samples.Requests(served.config, [100])
    step = compiled_step(requests, strict=True, cache=served.store.url, flags=UNSAFE)
    assert isinstance(refusal_of(take_step, step, requests, 128), MissingUnit)
    take_step(compiled_step(requests, strict=True, cache=served.store.url), requests, 128)
    assert counted() == (1, 1, 0)


def test_the_same_graph_for_another_target_is_a_miss(served):
    requests = samples.Requests(served.config, [100])
    step = compiled_step(requests, strict=True, cache=served.store.url, target="x86-64-v4")
    error = refusal_of(take_step, step, requests, 128)
    assert isinstance(error, ToolchainRefusal)
    assert "target 'x86-64-v3', this process runs 'x86-64-v4'" in error.message


def test_a_manifest_for_another_torch_is_refused_in_strict_mode(served, tmp_path):
    manifest = config_manifest(served.config, served.store)
    platform = {**manifest.platform, "versions": manifest.platform["versions"] | {"torch": "1.0"}}
    entries = {
        key: dataclasses.replace(
            entry,
            graph_key=recipe_key(
                graph_recipe(
                    entry.graph_digest, platform, {"flags": entry.recipe["toolchain"]["flags"]}
                )
            ),
        )
        for key, entry in manifest.entries.items()
    }
    other = dataclasses.replace(manifest, platform=platform, entries=entries)
    (tmp_path / "other.json").write_bytes(other.to_json())
    requests = samples.Requests(served.config, [100])
    options = {"cache": served.store.url, "manifest": str(tmp_path / "other.json")}
    error = refusal_of(take_step, compiled_step(requests, strict=True, **options), requests, 128)
    assert isinstance(error, ToolchainRefusal)
    assert "its manifest is for torch '1.0', this process runs" in error.message


def test_a_miss_is_compiled_and_stored_and_then_a_hit(tmp_path, monkeypatch, caplog):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("NEFFBUILD_CACHE", str(tmp_path / "cache"))

    def function(cache, slots, values):
        cache[slots] = 1.0  # a constant of the graph, which export makes an input of its own
        cache[slots] += values
        return cache[slots] * 2

    cache = torch.zeros(6, 3)
    # A size that stays symbolic: compiling must leave Dynamo's own view of it alone.
    torch._dynamo.mark_dynamic(cache, 0)
    given = torch.tensor([4, 1]), torch.arange(6.0).view(2, 3)
    first = torch.compile(function, backend="neffbuild", dynamic=False)(cache, *given)
    assert torch.equal(first, (given[1] + 1) * 2)
    assert torch.equal(cache[given[0]], given[1] + 1)
    assert counted() == (0, 1, 1)
    assert [message for message in caplog.messages if message.endswith(": compiling one")]
    [document] = (tmp_path / "cache/v1/entries").rglob("*.json")
    found = read_entry(DirectoryStore(tmp_path / "cache"), document.stem)
    assert isinstance(found, Hit)
    assert set(found.entry.recipe) == {"schema", "kind", "graph_digest", "platform", "options"}
    assert found.entry.recipe["kind"] == "graph"
    assert found.entry.graph_key == found.entry.key
    assert list((tmp_path / "tmp").iterdir()) == []

    torch._dynamo.reset()
    options = {"strict": True}
    again = torch.compile(function, backend="neffbuild", dynamic=False, options=options)
    assert torch.equal(again(cache, *given), first)
    larger = torch.zeros(9, 3)
    assert torch.equal(again(larger, *given), first)  # the same program, no second lookup
    assert counted() == (1, 1, 1)


def damage(served: samples.Served, shape) -> None:
    entry = config_manifest(served.config, served.store).entries[key_of(served, shape)]
    blob = served.store.blob_path(entry.files["program.wrapper.so"].digest)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)


def test_a_damaged_artifact_stops_strict_mode_and_is_compiled_otherwise(
    served, own_served, monkeypatch
):
    target = samples.shape(1, 128)
    damage(own_served, target)
    requests = samples.Requests(served.config, [100])
    cache = own_served.store.url
    step = compiled_step(requests, strict=True, cache=cache)
    assert isinstance(refusal_of(take_step, step, requests, 128), IntegrityError)
    assert counted() == (0, 1, 0)

    whole = materialise(
        served.store,
        config_manifest(served.config, served.store).entries[key_of(served, target)],
    )

    def compile_graph(graph, level, flags, scratch):
        return Artifact({path.name: path for path in whole.iterdir()})

    # What the compiler would make again, as its own tests show.
    monkeypatch.setattr(backend, "compile_graph", compile_graph)
    (_, logits), _ = take_step(compiled_step(requests, cache=cache), requests, 128)
    torch.testing.assert_close(logits, requests.reference_logits(), rtol=1e-4, atol=1e-4)
    assert counted() == (0, 2, 1)
    take_step(compiled_step(requests, strict=True, cache=cache), requests, 128)
    assert counted() == (1, 2, 1)


def test_one_callable_for_many_shapes_fails_at_the_recompile_limit(served):
    requests = samples.Requests(served.config, [100])
    options = {"strict": True, "cache": served.store.url}
    step = torch.compile(requests.model, backend="neffbuild", dynamic=False, options=options)
    with torch._dynamo.config.patch(recompile_limit=2):
        take_step(step, requests, 128)
        take_step(step, requests, 256)
        with pytest.raises(FailOnRecompileLimitHit):
            take_step(step, requests, 512)
        take_step(step, requests, 128)  # what was compiled still runs
    assert counted() == (2, 0, 0)


def test_a_callable_per_shape_never_meets_the_recompile_limit(served):
    requests = samples.Requests(served.config, [100])
    with torch._dynamo.config.patch(recompile_limit=2):
        for context in (128, 256, 512):
            step = compiled_step(requests, strict=True, cache=served.store.url)
            take_step(step, requests, context)
    assert counted() == (3, 0, 0)


def test_torch_set_to_suppress_errors_still_does_not_run_eagerly(tmp_path):
    with torch._dynamo.config.patch(suppress_errors=True):
        options = {"strict": True, "cache": str(tmp_path)}
        step = torch.compile(lambda x: x + 1, backend="neffbuild", options=options)
        assert isinstance(refusal_of(step, torch.zeros(2)), MissingUnit)


def test_unreadable_manifests_that_nobody_named_are_passed_over(own_served):
    manifest = config_manifest(own_served.config, own_served.store)
    other = dataclasses.replace(manifest, config="0" * 64)
    digest = write_manifest(own_served.store, other)
    root = Path(own_served.store.url) / "v1"
    for name, content in {
        f"configs/{'0' * 64}.json": json.dumps({"manifest": digest}),
        f"manifests/{digest}.json": "{}",
        f"configs/{'1' * 64}.json": "{",
    }.items():
        (root / name).write_text(content)
    requests = samples.Requests(own_served.config, [100])
    step = compiled_step(requests, strict=True, cache=own_served.store.url)
    take_step(step, requests, 128)
    assert counted() == (1, 0, 0)


PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
import runtime_samples as samples
from pathlib import Path
from neffbuild.models.decode import mark_num_blocks_symbolic
from neffbuild.runtime.backend import counters

served = samples.served(Path(sys.argv[1]))
requests = samples.Requests(served.config, [100])
step = torch.compile(requests.model, backend="neffbuild", dynamic=False, fullgraph=True)
mark_num_blocks_symbolic(requests.kv_caches)
with torch.no_grad():
    step(*requests.step_inputs(128), requests.kv_caches)
print(counters.hits, counters.misses, counters.compiles)
"""


def test_torch_compile_serves_where_there_is_no_compiler(served, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(served.path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/nowhere",
            "HOME": str(tmp_path),
            "NEFFBUILD_CACHE": served.store.url,
            "NEFFBUILD_STRICT": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "0"]
