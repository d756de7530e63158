"""A stand-in for vLLM: of its start, what concerns a platform's plugin. It imports nothing of neffbuild."""

from __future__ import annotations

import logging
from typing import Any

from vllm.engine.arg_utils import EngineArgs


class LLM:
    """Comes up as far as the worker's warm-up."""

    def __init__(self, **options: Any) -> None:
        logging.basicConfig(
            level="INFO", format="(Worker_TP0) %(levelname)s [%(filename)s:%(lineno)d] %(message)s"
        )
        args = EngineArgs(**options)
        from vllm_neuron.vllm.worker.neuron_worker import NeuronWorker

        worker = NeuronWorker(args)
        worker.load_model()
        worker.compile_or_warm_up_model()
