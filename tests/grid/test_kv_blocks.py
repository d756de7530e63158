"""KV pool size and KV traffic."""

from __future__ import annotations

import pytest
from grid_samples import bucketer, build_config

from neffbuild.config.errors import ConfigError
from neffbuild.config.model import ModelConfig
from neffbuild.grid.kv_blocks import KVTraffic, kv_bytes_per_position, kv_traffic, num_kv_blocks
from neffbuild.grid.shapes import Family

LLAMA_8B = ModelConfig(
    "llama",
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
)


def test_the_pool_holds_every_sequence_at_full_length_and_the_null_block() -> None:
    serve = build_config(num_seqs=(1, 4), max_model_len=1000, block_size=128, contexts=None).serve
    assert num_kv_blocks(serve) == 4 * 8 + 1
    assert num_kv_blocks(serve.model_copy(update={"num_gpu_blocks_override": 77})) == 77


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"dtype": "bfloat16"}, 131072),
        ({"dtype": "float32"}, 262144),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 65536),
    ],
)
def test_bytes_per_position(options: dict[str, str], size: int) -> None:
    assert kv_bytes_per_position(build_config(**options).serve, LLAMA_8B) == size


def test_bytes_per_position_of_a_compressed_cache() -> None:
    latent = ModelConfig(
        "mla", {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    )
    assert kv_bytes_per_position(build_config(dtype="bfloat16").serve, latent) == 61 * 576 * 2


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="'turboquant'"):
        kv_bytes_per_position(build_config(kv_cache_dtype="turboquant").serve, LLAMA_8B)


def test_traffic_of_steps() -> None:
    subject = bucketer(num_seqs=(1, 2, 4), contexts=(4096,), max_model_len=131072)
    shape = subject.decode_shape(Family.TARGET, num_seqs=3, context_need=4000)
    step = kv_traffic(subject, shape, [3999, 99, 899])
    assert step == KVTraffic(read=4 * 4096, full_length=4 * 131072, needed=5000)
    assert step.amplification == pytest.approx(3.2768)
    assert step.amplification_full_length == pytest.approx(104.8576)
    assert step.plus(step) == KVTraffic(2 * 4 * 4096, 2 * 4 * 131072, 10000)
    assert KVTraffic().amplification == 0


def test_all_ranks_of_context_parallelism_read_the_context_together() -> None:
    subject = bucketer(
        contexts=(4096,), max_model_len=131072, block_size=64, decode_context_parallel_size=4
    )
    shape = subject.decode_shape(Family.TARGET, num_seqs=1, context_need=4000)
    assert kv_traffic(subject, shape, [3999]).read == 4096
