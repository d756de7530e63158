"""The options and the version that an engine prints at its start, compared with those of the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from neffbuild.config.serve import ServeConfig
from neffbuild.grid.conformance import Difference, Expected
from neffbuild.grid.engine_log import EngineLog
from neffbuild.grid.ranks import steps_are_synced

VLLM = "vllm"
VLLM_NEURON = "vllm-neuron"
"""Whose releases are numbered by the vLLM that they are for: 0.24.0.1.1.0 is for vLLM 0.24."""

_FOR_A_DEVICE = re.compile(r"(?:cpu|cu\d+|rocm\d*|xpu|tpu|empty|precompiled)")
"""Parts of a version that say for which device vLLM was built. A log need not repeat them."""

_PEP_440 = re.compile(
    r"(?:(?P<epoch>[0-9]{1,9})!)?(?P<numbers>[0-9]{1,9}(?:\.[0-9]{1,9})*)"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_number>[0-9]{1,9})?)?"
    r"(?P<post>-(?P<post_only>[0-9]{1,9})|[-_.]?(?:post|rev|r)[-_.]?(?P<post_number>[0-9]{1,9})?)?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_number>[0-9]{1,9})?)?"
)
_PRE = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}

_SERIES = re.compile(r"[0-9]+\.[0-9]+")


def setting_differences(expected: Expected, log: EngineLog) -> list[Difference]:
    """The options that the engine has with other values than planned, and its version where it is another."""
    options = list(_options(expected.serve, log))
    told = any(one.name == "num_speculative_tokens" for one in options)
    if log.drafts and not expected.serve.num_speculative_tokens and not told:
        options.append(
            Difference(
                "setting",
                "speculative_config",
                "planned without; the engine captures the graphs of a draft",
            )
        )
    return [*_versions(expected, log), *options]


def same_version(planned: str, logged: str) -> bool:
    """Whether an engine that logs one version of vLLM may be that of the other. One of them that does not
    say its build may be any build of its version."""
    (release, build), (other_release, other_build) = _parts(planned), _parts(logged)
    return release == other_release and (build == other_build or not build or not other_build)


def same_series(plugin: str, logged: str) -> bool:
    """Whether an engine that logs this version of vLLM may have this release of vLLM Neuron. Development
    builds are numbered in other ways, and may."""
    numbers, others = _SERIES.match(plugin), _SERIES.match(logged)
    return numbers is None or others is None or "dev" in logged or numbers[0] == others[0]


def is_version(logged: str) -> bool:
    """Whether it is one: vLLM that does not know its own says `dev`."""
    return logged[:1].isdecimal()


def _versions(expected: Expected, log: EngineLog) -> Iterator[Difference]:
    tests = (("vLLM", VLLM, same_version), ("vLLM Neuron", VLLM_NEURON, same_series))
    for version in sorted({one.version for one in log.settings if is_version(one.version)}):
        for engine, tool, is_same in tests:
            planned = expected.versions.get(tool)
            if planned is not None and not is_same(planned, version):
                detail = f"planned for {engine} {planned}; the engine is vLLM {version}"
                yield Difference("setting", "version", detail)


def _options(serve: ServeConfig, log: EngineLog) -> Iterator[Difference]:
    told = {(name, value) for settings in log.settings for name, value in settings.options}
    for name, value in sorted(told, key=str):
        planned = getattr(serve, name)
        if planned != value and not (name == "data_parallel_size" and _is_a_replica(serve, value)):
            detail = f"planned with {name} {planned}; the engine has {value}"
            yield Difference("setting", name, detail)


def lone_replicas(serve: ServeConfig) -> int:
    """How many engines serve a model that are each alone to vLLM: replicas that share no collective."""
    return 1 if steps_are_synced(serve) else serve.data_parallel_size


def _is_a_replica(serve: ServeConfig, size: int | str) -> bool:
    return size == 1 and lone_replicas(serve) > 1


def _parts(version: str) -> tuple[str, frozenset[str]]:
    release, _, build = version.strip().lower().removeprefix("v").partition("+")
    parts = filter(None, re.split(r"[.+_-]", build))
    return _release(release), frozenset(one for one in parts if not _FOR_A_DEVICE.fullmatch(one))


def _release(text: str) -> str:
    """One spelling for all that PEP 440 takes as equal; what is no version of it stays as it is."""
    found = _PEP_440.fullmatch(text)
    if found is None:
        return text
    numbers = [int(number) for number in found["numbers"].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    said = [f"{int(found['epoch'] or 0)}!" + ".".join(map(str, numbers))]
    if found["pre"]:
        said.append(f"{_PRE.get(found['pre'], found['pre'])}{int(found['pre_number'] or 0)}")
    if found["post"]:
        said.append(f"post{int(found['post_number'] or found['post_only'] or 0)}")
    if found["dev"]:
        said.append(f"dev{int(found['dev_number'] or 0)}")
    return ".".join(said)
