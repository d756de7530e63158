"""A `vllm serve MODEL --option value …` command line, read as vLLM's parser reads it, without vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NoReturn

from neffbuild.config import vllm_options
from neffbuild.config.documents import parse_json_text, read_document
from neffbuild.config.errors import ConfigError
from neffbuild.config.values import human_readable_integer, scalar, shown

SOURCE = "the vllm command line"

_NEGATIVE_NUMBER = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")
_USAGE = "write it as `vllm serve MODEL --option value …`"


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """What a command line says. `options` by underscore name; values are what the words spell, JSON
    options still text. `notes` is what its author may not expect."""

    options: dict[str, Any]
    notes: tuple[str, ...]


def parse_vllm_command(words: Sequence[str]) -> VllmCommand:
    """Parse `vllm serve …` (or `python -m vllm.entrypoints.… …`), given as argv words.

    As in vLLM: dashes or underscores; `--option value` or `--option=value`; `--switch` and
    `--no-switch`; JSON options whole or part by part (`--name.part value`, `--name.list+ a,b`);
    `-tp` and the other short options; unique beginnings of names; `--config file.yaml`, whose
    options the command line overrides; of a repeated option the last counts. An option vLLM does not
    know takes the next word as its value unless that is an option, and is kept.

    Raises `ConfigError` for what vLLM would refuse or ignore.
    """
    arguments = _after_serve(words)
    arguments, from_file, notes = _config_file(arguments)
    reading = _Reading(dict(from_file), notes=notes)
    reading.read(arguments)
    options = reading.options
    if reading.model is not None:
        if options.get("model") not in (None, from_file.get("model"), reading.model):
            _refuse(
                f"two models are given, {reading.model!r} and --model {options['model']!r}",
                option="--model",
                value=options["model"],
                hint="keep one of the two",
            )
        options["model"] = reading.model
    if options.get("model") in (None, ""):
        _refuse("no model is given", hint=f"{_USAGE}; an unknown option takes the word after it")
    return VllmCommand(options, tuple(reading.notes))


def _after_serve(words: Sequence[str]) -> list[str]:
    rest = list(words)
    if len(rest) >= 3 and PurePath(rest[0]).name.startswith("python") and rest[1] == "-m":
        if not rest[2].startswith("vllm."):
            _refuse(f"{' '.join(rest[:3])} does not start vLLM", value=rest[2], hint=_USAGE)
        rest = rest[3:]
        return rest[1:] if rest[:1] == ["serve"] else rest
    if rest and PurePath(rest[0]).name == "vllm":
        rest = rest[1:]
    if rest[:1] != ["serve"]:
        _refuse("this is not a `vllm serve` command line", value=" ".join(words[:3]), hint=_USAGE)
    return rest[1:]


def _config_file(arguments: list[str]) -> tuple[list[str], dict[str, Any], list[str]]:
    """The words without `--config FILE`, that file's options, and notes on them."""
    written_on = next((word for word in arguments if word.startswith("--config=")), None)
    if written_on is not None:
        _refuse(
            f"vLLM does not read the file of {written_on!r}",
            option="--config",
            value=written_on,
            hint=f"write it as two words: --config {written_on.removeprefix('--config=')}",
        )
    if "--config" not in arguments:
        return arguments, {}, []
    if arguments.count("--config") > 1:
        _refuse("--config is given more than once; vLLM reads one file", option="--config")
    index = arguments.index("--config")
    if index + 1 == len(arguments):
        _refuse("--config needs a file name", option="--config")
    path = Path(arguments[index + 1])
    if path.suffix not in (".yaml", ".yml"):
        _refuse(
            f"--config {path}: vLLM reads .yaml and .yml files only",
            option="--config",
            value=str(path),
        )
    document = read_document(path)
    try:
        options = vllm_options.option_names(document, "")
    except ConfigError as error:
        _refuse(error.message, option="--config", value=str(path), hint=error.hint)
    notes = vllm_options.unheard_switches(document)
    return arguments[:index] + arguments[index + 2 :], options, notes


@dataclass(slots=True)
class _Reading:
    options: dict[str, Any]
    model: str | None = None
    notes: list[str] = field(default_factory=list)
    _parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, arguments: Sequence[str]) -> None:
        words = list(arguments)
        while words:
            word = words.pop(0)
            if word == "--":
                for rest in words:
                    self._positional(rest)
                break
            if not _is_option(word):
                self._positional(word)
            elif word.startswith("-O") and not word.startswith("--"):
                self._optimization_level(word, words)
            elif "." in word.partition("=")[0]:
                self._part(word, words)
            else:
                self._option(word, words)
        self._join_parts()

    def _positional(self, word: str) -> None:
        if self.model is not None:
            _refuse(
                f"unexpected word {word!r}: the model is already {self.model!r}",
                value=word,
                hint="quote values that hold spaces",
            )
        self.model = word

    def _optimization_level(self, word: str, rest: list[str]) -> None:
        level = word[2:].removeprefix("=")
        if not level:
            if not rest or rest[0] not in ("0", "1", "2", "3"):
                _refuse("-O needs a level; allowed: 0, 1, 2, 3", option="-O")
            level = rest.pop(0)
        self.options["optimization_level"] = scalar(level)

    def _option(self, word: str, rest: list[str]) -> None:
        spelled, equals, attached = word.partition("=")
        if not equals and not spelled.startswith("--") and spelled not in vllm_options.SHORT:
            # One-letter options may have their value written on: `-qawq`.
            spelled, attached = spelled[:2], spelled[2:]
        name = self._name(spelled)
        given = attached if equals or attached else None
        if name in vllm_options.SWITCHES or name.removeprefix("no_") in vllm_options.SWITCHES:
            if given is not None:
                _refuse(
                    f"{spelled} takes no value, got {given!r}",
                    option=spelled,
                    value=given,
                    hint="write --name to switch on, --no-name to switch off",
                )
            self.options[name.removeprefix("no_")] = name in vllm_options.SWITCHES
        elif name in vllm_options.LISTS:
            values = [given] if given is not None else list(_values(rest))
            if not values:
                _refuse(f"{spelled} needs at least one value", option=spelled)
            self.options[name] = [scalar(value) for value in values]
        elif name in vllm_options.NAMES - vllm_options.OPTIONAL_VALUE:
            if given is None:
                given = next(_values(rest), None)
            if given is None:
                _refuse(f"{spelled} needs a value", option=spelled)
            self._value(name, given)
        else:
            self._optional_value(name, given if given is not None else next(_values(rest), None))

    def _value(self, name: str, text: str) -> None:
        if name in vllm_options.REPEATED:
            self.options[name] = [*self.options.get(name, []), text]
        elif name in vllm_options.JSON:
            self.options[name] = text
        else:
            self.options[name] = scalar(text)

    def _optional_value(self, name: str, text: str | None) -> None:
        if text is not None:
            self.options[name] = scalar(text)
        elif name.startswith("no_"):
            self.options[name[3:]] = False
        else:
            self.options[name] = True

    def _part(self, word: str, rest: list[str]) -> None:
        """`--name.key.key VALUE`, `--name.key+ VALUE,VALUE`."""
        path, equals, text = word.partition("=")
        if not equals:
            # vLLM takes the next word whatever it looks like.
            if not rest:
                _refuse(f"{path} needs a value", option=path)
            text = rest.pop(0)
        spelled, *keys = path.removesuffix("+").split(".")
        spelled = spelled.replace("_", "-")
        value: Any = text.split(",") if path.endswith("+") else _part_value(path, text)
        for key in reversed(keys):
            value = {key: value}
        vllm_options.merge_parts(self._parts.setdefault(spelled, {}), value)

    def _join_parts(self) -> None:
        for spelled, value in self._parts.items():
            name = self._name(spelled)
            if name in vllm_options.NAMES - vllm_options.JSON:
                _refuse(
                    f"{spelled} is a plain value and has no parts",
                    option=spelled,
                    value=value,
                    hint=f"write {spelled} VALUE",
                )
            if name in self.options:
                self.notes.append(
                    f"{spelled}.… replaces the whole of {_dashed(name)}, as vLLM does; what was given "
                    "for it elsewhere is not used"
                )
            self.options[name] = value

    def _name(self, spelled: str) -> str:
        if not spelled.startswith("--"):
            if spelled not in vllm_options.SHORT:
                _refuse(
                    f"unknown short option {spelled!r}; allowed: "
                    + ", ".join(["-O", *sorted(vllm_options.SHORT)]),
                    option=spelled,
                )
            return vllm_options.SHORT[spelled]
        name = vllm_options.option_name(spelled[2:])
        if name in vllm_options.NAMES or name.removeprefix("no_") in vllm_options.SWITCHES:
            return name
        meant = vllm_options.full_names(name)
        if len({vllm_options.ALIASES.get(full, full) for full in meant}) > 1:
            _refuse(
                f"{spelled} is short for several options: {', '.join(map(_dashed, meant))}",
                option=spelled,
                hint="write the name in full",
            )
        if meant:
            self.notes.append(f"{spelled} is read as {_dashed(meant[0])}, the only option so begun")
            return vllm_options.ALIASES.get(meant[0], meant[0])
        return name


def _is_option(word: str) -> bool:
    """argparse's rule: a dash makes an option, except of a negative number or a phrase."""
    if len(word) < 2 or word[0] != "-":
        return False
    return not _NEGATIVE_NUMBER.fullmatch(word) and " " not in word.partition("=")[0]


def _values(rest: list[str]) -> Iterator[str]:
    """The words of `rest` up to the next option, taken off it one by one."""
    while rest and not _is_option(rest[0]):
        yield rest.pop(0)


def _part_value(path: str, text: str) -> Any:
    try:
        return parse_json_text(text)
    except json.JSONDecodeError:
        number = human_readable_integer(text)
        return text if number is None else number
    except ValueError as error:
        _refuse(f"{path} is {shown(text)}: {error}", option=path, value=text)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse(
    text: str, *, option: str | None = None, value: object = None, hint: str | None = None
) -> NoReturn:
    raise ConfigError(f"{SOURCE}: {text}", field=option, value=value, hint=hint)
