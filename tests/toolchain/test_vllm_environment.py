"""Which of vLLM's variables make another unit."""

from __future__ import annotations

from neffbuild.toolchain.inductor.vllm_environment import keyed_environment


def test_what_changes_no_graph_or_is_nobodys_business_is_no_ingredient() -> None:
    inert = {
        "VLLM_SERVICE_HOST": "10.0.0.7",
        "VLLM_SERVICE_PORT": "8000",
        "VLLM_SERVICE_PORT_HTTP": "8000",
        "VLLM_LLAMA_SERVICE_HOST": "10.0.0.8",
        "VLLM_PORT_8000_TCP_ADDR": "10.0.0.7",
        "VLLM_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "VLLM_PLUGINS": "neffbuild",
        "VLLM_FOO_TOKEN": "hunter2",
        "VLLM_API_KEY": "hunter2",
        "PATH": "/bin",
    }
    assert keyed_environment({**inert, "VLLM_SOMETHING_NEW": "1"}) == {"VLLM_SOMETHING_NEW": "1"}
