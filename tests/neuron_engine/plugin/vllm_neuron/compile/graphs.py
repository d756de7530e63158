"""Graphs as far as they are told apart: names and shapes of inputs, as text and as a HloModuleProto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_S32, _BF16 = 4, 16
_NAMES = {_S32: "torch.int32", _BF16: "torch.bfloat16"}


@dataclass(frozen=True)
class Graph:
    """`inputs`: name, dimensions and XLA's number of the element type. `label` is for faults alone."""

    label: str
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]
    size: int

    @property
    def fx_text(self) -> str:
        placeholders = (
            f"    %{name.lower()} : [num_users=1] = placeholder[target={name}]"
            for name, _, _ in self.inputs
        )
        return "\n".join(["graph():", *placeholders, "    return (logits,)", ""])

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


def decode_graph(
    model: dict[str, Any], args: Any, rows: int, columns: int, windowed: int | None
) -> Graph:
    tables = [("block_table_tensor", columns)]
    if windowed is not None:
        tables.append(("swa_block_table_tensor", windowed))
    return Graph(
        f"decode_b{rows}_w{columns}",
        (
            *_weights(model),
            ("L_input_ids_", (rows,), _S32),
            ("L_positions_", (rows,), _S32),
            *((f"L_attn_metadata_layers_0_{name}", (rows, width), _S32) for name, width in tables),
            ("L_attn_metadata_layers_0_seq_lens", (rows,), _S32),
            ("L_attn_metadata_layers_0_query_start_loc", (rows + 1,), _S32),
            *_kv_caches(model, args),
            ("L_tp_rank_", (1,), _S32),
        ),
        rows * columns,
    )


def prefill_graph(model: dict[str, Any], args: Any, tokens: int, columns: int) -> Graph:
    return Graph(
        f"prefill_s{tokens}",
        (
            *_weights(model),
            ("L_input_ids_", (tokens,), _S32),
            ("L_positions_", (tokens,), _S32),
            ("L_attn_metadata_layers_0_block_table_tensor", (1, columns), _S32),
            ("L_attn_metadata_layers_0_cached_seq_len", (1, 1), _S32),
            *_kv_caches(model, args),
            ("L_tp_rank_", (1,), _S32),
        ),
        tokens * columns,
    )


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
