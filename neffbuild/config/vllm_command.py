"""A `vllm serve MODEL --option value …` command line, read as vLLM's parser reads it, without vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from neffbuild.config import vllm_options
from neffbuild.config.documents import parse_json_text
from neffbuild.config.values import human_readable_integer, scalar, shown
from neffbuild.config.vllm_file import as_words, refuse, without_config_file

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
    arguments, file = without_config_file(_after_serve(words))
    reading = _Reading()
    if file is not None:
        _require_model_in_front(arguments, file)
        words_of_file, reading.notes = as_words(file)
        reading.read(words_of_file)
        if reading.model is not None:
            refuse(
                f"its --config file leaves the word {reading.model!r} over",
                option="--config",
                value=reading.model,
                hint="an option there has more values than it takes, or is a switch with a value",
            )
    of_file = reading.options.get("model")
    reading.read(arguments)
    reading.join_parts()
    options = reading.options
    if reading.model is not None:
        if options.get("model") not in (None, of_file, reading.model):
            refuse(
                f"two models are given, {reading.model!r} and --model {options['model']!r}",
                option="--model",
                value=options["model"],
                hint="keep one of the two",
            )
        options["model"] = reading.model
    if options.get("model") in (None, ""):
        refuse("no model is given", hint=f"{_USAGE}; an unknown option takes the word after it")
    return VllmCommand(options, tuple(reading.notes))


def _after_serve(words: Sequence[str]) -> list[str]:
    rest = list(words)
    if len(rest) >= 3 and PurePath(rest[0]).name.startswith("python") and rest[1] == "-m":
        if not rest[2].startswith("vllm."):
            refuse(f"{' '.join(rest[:3])} does not start vLLM", value=rest[2], hint=_USAGE)
        rest = rest[3:]
        return rest[1:] if rest[:1] == ["serve"] else rest
    if rest and PurePath(rest[0]).name == "vllm":
        rest = rest[1:]
    if rest[:1] != ["serve"]:
        refuse("this is not a `vllm serve` command line", value=" ".join(words[:3]), hint=_USAGE)
    return rest[1:]


def _require_model_in_front(arguments: Sequence[str], file: Mapping[str, Any]) -> None:
    """Beside `--config`, vLLM looks for the model in the file, after `--model` and in front, nowhere
    else."""
    named = "model" in file or any(word.partition("=")[0] == "--model" for word in arguments)
    if not named and (not arguments or arguments[0].startswith("-")):
        refuse(
            "with --config, vLLM finds no model unless it stands right after `serve` or in the file",
            option="--config",
            hint="write it as `vllm serve MODEL --config FILE --option value …`",
        )


@dataclass(slots=True)
class _Reading:
    """Of words read so far: options, the word that stands alone, notes, and parts not yet joined."""

    options: dict[str, Any] = field(default_factory=dict)
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

    def _positional(self, word: str) -> None:
        if self.model is not None:
            refuse(
                f"unexpected word {word!r}: the model is already {self.model!r}",
                value=word,
                hint="quote values that hold spaces",
            )
        self.model = word

    def _optimization_level(self, word: str, rest: list[str]) -> None:
        level = word[2:].removeprefix("=")
        if not level:
            if not rest or rest[0] not in ("0", "1", "2", "3"):
                refuse("-O needs a level; allowed: 0, 1, 2, 3", option="-O")
            level = rest.pop(0)
        self.options["optimization_level"] = scalar(level)

    def _option(self, word: str, rest: list[str]) -> None:
        spelled, equals, attached = word.partition("=")
        if not equals and spelled[:2] in vllm_options.SHORT and spelled not in vllm_options.SHORT:
            # One-letter options may have their value written on: `-qawq`.
            spelled, attached = spelled[:2], spelled[2:]
        name = self._name(spelled)
        given = attached if equals or attached else None
        if name in vllm_options.SWITCHES or name.removeprefix("no_") in vllm_options.SWITCHES:
            if given is not None:
                refuse(
                    f"{spelled} takes no value, got {given!r}",
                    option=spelled,
                    value=given,
                    hint="write --name to switch on, --no-name to switch off",
                )
            self.options[name.removeprefix("no_")] = name in vllm_options.SWITCHES
        elif name == "help":
            refuse("--help prints help and starts nothing", option=spelled, hint="leave it out")
        elif name in vllm_options.LISTS:
            values = [given] if given is not None else list(_values(rest))
            if not values:
                refuse(f"{spelled} needs at least one value", option=spelled)
            self.options[name] = [scalar(value) for value in values]
        elif name in vllm_options.NAMES - vllm_options.OPTIONAL_VALUE:
            if given is None:
                given = next(_values(rest), None)
            if given is None:
                refuse(f"{spelled} needs a value", option=spelled)
            self._value(name, given)
        else:
            self._optional_value(name, given if given is not None else next(_values(rest), None))

    def _value(self, name: str, text: str) -> None:
        if text in ("", "None") and name in vllm_options.NEVER_NONE:
            refuse(
                f"{_dashed(name)} is {text!r}, which vLLM refuses",
                option=_dashed(name),
                value=text,
                hint="leave the option out for its default",
            )
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
                refuse(f"{path} needs a value", option=path)
            text = rest.pop(0)
        spelled, *keys = path.removesuffix("+").split(".")
        spelled = spelled.replace("_", "-")
        value: Any = text.split(",") if path.endswith("+") else _part_value(path, text)
        for key in reversed(keys):
            value = {key: value}
        vllm_options.merge_parts(self._parts.setdefault(spelled, {}), value)

    def join_parts(self) -> None:
        for spelled, value in self._parts.items():
            name = self._name(spelled)
            if name in vllm_options.NAMES - vllm_options.JSON:
                refuse(
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
            return self._short_name(spelled)
        name = vllm_options.option_name(spelled[2:])
        if name in vllm_options.NAMES or name in vllm_options.NEGATIONS:
            return name
        meant = vllm_options.full_names(name)
        if len({vllm_options.ALIASES.get(full, full) for full in meant}) > 1:
            refuse(
                f"{spelled} is short for several options: {', '.join(map(_dashed, meant))}",
                option=spelled,
                hint="write the name in full",
            )
        if meant:
            self.notes.append(f"{spelled} is read as {_dashed(meant[0])}, the only option so begun")
            return vllm_options.ALIASES.get(meant[0], meant[0])
        if name.removeprefix("no_") in vllm_options.SWITCHES:
            switch = _dashed(name.removeprefix("no_"))
            refuse(f"vLLM has no {spelled}", option=spelled, hint=f"leave {switch} out")
        return name

    def _short_name(self, spelled: str) -> str:
        if spelled in vllm_options.SHORT:
            return vllm_options.SHORT[spelled]
        meant = [short for short in vllm_options.SHORT if short.startswith(spelled)]
        if len(meant) != 1:
            what = "short for several options" if meant else "unknown short option"
            refuse(
                f"{what} {spelled!r}; allowed: "
                + ", ".join(sorted(meant) or ["-O", *sorted(vllm_options.SHORT)]),
                option=spelled,
            )
        self.notes.append(f"{spelled} is read as {meant[0]}, the only option so begun")
        return vllm_options.SHORT[meant[0]]


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
        refuse(f"{path} is {shown(text)}: {error}", option=path, value=text)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
