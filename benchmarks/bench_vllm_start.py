"""How long `vllm serve` takes to start, by what it starts from. Needs the environment of
`make test-vllm`; one run, a tiny model on CPU.

Engine initialisation is vLLM's own figure (profile, KV cache, warm-up: where programs are compiled or
loaded); the whole start is from the command to the first healthy answer. Every way starts in an empty
`VLLM_CACHE_ROOT` but for what is named; all but the first two find vLLM's `modelinfos/` there, as a
hydrated engine does.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from neffbuild.toolchain.inductor.engines import installed_vllm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

# vLLM's default on CPU: its own mode, torch's inductor.
THEIRS: dict[str, Any] = {"compilation_config": None}
EAGER: dict[str, Any] = {"compilation_config": None, "enforce_eager": True}
OURS: dict[str, Any] = {}


def main() -> None:
    if installed_vllm() is None:
        print(
            "bench_vllm_start: vLLM is not installed here (`make test-vllm` says how); nothing measured"
        )
        return
    with tempfile.TemporaryDirectory(prefix="neffbuild-bench-") as folder:
        _measure(Path(folder))


def _measure(place: Path) -> None:
    import engines

    model = engines.write_model(place / "model")
    config = engines.write_config(place / "build", model)
    for words in (
        ("compile", config),
        ("push", config, "--to", place / "remote", "--tag", "tiny:1"),
        ("pull", place / "remote", "--tag", "tiny:1", "--cache", place / "pulled"),
    ):
        done = engines.neffbuild(*words)
        if done.returncode != 0:
            raise SystemExit(done.stderr)

    def start(name: str, options: dict[str, Any], kept: Path | None = None, **env: str) -> Path:
        """One start; `kept` is what its VLLM_CACHE_ROOT holds at first. Returns that folder."""
        host = engines.Host(place / name.replace(" ", "-"))
        host.variables |= {"NEFFBUILD_CACHE": str(host.folder / "cache"), **env}
        if kept is not None:
            shutil.copytree(kept, host.vllm_cache, dirs_exist_ok=True)
        with engines.serving(host, model, **options) as engine:
            engine.greedy(engines.PROMPTS)
            rows.append((name, engine.init_seconds, engine.ready_seconds))
        return host.vllm_cache

    rows: list[tuple[str, float, float]] = []
    strict = {"NEFFBUILD_CACHE": str(place / "pulled"), "NEFFBUILD_STRICT": "1"}
    theirs = start("vLLM, cold", THEIRS)
    start("neffbuild, cold", OURS)
    infos = place / "infos"
    shutil.copytree(theirs / "modelinfos", infos / "modelinfos")
    start("vLLM, its own cache copied", THEIRS, theirs)
    ours = start("neffbuild, pulled", OURS, infos, **strict)
    start("neffbuild, restarted", OURS, ours, **strict)
    start("vLLM --enforce-eager", EAGER, infos)

    warm = next(row for row in rows if row[0] == "vLLM, its own cache copied")
    print(
        f"{'start':<28}{'engine init':>14}{'of vLLM warm':>14}{'whole start':>14}{'of vLLM warm':>14}"
    )
    for name, init, ready in rows:
        print(
            f"{name:<28}{init:>12.2f} s{init / warm[1]:>14.2f}{ready:>12.1f} s{ready / warm[2]:>14.2f}"
        )


if __name__ == "__main__":
    main()
