"""The reference decoder with sliding windows against `transformers`."""

from __future__ import annotations

import pytest
import torch
from test_llama_decoder import greedy_reference
from tiny_llama import tiny_config, twins
from tiny_windowed import LAYER_TYPES, MODELS, SIZES, WINDOW, WindowedRows, windowed_twins
from transformers import Qwen2Config, Qwen2ForCausalLM

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.llama import PAD_TOKEN_ID, LlamaDecoder


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers_as_the_window_slides(name, record_property):
    theirs, ours = windowed_twins(name)
    prompts, count = [[3], [5, 250, 9, 77], list(range(20, 60))], 80
    expected = [greedy_reference(theirs, prompt, count) for prompt in prompts]
    rows = WindowedRows(ours, rows=3, context_len=128, query_len=1)
    sequences = [list(prompt) for prompt in prompts]
    smallest_gap = float("inf")
    for step in range(max(map(len, prompts)) + count - 1):
        fed = [
            [tokens[step]] if step < len(target) - 1 else []
            for tokens, target in zip(sequences, expected, strict=True)
        ]
        next_ids, logits = rows.step(fed, [step if row else 0 for row in fed])
        for row, tokens in enumerate(sequences):
            if fed[row] and step == len(tokens) - 1:
                tokens.append(int(next_ids[row, 0]))
                best = logits[row, 0].topk(2).values
                smallest_gap = min(smallest_gap, float(best[0] - best[1]))
    assert sequences == expected
    record_property("smallest_top_2_gap", smallest_gap)
    assert len({token for tokens in expected for token in tokens}) > 40
    plain, _ = windowed_twins(name, sliding_window=400)
    unlike = [greedy_reference(plain, prompt, count) for prompt in prompts]
    assert unlike != expected, "the window makes no difference: the comparison proves little"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("start", [0, 1, WINDOW - 1, WINDOW, 31, 32, 47, 90])
def test_a_step_of_many_tokens_equals_transformers(name, start):
    """As with speculation: five queries whose windows begin at different positions, ragged rows beside
    them, one of them without tokens."""
    theirs, ours = windowed_twins(name)
    tokens = torch.randint(0, 256, (3, start + 5))
    rows = WindowedRows(ours, rows=3, context_len=112, query_len=5)
    lengths = [5, 2, 0]
    for before in range(0, start, 5):
        fed = [row[before : min(before + 5, start)].tolist() for row in tokens]
        rows.step(fed, [before] * 3)
    fed = [row[start : start + n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    next_ids, logits = rows.step(fed, [start] * 3)
    with torch.inference_mode():
        expected = theirs(tokens).logits
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            logits[row, :length], expected[row, start : start + length], rtol=1e-4, atol=1e-4
        )
        assert (next_ids[row, length:] == PAD_TOKEN_ID).all()
    assert not any(tensor[0].any() for cache in rows.kv_caches for tensor in cache)


def test_qwen_2_without_windows_is_a_llama_with_biases():
    torch.manual_seed(0)
    theirs = Qwen2ForCausalLM(Qwen2Config(architectures=["Qwen2ForCausalLM"], **SIZES)).eval()
    architecture = LlamaArchitecture.from_config(theirs.config.to_dict())
    assert (architecture.has_windows, architecture.kv_windows) == (False, (None,))
    ours = LlamaDecoder(architecture, torch.float32)
    ours.load_state_dict(theirs.state_dict())


def stated(**changes: object) -> dict[str, object]:
    return tiny_config().to_dict() | changes


def test_layers_are_grouped_by_their_windows():
    def windows(**changes: object) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        architecture = LlamaArchitecture.from_config(stated(num_hidden_layers=3, **changes))
        return architecture.layer_windows, architecture.kv_windows

    assert windows() == ((None, None, None), (None,))
    assert windows(sliding_window=9) == ((9, 9, 9), (9,))
    assert windows(sliding_window=9, layer_types=LAYER_TYPES) == ((9, None, 9), (None, 9))
    assert windows(sliding_window=9, max_window_layers=2) == ((None, None, 9), (None, 9))
    assert windows(sliding_window=9, use_sliding_window=False) == ((None, None, None), (None,))
    assert windows(sliding_window=9, layer_types=["full_attention"] * 3)[1] == (None,)


QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "model.layer_types"),
        ({"layer_types": ["sliding_attention"]}, "model.layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "model.sliding_window"),
        ({"sliding_window": "wide"}, "model.sliding_window"),
        ({"architectures": ["MistralForCausalLM"]}, "model.sliding_window"),
        ({"layer_types": [["full_attention"], {}]}, "model.layer_types"),
        ({"use_sliding_window": "false"}, "model.use_sliding_window"),
        (QWEN_2 | {"max_window_layers": 1}, "model.sliding_window"),
        (QWEN_2 | {"sliding_window": 9}, "model.max_window_layers"),
    ],
)
def test_windows_that_are_not_computed_are_refused_by_name(changes, field):
    with pytest.raises(ConfigError) as refused:
        LlamaArchitecture.from_config(stated(**changes))
    assert refused.value.field == field


def test_a_window_that_is_stated_as_none_is_none():
    config = stated(architectures=["MistralForCausalLM"], sliding_window=None)
    assert not LlamaArchitecture.from_config(config).has_windows


@pytest.mark.parametrize("use", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}])
def test_qwen_2_has_windows_on_request_as_transformers_has(use):
    config = {
        key: value for key, value in (stated() | QWEN_2).items() if key != "use_sliding_window"
    }
    config |= {"sliding_window": 9, "max_window_layers": 1} | use
    theirs = Qwen2Config(**config)
    windowed = [kind == "sliding_attention" for kind in theirs.layer_types]
    ours = LlamaArchitecture.from_config(config).layer_windows
    assert ours == tuple(theirs.sliding_window if one else None for one in windowed)


def test_a_model_without_windows_is_what_it_was():
    _, ours = twins(tiny_config())
    assert isinstance(ours, LlamaDecoder)
    assert ours.architecture.layer_windows == (None, None)
