"""A vLLM `--config` file, as `vllm serve` reads it: turned into words of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from neffbuild.config.documents import read_document
from neffbuild.config.errors import ConfigError
from neffbuild.config.vllm_options import NOT_OFF_BY_DEFAULT, SWITCHES, option_name, option_names

SOURCE = "the vllm command line"


def without_config_file(arguments: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """The words without `--config FILE`, and what that file holds. Raises
    `ConfigError` for what vLLM would refuse."""
    written_on = next((word for word in arguments if word.startswith("--config=")), None)
    if written_on is not None:
        refuse(
            f"vLLM does not read the file of {written_on!r}",
            option="--config",
            value=written_on,
            hint=f"write it as two words: --config {written_on.removeprefix('--config=')}",
        )
    if "--config" not in arguments:
        return arguments, None
    if arguments.count("--config") > 1:
        refuse("--config is given more than once; vLLM reads one file", option="--config")
    index = arguments.index("--config")
    if index + 1 == len(arguments):
        refuse("--config needs a file name", option="--config")
    path = Path(arguments[index + 1])
    if path.suffix not in (".yaml", ".yml"):
        refuse(
            f"--config {path}: vLLM reads .yaml and .yml files only",
            option="--config",
            value=str(path),
        )
    document = read_document(path)
    try:
        option_names(document, "")
    except ConfigError as error:
        refuse(error.message, option="--config", value=str(path), hint=error.hint)
    return arguments[:index] + arguments[index + 2 :], document


def as_words(document: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The words that vLLM makes of its `--config` file and puts before those of the command line, and
    notes."""
    heard, notes = without_unheard(document)
    heard.pop("config", None)  # a file named in a file is not read
    words: list[str] = []
    for key, value in heard.items():
        match value:
            case False | []:
                pass
            case True:
                words.append(f"--{key}")
            case list():
                words += [f"--{key}", *map(str, value)]
            case dict():
                words += [f"--{key}", json.dumps(value)]
            case _:
                words += [f"--{key}", str(value)]
    return words, notes


def without_unheard(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of the file reaches vLLM, and notes on what its author may miss: `vllm serve` passes
    `no-NAME: true` on, and of `NAME: false` nothing."""
    unheard = [key for key, value in document.items() if value is False and _is_switch(key)]
    notes = [
        f"{key}: false in a vLLM config file does not reach vLLM, which keeps its default (write "
        f"no-{key.replace('_', '-')}: true to switch it off)"
        for key in unheard
        if option_name(key) in NOT_OFF_BY_DEFAULT
    ]
    return {key: value for key, value in document.items() if key not in unheard}, notes


def _is_switch(key: object) -> bool:
    return isinstance(key, str) and option_name(key) in SWITCHES


def refuse(
    text: str, *, option: str | None = None, value: object = None, hint: str | None = None
) -> NoReturn:
    """Raise the `ConfigError` that names the command line."""
    raise ConfigError(f"{SOURCE}: {text}", field=option, value=value, hint=hint)
