"""How wide the block tables of sliding-window layers are, and what their programs read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grid_samples import UNIFORM, build_config

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig
from neffbuild.grid.bucketer import Bucketer, QueryLenSupport
from neffbuild.grid.kv_blocks import kv_bytes_per_position, kv_traffic
from neffbuild.grid.shapes import DecodeShape, Family
from neffbuild.grid.windows import KVLayers, extra_positions, tile_columns

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXED = SIZES | {
    "sliding_window": 1024,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}


def windowed(architecture=MIXED, *, support=QueryLenSupport.VARLEN, draft=None, **options):
    config = replace(build_config(**options), model=ModelConfig("target", architecture))
    if draft is not None:
        config = replace(config, draft_model=ModelConfig("draft", draft))
    return Bucketer.from_config(config, query_len_support=support), config


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 8}, (8,) * 4),
        ({"sliding_window": (1 << 63) - 1}, ((1 << 63) - 1,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        ({"sliding_window": 8, "max_window_layers": 28}, (None,) * 4),
        (MIXED, (None, 1024, 1024, 1024)),
        (MIXED | {"layer_types": MIXED["layer_types"] * 2}, (None, 1024, 1024, 1024)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)  # fmt: skip
def test_which_layers_have_a_window(fields, windows):
    assert ModelConfig("m", SIZES | fields).layer_windows == windows


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(
            ({"sliding_window": value}, "sliding_window")
            for value in (0, -1, True, 4096.0, 1e30, "4096", [4096], 1 << 63, 10**4000)
        ),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"layer_types": MIXED["layer_types"], "use_sliding_window": False}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"sliding_window": 8, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_windows_that_are_not_stated_as_they_should_be_are_refused(fields, field):
    with pytest.raises(ConfigError, match=rf"config\.json of model m: .*{field}") as refused:
        _ = ModelConfig("m", SIZES | fields).layer_windows
    assert refused.value.field == field


def test_the_table_is_as_wide_as_the_window_and_never_wider_than_the_context():
    subject, _ = windowed(contexts=(1024, 4096), max_model_len=8192, block_size=16)
    widths = {
        context: subject.window_table_width(DecodeShape(Family.TARGET, 1, 1, context))
        for context in (1024, 4096, 8192)
    }
    assert widths == {1024: 64, 4096: 65, 8192: 65}
    plain, _ = windowed(SIZES)
    assert plain.window_table_width(DecodeShape(Family.TARGET, 1, 1, 4096)) is None


@pytest.mark.parametrize("support", QueryLenSupport)
def test_speculation_widens_the_table_by_what_a_step_goes_on_for(support):
    """d positions in the target, K - 1 more in the draft; counted position by position."""
    spec_tokens = 3
    subject, _ = windowed(
        draft=MIXED, support=support, spec_tokens=spec_tokens, block_size=1,
        verify=(2, 4) if support is UNIFORM else None,
    )  # fmt: skip
    for family in subject.families:
        for query_len in subject.decode[family].query_len.rungs:
            shape = DecodeShape(family, 1, query_len, 131072)
            computed = list(range(5000, 5000 + query_len))
            if family is Family.DRAFT:
                computed += [computed[-1] + 1 + index for index in range(spec_tokens - 1)]
            read = {q for p in computed for q in range(p - 1024 + 1, p + 1)}
            assert subject.window_table_width(shape) == len(read)
            assert extra_positions(shape, spec_tokens) == computed[-1] - computed[0]


def test_a_draft_without_windows_beside_a_target_with_them():
    subject, _ = windowed(draft=SIZES, spec_tokens=3)
    assert subject.window_table_width(DecodeShape(Family.DRAFT, 1, 4, 4096)) is None
    assert subject.window_table_width(DecodeShape(Family.TARGET_WITH_SPEC, 1, 4, 4096)) == 10


@pytest.mark.parametrize(
    ("window", "block_size", "columns"), [(1024, 128, 9), (1024, 32, 36), (128, 16, 16), (100, 256, 1)]
)  # fmt: skip
def test_the_width_of_vllm_neuron(window, block_size, columns):
    """min(round_up(window // block + 1, 128 // block), full), speculation or not."""
    assert tile_columns(window, 0, block_size) == tile_columns(window, 9, block_size) == columns


def test_context_parallelism_narrows_the_bound_and_not_the_window():
    subject, _ = windowed(
        contexts=(2048, 16384), max_model_len=131072, block_size=128,
        decode_context_parallel_size=4,
    )  # fmt: skip
    assert subject.window_table_width(DecodeShape(Family.TARGET, 1, 1, 16384)) == 9
    assert subject.window_table_width(DecodeShape(Family.TARGET, 1, 1, 2048)) == 4


def test_layers_are_counted_by_what_they_read():
    assert KVLayers.of(ModelConfig("m", MIXED)) == KVLayers(1, 3, 1024)
    assert KVLayers.of(ModelConfig("m", {})) == KVLayers.of(None) == KVLayers(1, 0, None)
    full = SIZES | {"sliding_window": 8, "layer_types": ["full_attention"] * 4}
    assert KVLayers.of(ModelConfig("m", full)) == KVLayers()


def test_bytes_of_windowed_layers_are_those_of_their_own_tables():
    subject, config = windowed(contexts=(4096,), max_model_len=16384, dtype="bfloat16")
    shape = subject.decode_shape(Family.TARGET, num_seqs=3, context_need=4000)
    assert shape.num_seqs == 4
    traffic = kv_traffic(subject, shape, [3999, 99, 899])
    entry = 2 * 2 * 16 * 2  # keys and values, heads, their size, bytes
    assert kv_bytes_per_position(config.serve, config.model) == entry
    assert traffic.read == 4 * (4096 + 3 * 9 * 128)
    assert traffic.full_length == 4 * (16384 + 3 * 9 * 128)
    assert traffic.needed == 4000 + 100 + 900 + 3 * (1024 + 100 + 900)


def test_a_model_without_windows_is_counted_as_ever():
    subject, config = windowed(SIZES, contexts=(4096,), dtype="bfloat16")
    shape = subject.decode_shape(Family.TARGET, num_seqs=1, context_need=4000)
    assert kv_traffic(subject, shape, [3999]).read == 4096
    assert kv_bytes_per_position(config.serve, config.model) == 4 * 2 * 2 * 16 * 2
