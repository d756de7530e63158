"""From a warm cache to nine programs that have each run a step, in a fresh process.

neffbuild by shape (no compiler on PATH, no Dynamo), neffbuild behind `torch.compile`, and `torch.compile`
with inductor on a warm `TORCHINDUCTOR_CACHE_DIR`: the same model, shapes and machine, the same run. Imports
are made before the clock starts. Prints the median of a few processes each and the ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from warm_store import CONFIG, measured_in_a_fresh_process, warm_store

BY_SHAPE = """
import json, shutil, sys, time
from pathlib import Path
import torch
from neffbuild.cache.directory import DirectoryStore
from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import (
    allocate_kv_caches, build_decoder, model_dtype, named_kv_caches, named_tensors,
)
from neffbuild.runtime.dispatcher import Dispatcher
from neffbuild.runtime.loader import Loader
from neffbuild.toolchain.registry import load_toolchain
import neffbuild.toolchain.inductor.executable

assert shutil.which("g++") is None
config = load_config(Path(sys.argv[1]))
model = build_decoder(config, Family.TARGET)
for parameter in model.parameters():
    parameter.fill_(0.01)
kv_caches = allocate_kv_caches(model.architecture, model_dtype(config), 64, config.serve.block_size)
tensors = named_tensors(model) | named_kv_caches(kv_caches)

began = time.perf_counter()
toolchain = load_toolchain(config.toolchain.name)
bucketer = Bucketer.from_config(
    config, query_len_support=toolchain.capabilities.query_len_support
)
loader = Loader.from_config(config, DirectoryStore(Path(sys.argv[2])))
dispatcher = Dispatcher(bucketer, loader, tensors)
dispatcher.warm_up()
ready = time.perf_counter() - began
shapes = [unit.shape for unit in loader.manifest.units]
for shape in shapes:
    dispatcher.program(shape).call({})
stepped = time.perf_counter() - began
assert not any(name.startswith(("torch._dynamo", "torch._inductor")) for name in sys.modules)
print(json.dumps({"programs": loader.counters.hits, "ready": ready, "stepped": stepped}))
"""

BY_GRAPH = """
import json, sys, time
from pathlib import Path
import torch, torch._dynamo
from neffbuild.config.load import load_config
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.expand import Need, WarmUp, expand
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import (
    allocate_kv_caches, build_decoder, mark_num_blocks_symbolic, model_dtype, step_inputs,
)
from neffbuild.toolchain.inductor.capture import one_shape_callable

backend = sys.argv[2]
if backend == "inductor":
    import torch._inductor.compile_fx
config = load_config(Path(sys.argv[1]))
model = build_decoder(config, Family.TARGET)
for parameter in model.parameters():
    parameter.fill_(0.01)
kv_caches = allocate_kv_caches(model.architecture, model_dtype(config), 64, config.serve.block_size)
mark_num_blocks_symbolic(kv_caches)
bucketer = Bucketer.from_config(config, query_len_support=QueryLenSupport.VARLEN)
shapes = expand(bucketer, WarmUp.REACHABLE).with_need(Need.REQUIRED)

began = time.perf_counter()
with torch.no_grad():
    for shape in shapes:
        step = torch.compile(one_shape_callable(model), backend=backend, dynamic=False)
        step(*step_inputs(shape, config.serve.block_size), kv_caches)
print(json.dumps({"programs": len(shapes), "stepped": time.perf_counter() - began}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="neffbuild cache to use and fill")
    parser.add_argument("--inductor-cache", type=Path, help="inductor cache to use and fill")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with (
        warm_store(chosen.cache) as cache,
        tempfile.TemporaryDirectory(prefix="neffbuild-bench-") as folder,
    ):
        inductor = {"TORCHINDUCTOR_CACHE_DIR": str(chosen.inductor_cache or folder)}
        no_compiler = {"PATH": "/nowhere", "HOME": folder}
        strict = {"NEFFBUILD_CACHE": str(cache), "NEFFBUILD_STRICT": "1"}
        ways = {
            "neffbuild, by shape, no compiler": (
                BY_SHAPE, str(cache), no_compiler,
            ),
            "neffbuild behind torch.compile, strict, no compiler": (
                BY_GRAPH, "neffbuild", no_compiler | strict,
            ),
            "torch.compile inductor, warm cache": (
                BY_GRAPH, "inductor", os.environ | inductor,
            ),
        }  # fmt: skip
        cold = measured_in_a_fresh_process(
            BY_GRAPH, str(CONFIG), "inductor", environment=os.environ | inductor
        )
        print(f"{cold['programs']} programs, seconds after imports until each has run a step")
        print(f"  {'torch.compile inductor, filling its cache':52} {cold['stepped']:8.3f}")
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(chosen.rounds):  # in turns, so that all see the same noise
            for way, (program, argument, environment) in ways.items():
                measured[way].append(
                    measured_in_a_fresh_process(
                        program, str(CONFIG), argument, environment=environment
                    )
                )
        seconds = {way: median(one["stepped"] for one in runs) for way, runs in measured.items()}
        for way, runs in measured.items():
            loaded = [one["ready"] for one in runs if "ready" in one]
            note = f"   ({median(loaded):.3f} until loaded)" if loaded else ""
            print(f"  {way:52} {seconds[way]:8.3f}{note}")
        ours, behind, peer = seconds.values()
        print(f"  by shape against inductor warm: {peer / ours:.1f} times faster")
        print(f"  behind torch.compile against inductor warm: {peer / behind:.2f} times faster")


if __name__ == "__main__":
    main()
