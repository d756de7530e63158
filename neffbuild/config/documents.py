"""Reading one YAML or JSON file into plain data, and refusing what would be read differently than
it looks: duplicate keys, self-referring aliases, text in another encoding."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from neffbuild.config.errors import ConfigError

# Far above any real file of its kind, far below a weights file named by mistake.
_MAX_CONFIG_BYTES = 1 << 20
_MAX_MODEL_BYTES = 16 << 20
_MAX_VALUES = 100_000
_MAX_DEPTH = 64


def read_model_json(path: Path) -> dict[str, Any]:
    """The object in a model's `config.json`.

    As Hugging Face reads it: of a key given twice the last counts, and `Infinity` (a state-space
    model's time-step limit) is kept, as a text that canonical JSON can hold.
    """
    text = read_text(path, "a model's config.json", _MAX_MODEL_BYTES)
    try:
        value = json.loads(text, parse_constant=str)
        _refuse_half_characters(text, value)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}",
            value=str(path),
        ) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}", value=str(path)) from error
    if not isinstance(value, dict) or _depth_exceeds(value, _MAX_DEPTH):
        raise ConfigError(f"{path} is not a model's config.json: no JSON object", value=str(path))
    return value


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """The UTF-8 text of a file that should be `what` and have at most `max_bytes`.

    Raises `ConfigError`, naming the path and the reason, when it cannot be had.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory, not {what}", value=str(path))
        # Devices and pipes state no size and may never end.
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ConfigError(
                f"{path} has more than {max_bytes} bytes, too many for {what}",
                value=str(path),
            )
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path} ({what} was expected)", value=str(path)
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}", value=str(path)
        ) from error
    except ValueError as error:
        # Both a path no file system takes (a NUL byte) and bytes that are not UTF-8.
        reason = (
            f"byte {error.start} is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else str(error)
        )
        raise ConfigError(
            f"cannot read {path}: {reason}", value=str(path), hint="save the file as UTF-8"
        ) from error


def read_document(path: Path) -> dict[str, Any]:
    """The mapping that a YAML or JSON config file holds (JSON when its name ends in `.json`).

    Raises `ConfigError`, naming the line, for malformed text and for duplicate keys.
    """
    text = read_text(path, "a config file", _MAX_CONFIG_BYTES)
    document = (
        _parse_json(text, path) if path.suffix.lower() == ".json" else _parse_yaml(text, path)
    )
    if document is None:
        raise ConfigError(f"{path} is empty", hint="it needs at least `serve:` with a `model:`")
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds {_kind(document)}; allowed: a mapping of sections or of vLLM options"
        )
    return document


def parse_json_text(text: str) -> Any:
    """JSON as it stands in one option's value. Raises `ValueError` (one line) when malformed,
    a key is given twice, or it is nested deeper than 64 levels."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
        _refuse_half_characters(text, value)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels") from None
    if _depth_exceeds(value, _MAX_DEPTH):
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    return value


def _parse_json(text: str, path: Path) -> Any:
    if not text.strip():
        return None
    try:
        return parse_json_text(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice in one object")
    return result


def _refuse_half_characters(text: str, value: Any) -> None:
    """Raises `ValueError` for an escaped lone surrogate: it parses, and no file can hold the result."""
    if "\\u" in text:
        _whole_characters(json.dumps(value, ensure_ascii=False))


def _whole_characters(text: str) -> str:
    """`text` with the two halves of a character joined. Raises `ValueError` for half a character."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that a config can hold")


def _depth_exceeds(value: Any, levels: int) -> bool:
    if levels < 0:
        return True
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return any(_depth_exceeds(child, levels - 1) for child in children)


class _Loader(yaml.SafeLoader):
    """YAML's safe subset; a date stays the text that was written."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        try:
            return _whole_characters(value) if isinstance(value, str) else value
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # Before merge keys (`<<`) are flattened in: a key that overrides a merged one is no duplicate.
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice (first in line {lines[key.value]})",
                    problem_mark=key.start_mark,
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(text: str, path: Path) -> Any:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_extent(node, path)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{path}{place}: {_one_line(error.problem or error.context or 'not valid YAML')}",
            hint="indent with spaces, not tabs" if "\\t" in (error.problem or "") else None,
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(str(error))}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested deeper than {_MAX_DEPTH} levels") from None
    except (ValueError, TypeError, OverflowError) as error:
        # Constructors of scalars: a number with too many digits, a key that is no scalar.
        raise ConfigError(f"{path}: {_one_line(str(error))}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_extent(root: yaml.Node, path: Path) -> None:
    """Refuse a document whose aliases refer to themselves or expand without measure."""
    extents: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def extent(node: yaml.Node, depth: int) -> tuple[int, int]:
        """(values, levels) of a node with every alias written out."""
        if id(node) in extents:
            return extents[id(node)]
        line = node.start_mark.line + 1
        if id(node) in open_nodes:
            raise ConfigError(f"{path}, line {line}: an alias refers to the value it is part of")
        open_nodes.add(id(node))
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        within = [extent(child, depth + 1) for child in children] if depth < _MAX_DEPTH else []
        values = 1 + sum(values for values, _ in within)
        levels = 1 + max((levels for _, levels in within), default=0)
        if levels > _MAX_DEPTH or depth >= _MAX_DEPTH:
            raise ConfigError(f"{path}, line {line}: nested deeper than {_MAX_DEPTH} levels")
        if values > _MAX_VALUES:
            raise ConfigError(f"{path}, line {line}: expands to more than {_MAX_VALUES} values")
        open_nodes.remove(id(node))
        extents[id(node)] = (values, levels)
        return values, levels

    extent(root, 0)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
