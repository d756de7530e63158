"""Reading logs: what processes say, in whatever state it arrives."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from engine_samples import PAIRS, extracting, prefilling, said, steps, vllm_config, warming
from hypothesis import example, given
from hypothesis import strategies as st

from neffbuild.grid.engine_failures import Breakdown, Failure
from neffbuild.grid.engine_log import Targets, read_engine_log

WHOLE = Targets(frozenset({frozenset(PAIRS)}))
RANKS = [f"Worker_TP{rank} pid={4011 + rank}" for rank in range(4)]


def test_the_lists_of_a_start() -> None:
    log = read_engine_log([prefilling([(512, 0), (2048, 512)]), extracting(PAIRS), *warming(PAIRS)])
    assert log.decode.lists == {frozenset(PAIRS)}
    assert log.prefill.lists == {frozenset({(512, 0), (2048, 512)})}
    assert not log.decode.others
    assert not log.failures


@given(st.randoms())
def test_ranks_write_side_by_side(order: random.Random) -> None:
    """Lines of one rank keep their order; it matters to nothing."""
    logs = [[extracting(PAIRS, process=rank), *warming(PAIRS, process=rank)] for rank in RANKS]
    mixed = []
    while any(logs):
        mixed.append(order.choice([log for log in logs if log]).pop(0))
    assert read_engine_log(mixed).decode.lists == WHOLE.lists


def test_ranks_that_say_the_same_are_one_and_others_are_not() -> None:
    fewer = PAIRS[:-1]
    log = read_engine_log(
        [extracting(PAIRS, process=RANKS[0]), extracting(fewer, process=RANKS[1])]
    )
    assert log.decode.lists == {frozenset(PAIRS), frozenset(fewer)}


@pytest.mark.parametrize("between", ["", " ", "\r", "\r\n"])
def test_messages_that_share_a_line_are_two(between: str) -> None:
    fewer = PAIRS[:-1]
    line = between.join([extracting(PAIRS, process=RANKS[0]), extracting(fewer, process=RANKS[1])])
    assert read_engine_log([line]).decode.lists == {frozenset(PAIRS), frozenset(fewer)}
    cut = extracting(PAIRS, process=RANKS[0])[:-30] + extracting(fewer, process=RANKS[1])
    assert read_engine_log([cut]).decode.lists == {frozenset(fewer)}


def test_each_step_is_as_good_as_the_list() -> None:
    """Where the log begins after the list."""
    assert read_engine_log(steps(PAIRS)).decode.lists == WHOLE.lists


@pytest.mark.parametrize("cut", [2, 8, 30])
def test_a_list_that_is_cut_off_is_no_list(cut: int) -> None:
    decode = read_engine_log([extracting(PAIRS)[:-cut]]).decode
    assert decode.lists == frozenset()
    assert decode.told == len(PAIRS)
    assert decode.others <= set(PAIRS)


def test_what_is_cut_off_in_one_process_is_whole_in_another() -> None:
    lines = [extracting(PAIRS, process=RANKS[1])[:-20], extracting(PAIRS, process=RANKS[0])]
    decode = read_engine_log(lines).decode
    assert (decode.lists, decode.others) == (WHOLE.lists, frozenset())


def test_a_list_whose_count_is_another_is_not_believed() -> None:
    line = extracting(PAIRS).replace("(2, 1024), ", "")
    assert read_engine_log([line]).decode.lists == frozenset()


def test_some_steps_say_how_many_there_are() -> None:
    decode = read_engine_log(steps(PAIRS)[:6]).decode
    assert decode == Targets(others=frozenset(PAIRS[:2]), told=len(PAIRS))


@pytest.mark.parametrize(
    "dressed",
    [
        lambda line: f"\x1b[0;36m{line}\x1b[0m",
        lambda line: line.replace("INFO", "\x1b[32mINFO\x1b[0m").replace(
            "Extracting", "\x1b[1mExtracting"
        ),
        lambda line: f"2026-11-29T21:40:54.123456Z stdout F {line}",
        lambda line: f"[pod/worker-0] {line}\r",
        lambda line: json.dumps(
            {
                "levelname": "INFO",
                "process": 77,
                "message": "\n" + line.partition("] ")[2],
            }
        ),
        lambda line: f"2026-11-29T21:40:54Z stdout F {json.dumps({'log': line})}",
        lambda line: json.dumps({"message": line})[:-2],
        lambda line: f'time="2026-11-29T21:40:54Z" level=info msg="{line}"',
        lambda line: f"vllm-1  | {line}",
        lambda line: f"Nov 29 21:40:54 host vllm[71]: {line}",
        lambda line: line.replace("[worker.py:87]", "worker.py:87]"),
        lambda line: f"21:40:54 (Worker_TP0 pid=4011) {line.partition('] ')[2]}",
        lambda line: f"INFO:vllm_neuron.worker:{line.partition('] ')[2]}",
        lambda line: f"2026-11-29 21:40:54,123 - vllm_neuron - INFO - {line.partition('] ')[2]}",
    ],
    ids=[
        "coloured",
        "coloured inside",
        "container runtime",
        "prefixed",
        "JSON",
        "JSON around a line",
        "JSON cut off",
        "logfmt",
        "compose",
        "syslog",
        "older vLLM",
        "time and process",
        "logging",
        "a format of its own",
    ],
)
def test_prefixes_and_colours(dressed) -> None:
    assert read_engine_log(map(dressed, [extracting(PAIRS)])).decode.lists == WHOLE.lists
    assert read_engine_log(map(dressed, steps(PAIRS))).decode.lists == WHOLE.lists


FEWER = PAIRS[:-2]
KEY = "0" * 32


def started(pairs: list[tuple[int, int]], core: str = "EngineCore pid=549") -> list[str]:
    return [vllm_config(process=core), extracting(pairs), *warming(pairs)]


@pytest.mark.parametrize("core", ["EngineCore pid=549", "EngineCore pid=9001"])
def test_of_several_starts_the_last_counts(core: str) -> None:
    """In a container a restarted engine may well have the process id of its predecessor."""
    failed = [
        said("Failed to extract graph for decode (batch=4, seq=4096): no", level="ERROR"),
        said(f"Compilation cache key: {KEY}"),
        said("Capturing EAGLE3 decode graphs for batch size: 4"),
        prefilling([(512, 0)]),
    ]
    log = read_engine_log([*started(FEWER), *failed, *started(FEWER), *started(PAIRS, core)])
    assert log == replace(read_engine_log(started(PAIRS)), starts=3)
    assert log.decode.lists == WHOLE.lists


def test_a_log_that_begins_with_the_end_of_a_start() -> None:
    assert read_engine_log([*steps(FEWER)[6:], *started(PAIRS)]).starts == 2
    assert read_engine_log([*steps(FEWER)[6:], *started(PAIRS)]).decode.lists == WHOLE.lists
    # What a start says before its config says nothing of programs.
    before = [
        said("vLLM API server version 0.32.0, prefill"),
        said(f"Compilation cache key: {KEY}"),
    ]
    assert read_engine_log([*before, *started(PAIRS)]).starts == 1


def test_an_engine_that_has_started_again_and_not_come_far() -> None:
    log = read_engine_log([*started(PAIRS), vllm_config()])
    assert (log.starts, log.decode.named) == (2, False)


@pytest.mark.parametrize(
    "processes", [[f"EngineCore_DP{rank} pid={700 + rank}" for rank in range(4)], [""] * 4]
)
def test_engines_of_one_start(processes: list[str]) -> None:
    """Data-parallel ranks each print the config of their own."""
    configs = [
        vllm_config(process=one, data_parallel_size=4).removeprefix("() ") for one in processes
    ]
    start = [*configs, extracting(PAIRS)]
    assert read_engine_log(start).starts == 1
    assert read_engine_log([*start, *configs, extracting(FEWER)]).decode.lists == {frozenset(FEWER)}
    assert read_engine_log([*start, *start, *start]).starts == 3


REPLICAS = [vllm_config(process="x pid=1").removeprefix("(x pid=1) ") for _ in range(2)]
UNNAMED = {"process": "x pid=1"}


def unnamed(pairs: list[tuple[int, int]]) -> str:
    return extracting(pairs, **UNNAMED).removeprefix("(x pid=1) ")


@pytest.mark.parametrize("core", ["", "(EngineCore pid=549) "])
@pytest.mark.parametrize("drifting", [0, 1])
@pytest.mark.parametrize("in_turn", [True, False])
def test_starts_of_replicas_without_a_name_are_taken_together(
    core: str, drifting: int, in_turn: bool
) -> None:
    configs = [core + line for line in REPLICAS]
    lists = [unnamed(FEWER if rank == drifting else PAIRS) for rank in range(2)]
    lines = [configs[0], lists[0], configs[1], lists[1]] if in_turn else [*configs, *lists]
    log = read_engine_log(lines, replicas=2)
    assert (log.starts, log.together) == (1, 2)
    assert log.decode.lists == {frozenset(PAIRS), frozenset(FEWER)}


def test_a_replica_whose_config_is_cut_off_is_not_an_earlier_start() -> None:
    log = read_engine_log([unnamed(FEWER), REPLICAS[1], unnamed(PAIRS)], replicas=2)
    assert log.decode.lists == {frozenset(PAIRS), frozenset(FEWER)}


def test_replicas_with_names_are_started_again_by_them() -> None:
    first, second = ([vllm_config(process=f"EngineCore_DP{rank} pid=7")] for rank in range(2))
    start = [*first, *second, extracting(PAIRS)]
    log = read_engine_log([*first, *second, extracting(FEWER), *start], replicas=2)
    assert (log.starts, log.together, log.decode.lists) == (2, 0, WHOLE.lists)


def test_steps_that_two_replicas_count_apart_are_no_whole_list() -> None:
    """Together they name all of the targets, and one of the two lacks some."""
    lines = [line.partition(") ")[2] for line in [*steps(FEWER), *steps(PAIRS)]]
    decode = read_engine_log([*REPLICAS, *lines], replicas=2).decode
    assert (decode.lists, decode.others) == (frozenset(), frozenset(PAIRS))


def test_failures_are_told_once() -> None:
    log = read_engine_log(
        [
            said("  Failed to extract graph for decode (batch=4, seq=4096): a\x07b", level="ERROR"),
            "RuntimeError: Model graph extraction failed for decode (batch=4, seq=4096). Error: ab",
            said("  Failed to warmup decode (batch=1, seq=1024): NRT", level="ERROR"),
            said("  Failed to warmup for prefill bucket 512 with kv_segment_size 0: x"),
            "Model warmup failed for prefill bucket 512 with kv_segment_size 0. Error: x",
        ]
    )
    assert log.failures == (
        Failure("decode", (4, 4096), "extraction", "a b"),
        Failure("decode", (1, 1024), "warm-up", "NRT"),
        Failure("prefill", (512, 0), "warm-up", "x"),
    )


KEYS = ("0" * 31 + "1", "0" * 31 + "2")
BREAKDOWNS = [
    (
        "Parallel trace fork failed (rank=3): lane 2 (pid 71) status=1: a\x07b",
        Breakdown(
            "parallel trace", "Parallel trace fork failed (rank=3)", "lane 2 (pid 71) status=1: a b"
        ),
    ),
    (
        "neuronx-cc compilation failed with 70. Check compiler logs.",
        Breakdown("neuronx-cc", "neuronx-cc compilation failed with 70"),
    ),
    (
        "neuronx-cc compilation failed with -9. Check compiler logs.",
        Breakdown("neuronx-cc", "neuronx-cc compilation failed with -9"),
    ),
    (
        f"Cache key mismatch: expected '{KEYS[0]}', found '{KEYS[1]}' in /c/{KEYS[0]}. The cache entry may",
        Breakdown(KEYS[0], f"Cache key mismatch: expected '{KEYS[0]}', found '{KEYS[1]}'"),
    ),
    (
        f"Shared compilation timeout after 600.1s in /c/{KEYS[1]}",
        Breakdown(KEYS[1], "Shared compilation timeout after 600.1s"),
    ),
    (
        "Lock holder process died - cache invalidated, please retry compilation",
        Breakdown("compile lock", "Lock holder process died - cache invalidated"),
    ),
    (
        f"Cannot save cache: local entry is incomplete at /c/{KEYS[0]}. Ensure compilation has",
        Breakdown(KEYS[0], "Cannot save cache: local entry is incomplete"),
    ),
]


@pytest.mark.parametrize(
    ("words", "breakdown"), BREAKDOWNS, ids=[one.name for _, one in BREAKDOWNS]
)
def test_what_broke_down_is_told_once(words: str, breakdown: Breakdown) -> None:
    """As the error of one process, of another, in the traceback of a third, and as why the engine ends."""
    end = f"Compilation failed - terminating process for cleanup: {words}"
    log = read_engine_log(
        [
            said(words, level="ERROR"),
            said(f"RuntimeError: {words}", process=RANKS[1], level="ERROR"),
            said(end, level="ERROR", place="cache.py"),
            f"FATAL: {words}",
        ]
    )
    assert log.breakdowns == (breakdown,)


def test_the_end_of_an_engine_tells_of_what_has_no_words_of_its_own() -> None:
    end = "Compilation failed - terminating process for cleanup"
    lines = [f"{end}: apply() takes no keyword arguments", f"{end}: [Errno 28] No space left", end]
    log = read_engine_log(
        [said(line, process=rank, level="ERROR") for line in lines for rank in RANKS]
    )
    assert log.breakdowns == tuple(Breakdown("compile", line) for line in lines)


def test_what_names_a_target_or_a_key_is_no_breakdown_beside() -> None:
    cause = "neuronx-cc compilation failed with 70. Check compiler logs."
    miss = f"VLLM_NEURON_ASSERT_CACHE_HIT: remote compile cache miss for key {KEYS[0]}. All graphs"
    log = read_engine_log(
        [
            f"RuntimeError: {cause}",
            f"Model warmup failed for decode (batch=4, seq=4096). Error: {cause}",
            f"Compilation failed - terminating process for cleanup: {miss}",
        ]
    )
    assert (log.breakdowns, log.misses) == ((), {KEYS[0]})
    assert [one.message for one in log.failures] == [cause]


@pytest.mark.parametrize(
    "line",
    [
        f"Remote fetch failed for key {KEYS[0]}: [Errno 5] — falling back to compile and store path",
        f"Local cache miss for key: {KEYS[0]}",
        f"Remote cache miss for key {KEYS[0]} — remote artifacts incomplete: /r/{KEYS[0]}",
        "Lock holder process 71 died or changed - invalidating cache entry and cleaning up lock files",
        "Waiting for shared compilation by process 71 (python3)",
        f"Quarantined incomplete Neuron HLO cache key {KEYS[0]} at /c/x",
        '    f"Parallel trace fork failed (rank={parent_rank}): {first_failure}"',
        "    f\"Cache key mismatch: expected '{hash_key}', found '{metadata.cache_key}'\"",
        '    f"neuronx-cc compilation failed with {status}. Check compiler logs."',
    ],
)
def test_what_the_engine_recovers_from_is_no_failure(line: str) -> None:
    log = read_engine_log([extracting(PAIRS), said(line, level="WARNING")])
    assert (log.breakdowns, log.failures, log.misses) == ((), (), frozenset())


ALL_WORDS = [
    "Initializing a V1 LLM engine (v0.1.0) with config: dtype=torch.float16",
    "Compiling a graph for compile range (1, 2048) takes 3.20 s",
    "Extracting 1 decode compile targets: [(64, 8192)]",
    "[1/1] Warming up decode (batch=64, seq=8192)",
    "Extracting graphs for 1 prefill buckets: [(64, 0)]",
    "Failed to warmup decode (batch=1, seq=4): no",
    "Capturing EAGLE3 decode graphs for 6 targets",
    f"Compilation cache key: {KEYS[0]}",
    f"Local cache hit for key: {KEYS[0]}",
    f"VLLM_NEURON_ASSERT_CACHE_HIT: remote compile cache miss for key {KEYS[0]}. All",
    "Compilation failed - terminating process for cleanup: no",
    *(words for words, _ in BREAKDOWNS),
]
QUOTING = {
    "request": lambda words: said(f"Received request cmpl-1: prompt: {words!r}, params: None"),
    "question": lambda words: said(f"Received request cmpl-1: prompt: 'why does {words} appear?'"),
    "log line": lambda words: said(
        f"Request cmpl-1 details: prompt: {'My log: ' + said(words)!r}, prompt_token_ids: None"
    ),
    "answer": lambda words: said(f"Generated response cmpl-1: output: {said(words)!r}, finish"),
    "stop words": lambda words: said(
        f"Received request x: params: SamplingParams(stop=[{words!r}])"
    ),
    "no place": lambda words: f"INFO 11-29 21:40:54 Received request x: prompt: {words!r}",
    "JSON": lambda words: json.dumps({"message": f"Received request x: prompt: {said(words)!r}"}),
    "JSON field": lambda words: json.dumps({"message": "Received request", "prompt": words}),
    "JSON in a request": lambda words: said("Invalid body " + json.dumps({"message": words})),
    "JSON as a message": lambda words: said(json.dumps({"message": words})),
    "sentence": lambda words: said(f"Added adapter for {words}", level="WARNING"),
}


@pytest.mark.parametrize("words", ALL_WORDS, ids=range(len(ALL_WORDS)))
def test_words_count_only_where_a_message_begins(words: str) -> None:
    start = [vllm_config(), extracting(PAIRS)]
    expected = read_engine_log(start)
    assert read_engine_log([*start, said(words)]) != expected, "they are an engine's own"
    for name, quoting in QUOTING.items():
        assert read_engine_log([*start, quoting(words)]) == expected, name


@pytest.mark.parametrize(
    "before",
    [
        "",
        "RuntimeError: ",
        "FATAL: ",
        "[rank0]: RuntimeError: ",
        "torch._dynamo.exc.BackendCompilerFailed: ",
        "ray.exceptions.RayTaskError(RuntimeError): ",
        "RuntimeError: Worker failed with error '",
        "  | RuntimeError: ",
        "(Worker_TP0 pid=71) ",
        "(RayWorkerWrapper pid=71, ip=10.0.0.1) ",
        said("RuntimeError: ", level="ERROR"),
        "E1129 21:40:54.123456 4011 vllm_neuron/backend.py:87] ",
        "2026-11-29T21:40:54Z stderr F RuntimeError: ",
        '{"level": "ERROR", "exc_info": "Traceback (most recent call last):\\n  no\\nRuntimeError: ',
    ],
)
def test_where_an_error_begins(before: str) -> None:
    log = read_engine_log([f"{before}neuronx-cc compilation failed with 70. Check compiler logs."])
    assert log.breakdowns == (Breakdown("neuronx-cc", "neuronx-cc compilation failed with 70"),)


def test_messages_without_processes_that_share_a_line_are_two() -> None:
    first, second = (
        said(f"Compiling a graph for compile range (1, {end}) takes 3.20 s").partition(") ")[2]
        for end in (8, 512)
    )
    assert read_engine_log([first + second]).ranges == {(1, 8), (1, 512)}


VLLM_LOG = """\
W1129 22:05:49.356000 12449 torch/_library/triton.py:53] Triton not available
(APIServer pid=12449) INFO 11-29 22:05:50 [api_utils.py:347]   █▄█▀ █     █     █     █  model   /srv/tiny
(APIServer pid=12449) INFO 11-29 22:05:50 [api_utils.py:286] non-default args: {'model': '/srv/tiny'}
(EngineCore pid=12840) INFO 11-29 22:06:31 [core.py:122] Initializing a V1 LLM engine (v0.32.0) with config: \
model='/srv/tiny', dtype=torch.float32, max_seq_len=512, data_parallel_size=1, compilation_config={'mode': \
<CompilationMode.VLLM_COMPILE: 3>, 'backend': 'inductor', 'compile_sizes': [], \
'compile_ranges_endpoints': [2048]}
(EngineCore pid=12840) INFO 11-29 22:06:31 [ompmultiprocessing.py:185] \tlocal_rank=0, core ids=[0]
(EngineCore pid=12840) INFO 11-29 22:06:40 [backends.py:371] Cache the graph of compile \
range (1, 2048) for later use
(EngineCore pid=12840) INFO 11-29 22:06:42 [backends.py:389] Compiling a graph for compile \
range (1, 1024) takes 3.76 s
(EngineCore pid=12840) INFO 11-29 22:06:42 [backends.py:208] Directly load the compiled graph(s) for compile \
range (1, 512) from the cache, took 0.120 s
(EngineCore pid=12840) DEBUG 11-29 22:06:42 [backends.py:215] Directly load the 0-th graph for compile \
range (1, 256)from inductor via handle x
(APIServer pid=12449) INFO:     127.0.0.1:53122 - "GET /health HTTP/1.1" 200 OK
"""


def test_a_log_of_vllm() -> None:
    log = read_engine_log(VLLM_LOG.splitlines())
    [settings] = log.settings
    assert (settings.version, settings.mode, settings.backend) == ("0.32.0", 3, "inductor")
    assert log.ranges == {(1, 2048), (1, 1024), (1, 512), (1, 256)}


def test_a_breakdown_of_an_earlier_start_is_no_matter_to_the_last() -> None:
    broken = said("Parallel trace fork failed (rank=0): no", level="ERROR")
    assert read_engine_log([*started(PAIRS), broken, *started(PAIRS)]).breakdowns == ()
    log = read_engine_log([broken, *started(PAIRS)])
    assert (log.starts, log.breakdowns) == (2, ())


def test_cache_keys() -> None:
    one, two, three = ("0" * 31 + digit for digit in "123")
    log = read_engine_log(
        [
            said(f"Compilation cache key: {one}"),
            said(f"Compilation cache key: {two}"),
            said(f"Local cache hit for key: {two}. Skipping graph capture."),
            f"VLLM_NEURON_DISABLE_WARMUP_COMPILE: local compile cache miss for key {three}.",
            said("Compilation cache key: deadbeef"),
        ]
    )
    assert (log.keys, log.hits, log.misses) == ({one, two}, {two}, {three})


def test_a_config_of_vllm() -> None:
    speculation = "SpeculativeConfig(method='eagle3', model='/srv/draft', num_spec_tokens=5)"
    line = vllm_config(
        speculation=speculation, sizes="[1, 8]", ends="[512, 2048]", captures="[1, 2, 4]"
    )
    [settings] = read_engine_log([line, line]).settings
    assert dict(settings.options) == {
        "max_model_len": 4096,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "dtype": "bfloat16",
        "num_speculative_tokens": 5,
    }
    assert (settings.version, settings.mode, settings.backend) == ("0.32.0", 2, "neffbuild")
    assert (settings.compile_sizes, settings.capture_sizes) == ((1, 8), (1, 2, 4))
    assert settings.ranges == {(1, 512), (513, 2048)}
    [without] = read_engine_log([vllm_config()]).settings
    assert dict(without.options)["num_speculative_tokens"] == 0


FRAGMENTS = [
    extracting(PAIRS),
    prefilling([(512, 0)]),
    *steps(PAIRS[:1]),
    vllm_config(),
    "Compiling a graph for compile range (1, 2048) takes 3.20 s",
    "Failed to warmup decode (batch=1, seq=4): ",
    *(words for words, _ in BREAKDOWNS),
    "Compilation failed - terminating process for cleanup: ",
    "[" * 50,
    "(" * 50,
    "99999999999999999999",
    "\x1b[",
    "\0",
    "\ud800",
    "pid=",
]


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.sampled_from(FRAGMENTS),
                st.text(max_size=20),
                st.tuples(st.sampled_from(FRAGMENTS), st.integers(0, 200)).map(
                    lambda cut: cut[0][: cut[1]]
                ),
            ),
            max_size=4,
        ).map("".join),
        max_size=6,
    )
)
@example(["Extracting 6 decode compile targets: [" + "(1, " * 10_000])
@example(["Extracting 99999999999 decode compile targets: [(1, 99999999999)]"])
def test_no_line_is_too_strange(lines: list[str]) -> None:
    log = read_engine_log(lines)
    assert log.decode.named == bool(log.decode.all)
    for one in log.decode.lists:
        assert len(one) > 0 or "Extracting 0" in "".join(lines)


def test_a_hundred_thousand_other_lines_are_passed_over() -> None:
    other = (said(f"Route: /v{number}, Methods: POST") for number in range(100_000))
    assert read_engine_log([*other, extracting(PAIRS)]).decode.lists == WHOLE.lists
