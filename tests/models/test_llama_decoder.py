"""The reference decoder against `transformers`, and the rules of its paged cache."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import LLAMA3_ROPE, Batch, tiny_config, twins

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.llama import PAD_TOKEN_ID, LlamaDecoder


def greedy_reference(model, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return generated[0].tolist()


VARIANTS = {
    "llama3 rope, grouped queries": {},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head_dim": {"head_dim": 32},
    "one kv head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_greedy_tokens_equal_transformers(changes, record_property):
    theirs, ours = twins(tiny_config(**changes))
    prompts = [[3], [5, 250, 9, 77], list(range(20, 60))]
    count = 70
    expected = [greedy_reference(theirs, prompt, count) for prompt in prompts]
    batch = Batch(ours, rows=3, context_len=128)
    sequences = [list(prompt) for prompt in prompts]
    smallest_gap = float("inf")
    # Rows join with prompts of different lengths: the short ones generate while the long one prefills.
    for step in range(max(map(len, prompts)) + count - 1):
        fed = [
            [tokens[step]] if step < len(target) - 1 else []
            for tokens, target in zip(sequences, expected, strict=True)
        ]
        next_ids, logits = batch.step(fed, [step] * 3, 1)
        for row, tokens in enumerate(sequences):
            if fed[row] and step == len(tokens) - 1:
                tokens.append(int(next_ids[row, 0]))
                best = logits[row, 0].topk(2).values
                smallest_gap = min(smallest_gap, float(best[0] - best[1]))
    assert sequences == expected
    distinct = {token for tokens in expected for token in tokens}
    record_property("distinct_tokens", len(distinct))
    record_property("smallest_top_2_gap", smallest_gap)
    assert len(distinct) > 60


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": None}], ids=["llama3", "plain"])
def test_logits_of_a_wide_step_equal_transformers(changes):
    theirs, ours = twins(tiny_config(**changes))
    tokens = torch.randint(0, 256, (100,)).tolist()
    _, logits = Batch(ours, rows=1, context_len=112).step([tokens], [0], len(tokens))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_auxiliary_hidden_states_are_the_inputs_of_their_layers():
    theirs, _ = twins(tiny_config())
    ours = LlamaDecoder(
        LlamaArchitecture.from_config(tiny_config().to_dict()), torch.float32, (0, 1, 1)
    )
    ours.load_state_dict(theirs.state_dict())
    assert ours.output_names == ("next_token_ids", "logits", "auxiliary_hidden_states")
    _, _, states = Batch(ours, rows=1, context_len=16).step([[4, 8, 2]], [0], 3)
    with torch.inference_mode():
        expected = theirs(torch.tensor([[4, 8, 2]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(states, torch.cat([expected[0], expected[1], expected[1]], dim=-1))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_ragged_step_equals_its_rows_alone(data):
    """VARLEN: any mix of query lengths 0 … Q in one program, whatever the padding holds."""
    _, ours = twins(tiny_config())
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    prefixes = data.draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    tokens = [
        torch.randint(0, 256, (prefix + length,)).tolist()
        for prefix, length in zip(prefixes, lengths, strict=True)
    ]
    before = [row[:prefix] for row, prefix in zip(tokens, prefixes, strict=True)]
    after = [row[prefix:] for row, prefix in zip(tokens, prefixes, strict=True)]
    batch = Batch(ours, rows, context_len=48)
    batch.step(before, [0] * rows, max(prefixes) or 1)
    next_ids, logits = batch.step(after, prefixes, width)

    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        assert (next_ids[row, length:] == PAD_TOKEN_ID).all()
        if not length:
            continue
        alone = Batch(ours, 1, context_len=48)
        _, expected = alone.step([tokens[row]], [0], prefix + length)
        torch.testing.assert_close(logits[row, :length], expected[0, prefix:], rtol=1e-4, atol=1e-4)
        assert (next_ids[row, :length] == logits[row, :length].argmax(-1)).all()
        torch.testing.assert_close(
            batch.keys_of(row, prefix + length), alone.keys_of(0, prefix + length)
        )
    assert not batch.kv_caches[0][0][0].any(), "pad tokens must leave the null block zero"


def test_a_step_writes_its_own_slots_and_no_others():
    _, ours = twins(tiny_config())
    batch = Batch(ours, rows=2, context_len=32, num_blocks=40)
    for keys, values in batch.kv_caches:
        keys.fill_(9.0)
        values.fill_(9.0)
    batch.step([[1, 2, 3], [4]], [14, 20], 3)
    written = {batch.slot(0, 14), batch.slot(0, 15), batch.slot(0, 16), batch.slot(1, 20), 0}
    for cache in batch.kv_caches:
        for tensor in cache:
            changed = (tensor.flatten(0, 1) != 9.0).any(-1).any(-1).nonzero().flatten().tolist()
            assert set(changed) == written


def test_only_the_context_of_the_table_is_read():
    """What lies beyond a row's position, in its last block and in other blocks, has no influence."""
    _, ours = twins(tiny_config())
    torch.manual_seed(1)
    batch = Batch(ours, rows=1, context_len=32, num_blocks=9)
    _, expected = batch.step([[1, 2, 3, 4]], [0], 4)
    own = batch.block_table[0, 0]
    for cache in batch.kv_caches:
        for tensor in cache:
            others = [block for block in range(1, 9) if block != own]
            tensor[others] = 1e4
            tensor[own, 4:] = 1e4
    _, logits = batch.step([[4]], [3], 1)
    torch.testing.assert_close(logits[0, 0], expected[0, 3], rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close_to_float32():
    _, exact = twins(tiny_config(initializer_range=0.05))
    rounded = LlamaDecoder(exact.architecture, torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    tokens = list(range(30))
    _, expected = Batch(exact, 1, 32).step([tokens], [0], 30)
    batch = Batch(rounded, 1, 32)
    batch.kv_caches = [(k.bfloat16(), v.bfloat16()) for k, v in batch.kv_caches]
    _, logits = batch.step([tokens], [0], 30)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.1)


def test_rope_is_read_from_either_spelling():
    old = tiny_config().to_dict()
    del old["rope_parameters"]
    old["rope_theta"] = LLAMA3_ROPE["rope_theta"]
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    new = LlamaArchitecture.from_config(tiny_config().to_dict())
    assert LlamaArchitecture.from_config(old | {"rope_scaling": scaling}) == new
    legacy = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert LlamaArchitecture.from_config(old | {"rope_scaling": legacy}) == new
    assert new.rope_scaling is not None
    assert new.rope_theta == 500000.0


REFUSED = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "gelu",
    "quantization_config": {"quant_method": "fp8"},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 3,
    "vocab_size": "256",
    "num_hidden_layers": True,
    "rms_norm_eps": 0,
    "attention_bias": "yes",
    "head_dim": 7,
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_a_model_that_is_not_computed_is_refused_by_name(field, value):
    with pytest.raises(ConfigError) as refused:
        LlamaArchitecture.from_config(tiny_config().to_dict() | {field: value})
    assert field.removesuffix("_parameters") in refused.value.field
    assert refused.value.hint


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_missing_number_is_refused_by_name(field):
    config = tiny_config().to_dict()
    del config[field]
    with pytest.raises(ConfigError, match=f"{field} of the model's config.json is missing"):
        LlamaArchitecture.from_config(config)


def test_an_auxiliary_layer_the_model_does_not_have_is_refused():
    architecture = LlamaArchitecture.from_config(tiny_config().to_dict())
    with pytest.raises(ConfigError, match="layer 3 is outside the target's 2 layers"):
        LlamaDecoder(architecture, torch.float32, (0, 3))


def test_a_large_model_is_built_without_touching_its_weights():
    config = tiny_config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8)
    architecture = LlamaArchitecture.from_config(config.to_dict())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = LlamaDecoder(architecture, torch.float32)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights > 4 << 30
    assert grown << 10 < 200 << 20


def test_the_architecture_is_read_without_torch():
    code = (
        "import sys; from neffbuild.models.architecture import LlamaArchitecture; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
