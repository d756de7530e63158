"""Steps counted under vLLM Neuron's own metric names, so that its dashboards show ours too.

Names, labels and histogram buckets are those of `vllm_neuron/metrics.py`, of its model runner and of its
scheduler (0.24). What it has no name for is ours, `neffbuild_…`. Needs `prometheus_client`, which adds up
the processes of an engine where `PROMETHEUS_MULTIPROC_DIR` is set before it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from neffbuild.config.build import BuildConfig
from neffbuild.config.errors import ConfigError, MissingExtra
from neffbuild.grid.bucketer import Bucketer
from neffbuild.grid.labels import engine_labels
from neffbuild.grid.shapes import DecodeShape, Family, PrefillShape, Shape

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_DRAFTS = (Family.DRAFT, Family.DRAFT_PREFILL)


class StepMetrics:
    """A `StepObserver` that counts in a registry of `prometheus_client`, by default in the one that vLLM
    serves at `/metrics`. All metrics have the labels `model_name` and `bucket_name`.

    - `vllm_neuron:neff_execution_count`: programs run. `bucket_name` has the live rows, not the bucket
      (`decode_b3`; with speculation `decode_b3_s6`), and no context, with context buckets or without; an
      idle rank's is `decode_b0`. A draft's is the engine's label of its program, `model_name` the draft's.
    - `vllm_neuron:num_seqs_padding`: pad rows of a decode step, by the bucket it ran in (`decode_b4`).
    - `vllm_neuron:num_batched_tokens_padding`: pad tokens of a prefill step (`prefill_s512`).
    - `neffbuild_fallback_steps`: programs run in place of `bucket_name`, which is not stored.
    - `neffbuild_missing_steps`: steps refused because `bucket_name` is not stored.
    """

    def __init__(
        self,
        model_name: str,
        *,
        draft_model_name: str = "",
        method: str | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`method` is that of the speculation. Raises `MissingExtra` without `prometheus_client`,
        `ConfigError` where the registry has metrics of these names from somebody else, or the directory
        that processes share cannot be written."""
        self._collectors = _collectors(registry)
        self._model_names = (model_name, draft_model_name)
        self._method = method
        self._counts: dict[tuple[DecodeShape, int], Callable[[], None]] = {}
        self._padding: dict[int, Callable[[float], None]] = {}

    @classmethod
    def from_config(
        cls,
        config: BuildConfig,
        bucketer: Bucketer,
        *,
        registry: CollectorRegistry | None = None,
    ) -> Self:
        """Of a serving config. The histograms of all its buckets are there from the start, as vLLM
        Neuron's scheduler has them. Raises as the constructor does."""
        speculation = config.serve.speculative_config
        metrics = cls(
            config.serve.model,
            draft_model_name=speculation.model if speculation else "",
            method=speculation.method if speculation else None,
            registry=registry,
        )
        for decode in bucketer.decode.values():
            for num_seqs in decode.num_seqs.rungs:
                metrics._rows_padding(num_seqs)
        for prefill in bucketer.prefill.values():
            for tokens in prefill.num_batched_tokens.rungs:
                metrics._tokens_padding(tokens)
        return metrics

    def ran(self, wanted: DecodeShape, program: DecodeShape, rows: int) -> None:
        count = self._counts.get((program, rows))
        if count is None:
            # Looking a label up takes longer than counting.
            name = execution_label(program, rows, self._method)
            child = self._child(self._collectors.executions, program, name)
            count = self._counts[program, rows] = child.inc
        count()
        if program.family is not Family.DRAFT:
            self._rows_padding(program.num_seqs)(program.num_seqs - rows)
        if wanted != program:
            self._child(self._collectors.fallbacks, wanted, wanted.bucket_name).inc()

    def missed(self, wanted: DecodeShape) -> None:
        self._child(self._collectors.misses, wanted, wanted.bucket_name).inc()

    def ran_prefill(self, program: PrefillShape, tokens: int) -> None:
        """A prefill step of so many tokens, in an engine that prefills with stored programs itself."""
        name = execution_label(program, 1, self._method)
        self._child(self._collectors.executions, program, name).inc()
        if program.family is Family.PREFILL:
            most = program.num_batched_tokens
            self._tokens_padding(most)(most - tokens)

    def _rows_padding(self, num_seqs: int) -> Callable[[float], None]:
        observe = self._padding.get(num_seqs)
        if observe is None:
            child = self._collectors.rows_padding.labels(
                self._model_names[0], f"decode_b{num_seqs}"
            )
            observe = self._padding[num_seqs] = child.observe
        return observe

    def _tokens_padding(self, tokens: int) -> Callable[[float], None]:
        child = self._collectors.tokens_padding.labels(self._model_names[0], f"prefill_s{tokens}")
        observe: Callable[[float], None] = child.observe
        return observe

    def _child(self, collector: Any, shape: Shape, bucket_name: str) -> Any:
        return collector.labels(self._model_names[shape.family in _DRAFTS], bucket_name)


def execution_label(program: Shape, rows: int, method: str | None = None) -> str:
    """`bucket_name` of `vllm_neuron:neff_execution_count` for a program run with so many live rows, under
    speculation by `method`."""
    if isinstance(program, DecodeShape) and program.family is not Family.DRAFT:
        tokens = "" if program.family is Family.TARGET else f"_s{program.query_len}"
        return f"decode_b{rows}{tokens}"
    return next(iter(engine_labels(program, method)), program.bucket_name)


class _Collectors(NamedTuple):
    executions: Any
    rows_padding: Any
    tokens_padding: Any
    fallbacks: Any
    misses: Any


_registered: WeakKeyDictionary[Any, _Collectors] = WeakKeyDictionary()


def _collectors(registry: CollectorRegistry | None) -> _Collectors:
    """The metrics of a registry, which takes each name once."""
    try:
        from prometheus_client import REGISTRY, Counter, Histogram
    except ImportError as error:
        raise MissingExtra(
            "counting steps needs prometheus_client, which is not installed",
            field="observer",
            hint="pip install 'neffbuild[metrics]'",
        ) from error
    registry = registry or REGISTRY
    if registry in _registered:
        return _registered[registry]
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if shared is not None and not os.access(shared, os.W_OK | os.X_OK):
        raise ConfigError(
            f"PROMETHEUS_MULTIPROC_DIR is {shared!r}, which is no directory that can be written",
            field="PROMETHEUS_MULTIPROC_DIR",
            value=shared,
            hint="make it, empty, before the engine starts; all processes of the engine count into it",
        )
    common: dict[str, Any] = {"labelnames": ("model_name", "bucket_name"), "registry": registry}
    try:
        made = _Collectors(
            Counter("vllm_neuron:neff_execution_count", "Number of NEFF executions.", **common),
            Histogram(
                "vllm_neuron:num_seqs_padding",
                "Pad rows of a decode step.",
                buckets=[2**power for power in range(8)],
                **common,
            ),
            Histogram(
                "vllm_neuron:num_batched_tokens_padding",
                "Pad tokens of a prefill step.",
                buckets=[2**power for power in range(5, 15)],
                **common,
            ),
            Counter(
                "neffbuild_fallback_steps",
                "Programs run in place of this one, which is not stored.",
                **common,
            ),
            Counter(
                "neffbuild_missing_steps", "Steps refused, their program not stored.", **common
            ),
        )
    except ValueError as error:
        raise ConfigError(
            f"the metrics of steps cannot be registered: {error}",
            field="registry",
            hint="something else of this process counts under these names; hand in a registry of your own",
        ) from error
    _registered[registry] = made
    return made
