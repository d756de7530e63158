"""A process that starts with a warm store: no compiler, no Dynamo, everything ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import runtime_samples as samples

from neffbuild.config.errors import MissingUnit
from neffbuild.runtime.replay import execute_replay

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs/schemas/neffbuild.replay-1.json").read_text()
)

PROGRAM = """
import json, shutil, sys
from pathlib import Path
from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.load import load_config
from neffbuild.runtime.replay import execute_replay

config = load_config(Path(sys.argv[1]))
document = execute_replay(config, DirectoryStore(Path(config.cache.local)), 100)
heavy = ("torch._dynamo", "torch._inductor")
print(json.dumps({
    "document": document,
    "imported": sorted(name for name in sys.modules if name.startswith(heavy)),
    "compilers": [name for name in ("g++", "gcc", "cc", "c++", "clang") if shutil.which(name)],
}))
"""


def test_replay_in_a_fresh_process_compiles_nothing_and_needs_no_compiler(served, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(served.path)],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/nowhere",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["compilers"] == []
    assert seen["imported"] == []
    assert list(tmp_path.iterdir()) == []
    document = seen["document"]
    jsonschema.validate(document, SCHEMA)
    assert (document["compiles"], document["hits"], document["misses"]) == (0, 100, 0)
    assert [(change["from"], change["to"]) for change in document["transitions"]] == [
        (None, "decode_b4_ctx128"),
        ("decode_b4_ctx128", "decode_b4_ctx256"),
        ("decode_b4_ctx256", "decode_b4_ctx512"),
        ("decode_b4_ctx512", "decode_b1_ctx128"),
        ("decode_b1_ctx128", "decode_b1_ctx256"),
        ("decode_b1_ctx256", "decode_b1_ctx512"),
    ]
    assert all(unit["median_step_seconds"] > 0 for unit in document["units"])
    small = document["small_step"]
    assert (small["bucket_name"], small["bucket_name_full_length"]) == (
        "decode_b4_ctx128", "decode_b4_ctx512",
    )  # fmt: skip
    assert small["kv_bytes_ratio"] == samples.MAX_MODEL_LEN / 128
    positions, layers, kv_heads, head_dim = 4 * 128, 2, 2, 16
    assert small["kv_bytes"] == positions * layers * 2 * kv_heads * head_dim * 4


def test_replay_of_an_uncompiled_config_is_refused(served, tmp_path):
    other = samples.served(samples.write_config(tmp_path / "other"))
    with pytest.raises(MissingUnit, match="no manifest"):
        execute_replay(other.config, other.store, 1)
