"""Graphs as far as they are told apart: names and shapes of inputs, as text and as a HloModuleProto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_S32, _BF16 = 4, 16
_NAMES = {_S32: "torch.int32", _BF16: "torch.bfloat16"}


@dataclass(frozen=True)
class Graph:
    """`inputs`: name, dimensions and XLA's number of the element type. `label` is for faults alone.
    `with_options`: the target's options for the compiler are handed to `torch.compile` too."""

    label: str
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]
    size: int
    returns: str = "logits"
    with_options: bool = True

    @property
    def fx_text(self) -> str:
        placeholders = (
            f"    %{name.lower()} : [num_users=1] = placeholder[target={name}]"
            for name, _, _ in self.inputs
        )
        return "\n".join(["graph():", *placeholders, f"    return ({self.returns},)", ""])

    @property
    def inputs_text(self) -> str:
        return "\n".join(
            f"Input {number}:\n  Shape: {dims}\n  Dtype: {_NAMES[kind]}\n  Device: neuron:0"
            for number, (_, dims, kind) in enumerate(self.inputs)
        )

    def hlo(self, *, with_shapes: bool) -> bytes:
        module = _field(1, b"SyncTensorsGraph." + str(len(self.inputs)).encode())
        if not with_shapes:
            return module
        shapes = b"".join(
            _field(1, _number(2, kind) + _field(3, b"".join(map(_varint, dims))))
            for _, dims, kind in self.inputs
        )
        return module + _field(4, shapes)


@dataclass(frozen=True)
class Step:
    """A decode step of `rows` sequences; `drafts` of them are verified in it, None without speculation."""

    rows: int
    columns: int
    windowed: int | None = None
    drafts: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * (1 + (self.drafts or 0))

    @property
    def inputs(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        tables = [("block_table_tensor", self.columns)]
        if self.windowed is not None:
            tables.append(("swa_block_table_tensor", self.windowed))
        yield ("L_input_ids_", (self.tokens,), _S32)
        yield ("L_positions_", (self.tokens,), _S32)
        for name, width in tables:
            yield (f"L_attn_metadata_layers_0_{name}", (self.rows, width), _S32)
        yield ("L_attn_metadata_layers_0_seq_lens", (self.rows,), _S32)
        yield ("L_attn_metadata_layers_0_query_start_loc", (self.rows + 1,), _S32)

    def label(self, what: str) -> str:
        query = "" if self.drafts is None else f"_s{1 + self.drafts}"
        return f"{what}_b{self.rows}{query}_w{self.columns}"


def decode_graph(model: dict[str, Any], args: Any, step: Step) -> Graph:
    verified = []
    if step.drafts:
        verified = [
            ("L_spec_decode_metadata_draft_token_ids", (step.rows * step.drafts,), _S32),
            ("L_spec_decode_metadata_cu_num_draft_tokens", (step.rows,), _S32),
            ("L_spec_decode_metadata_target_logits_indices", (step.rows * step.drafts,), _S32),
            ("L_spec_decode_metadata_bonus_logits_indices", (step.rows,), _S32),
            ("L_spec_decode_metadata_logits_indices", (step.tokens,), _S32),
        ]
    return Graph(
        step.label("decode"),
        (
            *_weights(model),
            *step.inputs,
            *verified,
            *_kv_caches(model, args),
            ("L_tp_rank_", (1,), _S32),
        ),
        step.tokens * step.columns,
        _returned(step.drafts is not None),
    )


def draft_graph(draft: dict[str, Any], args: Any, step: Step) -> Graph:
    """One program: the update of the draft's KV and its recurrent steps, unrolled."""
    return Graph(
        step.label("draft"),
        (
            *_weights(draft),
            *step.inputs,
            _hidden_states(draft, step.tokens),
            *_kv_caches(draft, args),
            ("L_tp_rank_", (1,), _S32),
        ),
        step.tokens * step.columns,
        "draft_token_ids",
        with_options=False,
    )


def prefill_graph(
    model: dict[str, Any], args: Any, tokens: int, columns: int, *, speculates: bool
) -> Graph:
    return Graph(
        f"prefill_s{tokens}",
        tuple(_prefill_inputs(model, args, tokens, columns)),
        tokens * columns,
        _returned(speculates),
    )


def draft_prefill_graph(draft: dict[str, Any], args: Any, tokens: int, columns: int) -> Graph:
    return Graph(
        f"draft_prefill_s{tokens}",
        (*_prefill_inputs(draft, args, tokens, columns), _hidden_states(draft, tokens)),
        tokens * columns,
        "draft_token_ids",
        with_options=False,
    )


def _prefill_inputs(
    model: dict[str, Any], args: Any, tokens: int, columns: int
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    yield from _weights(model)
    yield ("L_input_ids_", (tokens,), _S32)
    yield ("L_positions_", (tokens,), _S32)
    yield ("L_attn_metadata_layers_0_block_table_tensor", (1, columns), _S32)
    yield ("L_attn_metadata_layers_0_cached_seq_len", (1, 1), _S32)
    yield from _kv_caches(model, args)
    yield ("L_tp_rank_", (1,), _S32)


def _hidden_states(draft: dict[str, Any], tokens: int) -> tuple[str, tuple[int, ...], int]:
    return ("L_target_hidden_states_", (tokens, 3 * draft["hidden_size"]), _BF16)


def _returned(speculates: bool) -> str:
    """A drafter reads hidden states of some of the target's layers."""
    return "logits, aux_hidden_states" if speculates else "logits"


def vision_graph(tokens: int) -> Graph:
    return Graph(f"vision_s{tokens}", (("L_pixel_values_", (tokens, 1176), _BF16),), 0)


def _weights(model: dict[str, Any]) -> Sequence[tuple[str, tuple[int, ...], int]]:
    dims = (model["vocab_size"], model["hidden_size"])
    return [("L_self_modules_embed_tokens_parameters_weight_", dims, _BF16)]


def _kv_caches(model: dict[str, Any], args: Any) -> Sequence[tuple[str, tuple[int, ...], int]]:
    head = model["hidden_size"] // model["num_attention_heads"]
    heads = model["num_key_value_heads"] // args.tensor_parallel_size or 1
    dims = (2, args.num_gpu_blocks_override, heads, args.block_size, head)
    layers = range(model["num_hidden_layers"])
    return [(f"L_kv_caches_{layer}_", dims, _BF16) for layer in layers]


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
