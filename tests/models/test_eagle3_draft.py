"""The reference draft against its arithmetic spelled out, and the rules of its paged cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_eagle3 import AUXILIARY_LAYERS, architecture, draft_config, proposals, random_draft
from tiny_llama import Batch, tiny_config, twins
from torch import Tensor, nn

from neffbuild.config.errors import ConfigError
from neffbuild.models.architecture import LlamaArchitecture
from neffbuild.models.eagle3 import Eagle3Draft, load_checkpoint
from neffbuild.models.eagle3_architecture import Eagle3Architecture
from neffbuild.models.llama import PAD_TOKEN_ID, LlamaDecoder

AUXILIARY_SIZE = len(AUXILIARY_LAYERS) * 64


class DraftBatch(Batch):
    """Rows of a draft side by side over its pool."""

    def propose(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        starts: Sequence[int],
        query_len: int,
    ) -> list[list[int]]:
        """Row r catches up with `tokens[r]` from position `starts[r]`; padding holds what would do
        damage if it were used."""
        inputs = self.inputs([list(row) for row in tokens], list(starts), query_len)
        padded = torch.full((self.rows, query_len, AUXILIARY_SIZE), torch.nan)
        for row, given_states in enumerate(states):
            padded[row, : len(given_states)] = given_states
        with torch.inference_mode():
            [drafts] = self.model(*inputs, padded, self.kv_caches)
        assert drafts.dtype == torch.int32
        return drafts.tolist()


def states_of(length: int, seed: int) -> Tensor:
    return torch.randn(length, AUXILIARY_SIZE, generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "as published": {},
    "every token": {"draft_vocab_size": ...},
    "normed residual": {"norm_before_residual": True},
    "one kv head, own head_dim": {"num_key_value_heads": 1, "head_dim": 32},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("spec_tokens", [1, 2, 5])
def test_proposals_equal_the_arithmetic_spelled_out(changes, spec_tokens):
    draft = random_draft(spec_tokens, **changes)
    batch = DraftBatch(draft, rows=2, context_len=64)
    torch.manual_seed(5)
    tokens, states = torch.randint(0, 256, (40,)).tolist(), states_of(40, 1)
    distinct = set()
    known = [0, 0]
    for added in (30, 1, 1 + spec_tokens, 2):
        # Row 0 catches up with `added` tokens at once, row 1 lags by nine.
        until = [known[0] + added, max(known[0] + added - 9, 0)]
        fed = [slice(a, b) for a, b in zip(known, until, strict=True)]
        drafts = batch.propose(
            [tokens[part] for part in fed],
            [states[part] for part in fed],
            known,
            max(part.stop - part.start for part in fed),
        )
        for row, stop in enumerate(until):
            expected, keys = proposals(draft, tokens[:stop], states[:stop])
            assert drafts[row] == expected
            written = stop + spec_tokens - 1
            torch.testing.assert_close(batch.keys_of(row, written), keys, rtol=1e-4, atol=1e-4)
            distinct.update(expected)
        known = until
    assert len(distinct) > 4


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_ragged_step_equals_its_rows_alone(data):
    """VARLEN: any mix of query lengths 0 … Q in one program, whatever the padding holds."""
    spec_tokens = data.draw(st.integers(1, 4))
    draft = random_draft(spec_tokens)
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    prefixes = data.draw(st.lists(st.integers(1, 40), min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    tokens = [[(7 * row + 13 * i) % 256 for i in range(50)] for row in range(rows)]
    states = [states_of(50, row) for row in range(rows)]
    batch = DraftBatch(draft, rows, context_len=64)

    def step(starts, counts, query_len):
        spans = [slice(a, a + n) for a, n in zip(starts, counts, strict=True)]
        return batch.propose(
            [row[span] for row, span in zip(tokens, spans, strict=True)],
            [row[span] for row, span in zip(states, spans, strict=True)],
            starts,
            query_len,
        )

    step([0] * rows, prefixes, max(prefixes))
    drafts = step(prefixes, lengths, width)
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        if length:
            stop = prefix + length
            assert drafts[row] == proposals(draft, tokens[row][:stop], states[row][:stop])[0]
        else:
            assert drafts[row] == [PAD_TOKEN_ID] * spec_tokens
    assert not batch.kv_caches[0][0][0].any(), "pad tokens must leave the null block zero"


@pytest.mark.parametrize("spec_tokens", [1, 3])
def test_a_step_writes_the_positions_it_needs_and_no_others(spec_tokens):
    draft = random_draft(spec_tokens)
    batch = DraftBatch(draft, rows=3, context_len=32, num_blocks=40)
    for tensor in batch.kv_caches[0]:
        tensor.fill_(9.0)
    # Row 0 crosses into its second block in the recurrent steps, row 1 ends at its table's last slot.
    starts, lengths = [14, 32 - spec_tokens, 5], [2, 1, 0]
    batch.propose(
        [[1] * length for length in lengths], [states_of(n, 0) for n in lengths], starts, 4
    )
    written = {0} | {
        batch.slot(row, starts[row] + i)
        for row in (0, 1)
        for i in range(lengths[row] + spec_tokens - 1)
    }
    for tensor in batch.kv_caches[0]:
        changed = (tensor.flatten(0, 1) != 9.0).any(-1).any(-1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_drafts_are_tokens_of_the_map():
    draft = random_draft(5)
    mapped = {i + int(offset) for i, offset in enumerate(draft.d2t)}
    batch = DraftBatch(draft, rows=1, context_len=64)
    seen = set()
    for start in range(40):
        [drafts] = batch.propose([[start]], [states_of(1, start)], [start], 1)
        seen.update(drafts)
    assert seen <= mapped
    assert len(seen) > 10
    assert any(token >= draft.eagle3.draft_vocab_size for token in seen)


def test_the_target_s_states_drive_the_draft():
    """From the target's step to the draft's: what one returns is what the other takes."""
    _, twin = twins(tiny_config())
    target = LlamaDecoder(twin.architecture, torch.float32, AUXILIARY_LAYERS)
    target.load_state_dict(twin.state_dict())
    prompt = [5, 77, 130, 9]
    next_ids, _, states = Batch(target, rows=1, context_len=16).step([prompt], [0], 4)
    draft = random_draft(3)
    shifted = [*prompt[1:], int(next_ids[0, -1])]
    batch = DraftBatch(draft, rows=1, context_len=16)
    [drafts] = batch.propose([shifted], [states[0]], [0], 4)
    assert drafts == proposals(draft, shifted, states[0])[0]


PUBLISHED_NAMES = {
    "d2t": (100,),
    "t2d": (256,),
    "fc.weight": (64, 192),
    "lm_head.weight": (100, 64),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.mlp.down_proj.weight": (64, 112),
    "midlayer.mlp.gate_proj.weight": (112, 64),
    "midlayer.mlp.up_proj.weight": (112, 64),
    "midlayer.post_attention_layernorm.weight": (64,),
    "midlayer.self_attn.k_proj.weight": (32, 128),
    "midlayer.self_attn.o_proj.weight": (64, 64),
    "midlayer.self_attn.q_proj.weight": (64, 128),
    "midlayer.self_attn.v_proj.weight": (32, 128),
    "norm.weight": (64,),
}


def checkpoint(rename=lambda name: name) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        rename(name): torch.randint(0, 2, shape) if name in ("d2t", "t2d") else torch.randn(shape)
        for name, shape in PUBLISHED_NAMES.items()
    }


NAMES = {
    "SafeAILab": lambda name: name,
    "speculators": lambda name: name.replace("midlayer.", "layers.0."),
    "prefixed": lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
}


@pytest.mark.parametrize("rename", NAMES.values(), ids=NAMES)
def test_a_published_checkpoint_loads_and_shares_the_target_s_embedding(rename):
    draft = Eagle3Draft(architecture(), torch.float32, 3)
    embedding = nn.Parameter(torch.randn(256, 64), requires_grad=False)
    published = checkpoint(rename)
    load_checkpoint(draft, published, embedding)
    assert draft.embed_tokens.weight is embedding
    loaded = draft.state_dict()
    for name, tensor in checkpoint().items():
        if name != "t2d":
            assert torch.equal(loaded[name], tensor), name


def test_a_checkpoint_s_own_embedding_is_kept_apart():
    draft = Eagle3Draft(architecture(), torch.float32, 3)
    target = nn.Parameter(torch.zeros(256, 64), requires_grad=False)
    load_checkpoint(draft, checkpoint() | {"embed_tokens.weight": torch.ones(256, 64)}, target)
    assert draft.embed_tokens.weight is not target
    assert draft.embed_tokens.weight.all()
    assert not target.any()


def test_a_map_of_the_whole_vocabulary_is_left_out():
    draft = Eagle3Draft(architecture(draft_vocab_size=256), torch.float32, 3)
    published = checkpoint() | {
        "d2t": torch.zeros(256, dtype=torch.int64), "lm_head.weight": torch.randn(256, 64)
    }  # fmt: skip
    load_checkpoint(draft, published, nn.Parameter(torch.zeros(256, 64)))
    assert "d2t" not in draft.state_dict()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("fc.weight"), "fc.weight"),
        (lambda c: c.update(more=torch.zeros(1)), "more"),
        (lambda c: c.update({"lm_head.weight": torch.zeros(99, 64)}), "lm_head.weight"),
    ],
    ids=["missing", "left over", "another shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, named):
    published = checkpoint()
    change(published)
    draft = Eagle3Draft(architecture(), torch.float32, 3)
    with pytest.raises(ConfigError, match=named) as refused:
        load_checkpoint(draft, published, nn.Parameter(torch.zeros(256, 64)))
    assert refused.value.hint


def test_the_config_of_a_speculators_draft():
    flat = draft_config()
    nested = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": flat.pop("draft_vocab_size"),
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": flat,
    }
    target = LlamaArchitecture.from_config(tiny_config().to_dict())
    parse = Eagle3Architecture.from_configs
    assert parse(nested, target, AUXILIARY_LAYERS) == architecture()
    del nested["norm_before_residual"]  # which it takes for true
    assert parse(nested, target, AUXILIARY_LAYERS) == architecture(norm_before_residual=True)


REFUSED = {
    "architectures": ["MedusaModel"],
    "draft_vocab_size": 257,
    "eagle_config": {"use_aux_hidden_state": False},
    "fc_norm": True,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": "112",
    "norm_before_fc": True,
    "norm_output": True,
    "num_hidden_layers": 2,
    "target_hidden_size": 128,
    "tie_word_embeddings": True,
    "vocab_size": 255,
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_a_draft_that_is_not_computed_is_refused_by_name(field, value):
    with pytest.raises(ConfigError) as refused:
        architecture(**{field: value})
    named = "use_aux_hidden_state" if field == "eagle_config" else field
    assert refused.value.field == f"draft_model.{named}"
    assert refused.value.hint


@pytest.mark.parametrize("layers", [(), (1, 1, 2), (2, 1, 0), (-1, 0, 1), (0, 1, 3)])
def test_auxiliary_layers_the_target_does_not_return_so_are_refused(layers):
    target = LlamaArchitecture.from_config(tiny_config().to_dict())
    with pytest.raises(ConfigError, match="strictly ascending layers from 0 to 2"):
        Eagle3Architecture.from_configs(draft_config(), target, layers)


def test_the_architecture_is_read_without_torch():
    code = (
        "import sys; from neffbuild.models.eagle3_architecture import Eagle3Architecture; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bfloat16_stays_close_to_float32():
    exact = random_draft(1)
    rounded = Eagle3Draft(exact.eagle3, torch.bfloat16, 1)
    rounded.load_state_dict(exact.state_dict())
    tokens, states = list(range(30)), states_of(30, 2)
    _, expected = proposals(exact, tokens, states)
    batch = DraftBatch(rounded, rows=1, context_len=32)
    batch.kv_caches = [(keys.bfloat16(), values.bfloat16()) for keys, values in batch.kv_caches]
    inputs = batch.inputs([tokens], [0], 30)
    with torch.inference_mode():
        [drafts] = rounded(*inputs, states[None].bfloat16(), batch.kv_caches)
    assert drafts.shape == (1, 1)
    torch.testing.assert_close(batch.keys_of(0, 30).float(), expected, rtol=0.1, atol=0.15)
