"""A stand-in for vLLM Neuron of the 0.24 line: the switches, files and log lines of its compile at start
that are published. It compiles with the neuronx-cc on PATH and imports nothing of neffbuild.

How to misbehave is said in the file `additional_config.control` of a config: see
`vllm_neuron.compile.faults`.
"""
