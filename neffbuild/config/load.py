"""Loading a configuration: a file of ours, a bare vLLM `--config` file, or a `vllm serve` line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from neffbuild.config import vllm_options
from neffbuild.config.build import (
    BuildConfig,
    CacheConfig,
    FarmConfig,
    RemoteConfig,
    ToolchainConfig,
    expanded_path,
    local_directory,
)
from neffbuild.config.documents import read_document
from neffbuild.config.findings import Findings, nearest
from neffbuild.config.normalise import normalise_serve
from neffbuild.config.serve import ServeConfig
from neffbuild.config.vllm_command import parse_vllm_command
from neffbuild.config.vllm_file import SOURCE, without_unheard

_SECTIONS = ("serve", "toolchain", "cache", "farm")
_OUT_OF_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
"""By pydantic's name for a number outside them: its name of the bound, and ours."""
_Section = TypeVar("_Section", bound=BaseModel)

Overrides = Mapping[str, Mapping[str, Any]]
"""Section → field → value, from command-line options. They win over the file; relative paths in them
are relative to the working directory, those of the file to the file's folder."""


def load_config(path: Path, overrides: Overrides | None = None) -> BuildConfig:
    """The configuration in a YAML or JSON file.

    The file has the sections `serve:` (vLLM's options, underscores or dashes), `toolchain:`, `cache:`
    and `farm:`; or it is a bare vLLM `--config` file, with the options at its top level and a `model`.
    Raises `ConfigError` naming the file and every field that is wrong.
    """
    source = str(path)
    findings = Findings(source)
    document = read_document(path)
    with findings.stage():
        sections = _sections(document, findings)
    base = path.parent.absolute()
    for name in ("cache", "toolchain"):
        if name in sections:
            sections[name] = _absolute_paths(sections[name], base)
    return _build(sections, overrides or {}, base, findings)


def load_vllm_command(words: Sequence[str], overrides: Overrides | None = None) -> BuildConfig:
    """The configuration of a `vllm serve …` command line, given as argv words.

    Relative paths are relative to the working directory, as for vLLM; own sections have their
    defaults. Raises `ConfigError`.
    """
    command = parse_vllm_command(words)
    findings = Findings(SOURCE, notes=list(command.notes))
    return _build({"serve": command.options}, overrides or {}, Path.cwd(), findings)


def _build(
    sections: dict[str, dict[str, Any]], overrides: Overrides, base: Path, findings: Findings
) -> BuildConfig:
    for section, fields in overrides.items():
        sections[section] = {**sections.get(section, {}), **_absolute_paths(fields, Path.cwd())}
    with findings.stage():
        toolchain = _section("toolchain", ToolchainConfig, sections, findings)
        cache = _section("cache", CacheConfig, sections, findings)
        farm = _section("farm", FarmConfig, sections, findings)
        options = vllm_options.option_names(sections["serve"], "serve.")
    serving = normalise_serve(options, base=base, toolchain=toolchain.name, findings=findings)
    toolchain = _of_engine(toolchain, serving.serve, findings)
    return BuildConfig(
        source=findings.source,
        serve=serving.serve,
        model=serving.model,
        draft_model=serving.draft_model,
        toolchain=toolchain,
        cache=cache,
        farm=farm,
        notes=tuple(findings.notes),
    )


def _of_engine(
    toolchain: ToolchainConfig, serve: ServeConfig, findings: Findings
) -> ToolchainConfig:
    """A vLLM that is told to compile with our backend is the engine to plan for."""
    backend = serve.compilation_config.get("backend")
    if toolchain.name != "inductor" or toolchain.engine is not None or backend != "neffbuild":
        return toolchain
    findings.note(
        "serve.compilation_config.backend is neffbuild, so toolchain.engine is taken to be vllm"
    )
    return toolchain.model_copy(update={"engine": "vllm"})


def _sections(document: dict[str, Any], findings: Findings) -> dict[str, dict[str, Any]]:
    """The sections of a file, `serve` always among them."""
    if "serve" not in document and "model" in document:
        heard, notes = without_unheard(document)
        findings.notes += notes
        return {"serve": heard}
    for name in document:
        if name not in _SECTIONS:
            findings.problem(
                str(name),
                document[name],
                f"unknown section {name!r}; allowed: {', '.join(_SECTIONS)}, or vLLM's own options "
                "with a model",
                _instead(name, document),
            )
    if "serve" not in document and not findings.problems:
        findings.problem(
            "serve", None, "there is no section serve; allowed: vLLM's options under it"
        )
    sections: dict[str, dict[str, Any]] = {"serve": {}}
    for name in _SECTIONS:
        value = document.get(name)
        if isinstance(value, dict):
            sections[name] = value
        elif name in document and (value is not None or name == "serve"):
            findings.refuse(name, value, "a mapping of options")
    return sections


def _instead(name: object, document: Mapping[str, Any]) -> str | None:
    if not isinstance(name, str):
        return "write section names as texts"
    if "serve" in document and vllm_options.option_name(name) in vllm_options.NAMES:
        return f"vLLM's options go under serve: write serve.{name}"
    meant = nearest(name, _SECTIONS)
    return f"did you mean {meant}?" if meant else None


def _absolute_paths(fields: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """`cache.local`, `cache.keys`, the directories among `cache.remotes` and `toolchain.hlo_dir`, relative
    to `base` no more."""
    absolute = dict(fields)
    if isinstance(graphs := fields.get("hlo_dir"), str) and graphs:
        absolute["hlo_dir"] = str(expanded_path(graphs, base))
    if isinstance(keys := fields.get("keys"), list | tuple):
        absolute["keys"] = [
            str(expanded_path(key, base)) if isinstance(key, str) and key else key for key in keys
        ]
    if isinstance(local := fields.get("local"), str) and local:
        absolute["local"] = str(local_directory(local, base, "cache.local"))
    if isinstance(remotes := fields.get("remotes"), list | tuple):
        absolute["remotes"] = [
            {**remote, "url": str(expanded_path(url, base))}
            if isinstance(remote, dict)
            and isinstance(url := remote.get("url"), str)
            and url
            and "://" not in url
            else remote
            for remote in remotes
        ]
    return absolute


def _section(
    name: str, model: type[_Section], sections: Mapping[str, Mapping[str, Any]], findings: Findings
) -> _Section:
    """One of our own sections; its defaults where something is wrong with it."""
    endless = list(_not_finite(name, sections.get(name, {})))
    for path, number in endless:
        findings.refuse(path, number, "a finite number")
    if endless:
        return model()
    try:
        # Through JSON: that is what strict types are defined for, with lists where tuples are.
        return model.model_validate_json(json.dumps(sections.get(name, {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            findings.problem(name, None, f"{name} holds what JSON cannot: {error}")
            return model()
        for detail in error.errors(include_url=False):
            # "[key]" stands for the name before it, not for what it names.
            loc = [str(part) for part in detail["loc"] if part not in ("[key]", "")]
            where = [name, *loc]
            path = ".".join(where)
            if detail["type"] == "extra_forbidden":
                fields = RemoteConfig if "remotes" in where[1:-1] else model
                meant = nearest(where[-1], fields.model_fields)
                findings.problem(
                    path,
                    detail["input"],
                    f"{path} is unknown; allowed in {'.'.join(where[:-1])}: "
                    + ", ".join(fields.model_fields),
                    f"did you mean {meant}?" if meant else None,
                )
            else:
                field = model.model_fields.get(loc[0]) if len(loc) == 1 else None
                bounds = (
                    _bounds(field.metadata) if field and detail["type"] in _OUT_OF_BOUNDS else ""
                )
                allowed, hint = _allowed(detail["type"], detail)
                findings.refuse(path, detail["input"], bounds or allowed, hint)
        return model()


def _not_finite(path: str, value: object) -> Iterator[tuple[str, float]]:
    """Path → number of what is nested in `value` and is infinite or no number (`.inf`, `.nan`)."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _not_finite(f"{path}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_finite(f"{path}.{index}", item)


def _bounds(metadata: Sequence[Any]) -> str:
    """Which numbers a field may hold, both ends of them."""
    return ", ".join(
        f"{words} {getattr(bound, name):g}"
        for bound in metadata
        for name, words in _OUT_OF_BOUNDS.values()
        if getattr(bound, name, None) is not None
    )


def _allowed(kind: str, detail: Mapping[str, Any]) -> tuple[str, str | None]:
    """What a field may hold, from what pydantic says is wrong with it, and a hint."""
    context = detail.get("ctx", {})
    simple = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "bool_type": "true, false",
        "string_too_short": "a text that is not empty",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "finite_number": "a finite number",
    }
    if kind == "string_type":
        return "a text", "write it in quotes" if isinstance(detail["input"], int | float) else None
    if kind in _OUT_OF_BOUNDS:
        name, words = _OUT_OF_BOUNDS[kind]
        return f"{words} {context[name]:g}", None
    if kind == "literal_error":
        return str(context["expected"]).replace("'", ""), None
    if kind == "string_pattern_mismatch":
        return "letters, digits, `.`, `_` and `-`", None
    if kind == "missing":
        return "a value", "the field must be set"
    return simple.get(kind, str(detail["msg"])), None
