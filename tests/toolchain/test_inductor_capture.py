"""Capturing: the same way `torch.compile` goes, without memory, for any number of shapes."""

from __future__ import annotations

import resource

import pytest
import torch
from dynamo_samples import dynamo_graph, with_dynamic
from toolchain_samples import decode, speculative_build, tiny_build

from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.shapes import Family
from neffbuild.models.decode import (
    allocate_kv_caches,
    build_decoder,
    mark_num_blocks_symbolic,
    named_kv_caches,
    named_tensors,
    step_inputs,
)
from neffbuild.toolchain.graph_digest import graph_digest
from neffbuild.toolchain.inductor.capture import (
    capture_graph,
    capture_unit,
    one_shape_callable,
    plain_graph,
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def test_more_shapes_than_the_recompile_limit_are_captured_in_one_process():
    config = tiny_build(architecture={"num_hidden_layers": 1})
    digests = {
        capture_unit(config, decode(batch, 1, context)).graph_digest
        for batch in (1, 2, 3)
        for context in (32, 64, 128)
    }
    assert len(digests) == 9 > torch._dynamo.config.recompile_limit


def test_torch_compile_with_real_weights_and_another_pool_gives_the_same_graph():
    config, shape = tiny_build(architecture={"tie_word_embeddings": True}), decode(2)
    model = build_decoder(config, shape.family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    kv_caches = allocate_kv_caches(model.architecture, torch.float32, 33, 16)
    mark_num_blocks_symbolic(kv_caches)
    module, example_inputs = dynamo_graph(
        one_shape_callable(model), *step_inputs(shape, 16), kv_caches
    )
    captured = capture_unit(config, shape)
    assert graph_digest(module) == captured.graph_digest
    names = [spec.name for spec in captured.graph.binding.inputs]
    assert names == [
        spec.name for spec in capture_graph(module, example_inputs).graph.binding.inputs
    ]
    known = named_tensors(model) | named_kv_caches(kv_caches) | step_inputs(shape, 16)._asdict()
    assert set(names) <= set(known)
    # The tied head is one tensor: one input, under the name the graph meets first.
    assert set(known) - set(names) == {"lm_head.weight"}


def test_the_families_differ_in_what_they_return():
    config = speculative_build([0, 2])
    outputs = {
        family: capture_unit(config, decode(2, 1, 64, family)).graph.binding.outputs
        for family in (Family.TARGET, Family.TARGET_WITHOUT_SPEC)
    }
    assert outputs == {
        Family.TARGET: ("next_token_ids", "logits"),
        Family.TARGET_WITHOUT_SPEC: ("next_token_ids", "logits", "auxiliary_hidden_states"),
    }


def test_the_pool_size_is_any_and_every_other_size_is_fixed():
    binding = capture_unit(tiny_build(), decode(2)).graph.binding
    shapes = {spec.name: spec.shape for spec in binding.inputs}
    assert shapes["kv_caches.1.0"] == (None, 16, 2, 16)
    assert shapes["block_table"] == (2, 8)
    assert all(None not in shape for name, shape in shapes.items() if "kv_caches" not in name)


def test_an_eight_billion_parameter_width_is_captured_without_touching_its_weights():
    published = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    config = tiny_build(architecture=published, serve={"max_model_len": 131072, "block_size": 128})
    capture_unit(tiny_build(), decode(1))  # imports and caches, not to be counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture_unit(config, decode(4, 1, 131072))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    inputs = captured.graph.example_inputs
    assert sum(tensor.numel() * tensor.element_size() for tensor in inputs) > 5 << 30
    assert grown << 10 < 300 << 20


def test_a_size_the_graph_uses_is_read_off_a_tensor():
    def program(x, y):
        return x.sum(dim=0) / x.shape[0] + torch.arange(x.shape[0] + y.shape[0]).sum() - y.sum()

    module, example_inputs = dynamo_graph(
        program, with_dynamic(torch.ones(6, 4)), with_dynamic(torch.ones(9, 4))
    )
    plain, kept, names = plain_graph(module)
    inputs = [example_inputs[index] for index in kept]
    assert (len(example_inputs), names) == (4, ())
    assert [tensor.shape[0] for tensor in inputs] == [6, 9]
    for rows in (6, 1, 11):
        x, y = torch.rand(rows, 4), torch.rand(2 * rows, 4)
        torch.testing.assert_close(plain(x, y)[0], program(x, y))
    assert len(module.graph.find_nodes(op="placeholder")) == 4, "Dynamo's own graph is untouched"


def test_a_size_no_tensor_has_is_refused():
    """Dynamo drops a tensor of which only the size is used, and passes the size alone."""
    module, inputs = dynamo_graph(
        lambda x, y: x + y.shape[0], torch.ones(3), with_dynamic(torch.ones(9, 4))
    )
    assert len(inputs) == 2
    with pytest.raises(ToolchainRefusal, match="no tensor input has"):
        plain_graph(module)


def test_modes_the_graph_does_not_show_are_refused():
    module, inputs = dynamo_graph(lambda x: x @ x, torch.ones(4, 4))
    capture_graph(module, inputs)
    with torch.autocast("cpu"), pytest.raises(ToolchainRefusal, match="autocast"):
        capture_graph(module, inputs)
    learning = [torch.ones(4, 4, requires_grad=True)]
    with pytest.raises(ToolchainRefusal, match="require gradients"):
        capture_graph(module, learning)
    with torch.no_grad():
        capture_graph(module, learning)


def test_outputs_that_are_no_tensors_are_refused():
    module, inputs = dynamo_graph(lambda x: (x + 1, x.shape[0] + 1), with_dynamic(torch.ones(6, 4)))
    with pytest.raises(ToolchainRefusal, match="only tensors can be returned"):
        capture_graph(module, inputs)
