"""A file that would be read differently than it looks is refused, naming the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_workspace import SERVE, Workspace

from neffbuild.config.errors import ConfigError
from neffbuild.config.load import load_config


def refusal(path: Path, content: str | bytes) -> ConfigError:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("serve:\n  model: a\n  model: b\n", "line 3, column 3: the key 'model' is given twice"),
        ("serve:\n\tmodel: a\n", "line 2, column 1"),
        ("serve: {model: a\n", "line 2"),
        ("serve: *nowhere\n", "line 1"),
        ("a: &a\n  b: *a\n", "an alias refers to the value it is part of"),
        ("--- {}\n--- {}\n", "line 2"),
        ("serve: \x01\n", "not valid YAML"),
        ("serve: " + "[" * 200 + "]" * 200, "nested deeper than 64 levels"),
        ("serve: " + "[" * 5_000, "nested deeper than 64 levels"),
        ("serve: " + "9" * 5000, "integer string conversion"),
        ("- a\n- b\n", "a list; allowed: a mapping"),
        ("just words\n", "a text; allowed: a mapping"),
        ("", "is empty"),
        ("# nothing but a comment\n", "is empty"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, needle: str) -> None:
    assert needle in refusal(tmp_path / "c.yaml", text).message


def test_tabs_have_a_hint(tmp_path: Path) -> None:
    error = refusal(tmp_path / "c.yaml", "serve:\n\tmodel: a\n")
    assert error.hint is not None
    assert "spaces" in error.hint


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    error = refusal(tmp_path / "c.yaml", "\n".join(lines))
    assert "expands to more than 100000 values" in error.message


def test_aliases_that_nest_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 400))]
    assert "nested deeper" in refusal(tmp_path / "c.yaml", "\n".join(lines)).message


def test_a_merge_key_may_be_overridden(workspace: Workspace) -> None:
    workspace.file.write_text(
        "serve:\n"
        "  <<: &common {model: model, max_model_len: 1024, max_num_seqs: 2}\n"
        "  max_num_seqs: 4\n"
        "  block_size: 32\n"
    )
    serve = load_config(workspace.file).serve
    assert (serve.max_model_len, serve.max_num_seqs) == (1024, 4)


def test_a_date_stays_a_text(workspace: Workspace) -> None:
    serve = workspace.load({"model": "model"}).serve
    workspace.file.write_text(workspace.file.read_text() + "  code_revision: 2026-01-02\n")
    assert load_config(workspace.file).serve.model_extra == {
        **(serve.model_extra or {}),
        "code_revision": "2026-01-02",
    }


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('{"serve": {"model": "a", "model": "b"}}', "the key 'model' is given twice"),
        ('{"serve": {"model": "a",}}', "line 1, column"),
        ('{"serve":\n nope}', "line 2, column 2"),
        ('{"serve": {"model": NaN}}', "NaN"),
        ('{"serve": ' + "[" * 100_000, "nested deeper than 64 levels"),
        ('{"serve": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64 levels"),
        ("", "is empty"),
        ("[]", "a list; allowed: a mapping"),
    ],
)
def test_malformed_json(tmp_path: Path, text: str, needle: str) -> None:
    assert needle in refusal(tmp_path / "c.json", text).message


def test_json_and_yaml_mean_the_same(workspace: Workspace) -> None:
    from_yaml = workspace.load()
    file = workspace.root / "config.json"
    file.write_text(json.dumps({"serve": SERVE}))
    assert load_config(file).serve == from_yaml.serve


def test_a_byte_order_mark_is_no_content(workspace: Workspace) -> None:
    expected = workspace.load().serve
    workspace.file.write_bytes(b"\xef\xbb\xbf" + workspace.file.read_bytes())
    assert load_config(workspace.file).serve == expected


@pytest.mark.parametrize(
    "content", ["serve: {model: é}".encode("latin-1"), "serve: {}".encode("utf-16")]
)
def test_another_encoding_is_refused(tmp_path: Path, content: bytes) -> None:
    error = refusal(tmp_path / "c.yaml", content)
    assert "not UTF-8" in error.message
    assert error.hint == "save the file as UTF-8"


def test_a_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse; reading it would not end
    with pytest.raises(ConfigError, match="too many for a config file"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", 'serve: {model: model, served_model_name: "\\ud83d"}'),
        ("c.yaml", 'serve: {model: model, "\\ud83d": 1}'),
        ("c.json", '{"serve": {"model": "model", "served_model_name": "\\ud83d"}}'),
    ],
)
def test_half_a_character_is_refused(tmp_path: Path, name: str, text: str) -> None:
    assert "half a character" in refusal(tmp_path / name, text).message


def test_the_halves_of_a_character_are_joined(workspace: Workspace) -> None:
    workspace.load()
    text = workspace.file.read_text()
    workspace.file.write_text(text + '  override_label: "\\ud83d\\udca5"\n')
    extra = load_config(workspace.file).serve.model_extra or {}
    assert extra["override_label"] == "\N{COLLISION SYMBOL}"


def test_a_device_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="too many for a config file"):
        load_config(Path("/dev/zero"))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory, not a config file"):
        load_config(tmp_path)


def test_a_path_no_file_system_takes() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Path("a\0b.yaml"))
