"""What engines log and leave in their caches: vLLM Neuron as its sources print it, vLLM as 0.32 did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from neffs import make_neff

from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape

NEFF = make_neff()
PAIRS = [(rows, context) for rows in (1, 2, 4) for context in (1024, 4096)]
"""The decode targets of the config that `cli_samples` writes."""


def said(
    message: str,
    process: str = "Worker_TP0 pid=4011",
    level: str = "INFO",
    place: str = "worker.py",
) -> str:
    """A line as vLLM formats it."""
    return f"({process}) {level} 11-29 21:40:54 [{place}:87] {message}"


def extracting(pairs: Sequence[tuple[int, int]], **words: str) -> str:
    return said(f"Extracting {len(pairs)} decode compile targets: {list(pairs)}", **words)


def prefilling(pairs: Sequence[tuple[int, int]], **words: str) -> str:
    return said(f"Extracting graphs for {len(pairs)} prefill buckets: {list(pairs)}", **words)


def warming(pairs: Sequence[tuple[int, int]], **words: str) -> list[str]:
    """The decode part of a warm-up, with the empty lines it begins messages with."""
    lines = [said("", **words)]
    lines.append(said(f"Warming up {len(pairs)} decode compile targets: {list(pairs)}", **words))
    return lines + steps(pairs, **words)


def steps(pairs: Sequence[tuple[int, int]], **words: str) -> list[str]:
    lines = []
    for number, (rows, context) in enumerate(pairs, start=1):
        lines += [
            said("", **words),
            said(
                f"[{number}/{len(pairs)}] Warming up decode (batch={rows}, seq={context})", **words
            ),
            said(f"  Warmed up decode (batch={rows}, seq={context})", **words),
        ]
    return lines


def vllm_config(
    *,
    mode: str = "<CompilationMode.DYNAMO_TRACE_ONCE: 2>",
    backend: str = "neffbuild",
    sizes: str = "None",
    ends: str = "[2048]",
    captures: str = "[]",
    speculation: str = "None",
    dtype: str = "bfloat16",
    max_seq_len: int = 4096,
    enforce_eager: bool = False,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    version: str = "0.32.0",
    process: str = "EngineCore pid=549",
) -> str:
    """vLLM's line of its whole config, shortened in places where nothing is looked for."""
    return said(
        f"Initializing a V1 LLM engine (v{version}) with config: model='/srv/tiny', "
        f"speculative_config={speculation}, tokenizer='/srv/tiny', skip_tokenizer_init=False, "
        f"revision=None, trust_remote_code=False, dtype=torch.{dtype}, max_seq_len={max_seq_len}, "
        "download_dir=None, load_format=auto, tensor_parallel_size=1, "
        f"pipeline_parallel_size={pipeline_parallel_size}, "
        f"data_parallel_size={data_parallel_size}, decode_context_parallel_size=1, dcp_comm_backend=ag_rs, "
        f"quantization=None, enforce_eager={enforce_eager}, kv_cache_dtype=auto, device_config=cpu, "
        "structured_outputs_config=StructuredOutputsConfig(backend='auto', reasoning_parser=''), "
        f"seed=0, pooler_config=None, compilation_config={{'mode': {mode}, 'debug_dump_path': None, "
        f"'cache_dir': '', 'backend': '{backend}', 'custom_ops': ['all'], 'splitting_ops': [], "
        "'encoder_cudagraph_token_budgets': [], 'decoder_replay_cudagraph_capture_sizes': [], "
        f"'compile_sizes': {sizes}, 'compile_ranges_endpoints': {ends}, 'inductor_passes': {{}}, "
        "'cudagraph_mode': <CUDAGraphMode.NONE: 0>, 'cudagraph_num_of_warmups': 0, "
        f"'cudagraph_capture_sizes': {captures}, 'max_cudagraph_capture_size': None, "
        "'local_cache_dir': None}, kernel_config=KernelConfig(moe_backend='auto')",
        process=process,
        place="core.py",
    )


VLLM_WARM_UP = [
    said("Warming up model for the compilation...", process="Worker pid=665"),
    said("[backbone] Initial profiling/warmup run took 0.10 s", process="Worker pid=665"),
    said("Warming up done.", process="Worker pid=665"),
]


def write_entry(
    root: Path,
    number: int,
    inputs: Iterable[tuple[str, tuple[int, ...]]],
    *,
    below: str = "",
    finished: bool = True,
    stated: str | None = None,
) -> Path:
    """One entry of vLLM Neuron's compile cache, with the texts it keeps for people."""
    key = f"{number:032x}"
    folder = root / key
    texts = folder / below
    texts.mkdir(parents=True)
    graph, shapes = ["graph():"], []
    for index, (name, shape) in enumerate(inputs):
        graph.append(f"    %{name.lower()} : [num_users=1] = placeholder[target={name}]")
        shapes.append(f"Input {index}:\n  Shape: {shape}\n  Dtype: int32\n  Device: neuron:0")
    (texts / "fxgraph.txt").write_text("\n".join(graph) + "\n    return (add,)\n")
    (texts / "example_inputs.txt").write_text("\n".join(shapes) + "\n")
    (folder / "graph.hlo").write_bytes(b"hlo")
    (folder / ".artifact_metadata_v0.json").write_text(
        f'{{"version": 0, "cache_key": "{stated or key}", "output_count": 2}}'
    )
    if finished:
        (folder / f"graph_{key}.neff").write_bytes(NEFF)
        (folder / ".compilation_complete").write_text(
            f"completed:1764452474\nneff_size:{len(NEFF)}\n"
        )
    return folder


def graph_inputs(bucketer: Bucketer, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """The inputs of the engine's graph of a shape, as far as they matter."""
    draft = shape.family in (Family.DRAFT, Family.DRAFT_PREFILL)
    if isinstance(shape, DecodeShape):
        rows, tokens = shape.num_seqs, shape.num_tokens
        columns = bucketer.block_table_width(shape)
        if not shape.context_bucketed:  # rounded up to the kernel's tile
            tile = max(128 // bucketer.block_size, 1)
            columns = -(-columns // tile) * tile
    else:
        assert isinstance(shape, PrefillShape)
        rows, tokens = 1, shape.num_batched_tokens
        columns = -(-bucketer.max_model_len // bucketer.block_size)
    metadata = "L_attn_metadata_model_layers_0_self_attn"
    return [
        ("L_self_modules_embed_tokens_parameters_weight_", (1024, 256)),
        ("L_input_ids_", (tokens,)),
        ("L_positions_", (tokens,)),
        *([("L_initial_target_hidden_states_", (tokens, 768))] if draft else []),
        (f"{metadata}_block_table_tensor_", (rows, columns)),
        (f"{metadata}_full_block_table_tensor_", (rows, 4096)),
        (f"{metadata}_seq_lens_", (rows,)),
        ("L_rank_", (1,)),
    ]
