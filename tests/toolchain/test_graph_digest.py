"""The graph digest: equal for equal programs, different for different ones."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from dynamo_samples import digest_of, with_dynamic
from toolchain_samples import decode, speculative_build, tiny_build
from torch import fx
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from neffbuild.config.errors import ToolchainRefusal
from neffbuild.grid.shapes import Family
from neffbuild.toolchain.graph_digest import graph_digest
from neffbuild.toolchain.inductor.capture import capture_unit


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def scaled_sum(x, y):
    return (x * 2.0 + y).sum(dim=-1)


def scaled_sum_written_differently(first, second):
    """Other names, a comment and another file line; the same program."""
    product = first * 2.0
    # nothing that a compiler would see
    return (product + second).sum(dim=-1)


BASE = (torch.ones(4, 8), torch.ones(4, 8))

DIFFERENT = {
    "shape": (torch.ones(4, 16), torch.ones(4, 16)),
    "strides": (torch.ones(8, 4).T, torch.ones(4, 8)),
    "dtype": (torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 8)),
    "device": (torch.ones(4, 8, device="meta"), torch.ones(4, 8, device="meta")),
}


def test_names_comments_and_values_are_not_in_it():
    expected = digest_of(scaled_sum, *BASE)
    assert digest_of(scaled_sum_written_differently, *BASE) == expected
    assert digest_of(scaled_sum, torch.zeros(4, 8), torch.rand(4, 8)) == expected


@pytest.mark.parametrize("inputs", DIFFERENT.values(), ids=DIFFERENT)
def test_what_a_tensor_is_like_is_in_it(inputs):
    assert digest_of(scaled_sum, *inputs) != digest_of(scaled_sum, *BASE)


CHANGED_PROGRAMS = {
    "constant": lambda x, y: (x * 3.0 + y).sum(dim=-1),
    "type of a constant": lambda x, y: (x * 2 + y).sum(dim=-1),
    "keyword argument": lambda x, y: (x * 2.0 + y).sum(dim=-1, keepdim=True),
    "operation": lambda x, y: (x * 2.0 - y).sum(dim=-1),
    "method": lambda x, y: (x * 2.0 + y).mean(dim=-1),
    "which input": lambda x, y: (y * 2.0 + x).sum(dim=-1),
    "order of outputs": lambda x, y: ((x * 2.0 + y).sum(dim=-1), x + 1),
    "in place": lambda x, y: (x.mul_(2.0) + y).sum(dim=-1),
}


def test_what_is_computed_is_in_it():
    digests = [digest_of(program, *BASE) for program in CHANGED_PROGRAMS.values()]
    digests.append(digest_of(scaled_sum, *BASE))
    # Inputs come in the order of their first use: swapping both is the same program of two equal ones.
    swapped = list(CHANGED_PROGRAMS).index("which input")
    assert digests[swapped] == digests[-1]
    assert len(set(digests)) == len(digests) - 1


def test_a_symbolic_size_is_in_it_and_how_large_it_was_is_not():
    def first_rows(pool, table):
        return pool[table] + pool.shape[0]

    table = torch.tensor([1, 2])
    digests = {
        digest_of(first_rows, with_dynamic(torch.ones(blocks, 4)), table) for blocks in (8, 100)
    }
    assert len(digests) == 1
    assert digest_of(first_rows, torch.ones(8, 4), table) not in digests


def test_two_sizes_are_not_one_size_twice():
    def both(x, y):
        return x.sum() + y.sum() + x.shape[0] + y.shape[0]

    two = digest_of(both, with_dynamic(torch.ones(5, 3)), with_dynamic(torch.ones(6, 3)))
    one = digest_of(
        lambda x, y: x.sum() + y.sum() + x.shape[0] + x.shape[0],
        with_dynamic(torch.ones(5, 3)),
        with_dynamic(torch.ones(6, 3)),
    )
    assert two != one


def test_constants_and_branches_the_graph_carries_are_in_it():
    def branching(step):
        def program(x):
            return torch.cond(x.sum() > 0, lambda x: x + step, lambda x: x - 1.0, (x,))

        return program

    digests = [digest_of(branching(step), torch.ones(3)) for step in (1.0, 2.0, 1.0)]
    assert digests[0] == digests[2] != digests[1]


@dataclass(frozen=True)
class LayerName(OpaqueBase):
    """As vLLM names the layer an attention op works for: an input, not a tensor."""

    name: str

    def __fx_repr__(self):
        return f"LayerName({self.name!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)


@torch.library.custom_op("neffbuild_test::named_scale", mutates_args=())
def named_scale(x: torch.Tensor, layer: LayerName) -> torch.Tensor:
    return x * len(layer.name)


@named_scale.register_fake
def _(x, layer):
    return torch.empty_like(x)


def test_values_of_opaque_inputs_are_in_it():
    def digest(name):
        layer = LayerName(name)
        return digest_of(lambda x: named_scale(x, layer), torch.ones(3))

    assert digest("layers.0.attn") == digest("layers.0.attn")
    assert digest("layers.0.attn") != digest("layers.1.attn")


class Nameless:
    """Callable, but only an address tells which one."""

    def __call__(self, x):
        return x


def test_what_has_no_stable_description_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    call = graph.call_function(torch.add, (x, 1))
    graph.output(call)
    module = fx.GraphModule({}, graph)
    graph_digest(module)
    call.args = (x, object())
    with pytest.raises(ToolchainRefusal, match="has no stable description"):
        graph_digest(module)
    call.args = (x, 1)
    call.target = Nameless()
    with pytest.raises(ToolchainRefusal, match="has no name"):
        graph_digest(module)
    call.target = torch.add
    del x.meta["example_value"]
    with pytest.raises(ToolchainRefusal, match="no example value"):
        graph_digest(module)


def digests_of_two_units() -> list[str]:
    spec = speculative_build([0, 2]), decode(2, 3, 128, Family.TARGET_WITH_SPEC)
    return [capture_unit(*work).graph_digest for work in ((tiny_build(), decode(2)), spec)]


@pytest.fixture
def ops():
    library = torch.library.Library("neffbuild_test", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    yield library
    library._destroy()


def test_an_op_whose_body_would_be_in_the_program_is_refused(ops):
    """Only its name is in the digest: another body under that name would be served the old program."""
    ops.impl("scaled", lambda x: x * 2, "CompositeImplicitAutograd")
    for call in (torch.ops.neffbuild_test.scaled, torch.ops.neffbuild_test.scaled.default):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="neffbuild_test::scaled, which torch takes apart"):
            digest_of(lambda x, call=call: call(x), torch.ones(4))


def test_an_op_that_the_program_calls_is_known_by_its_name(ops):
    ops.impl("scaled", lambda x: x * 2, "CompositeExplicitAutograd")
    assert digest_of(lambda x: torch.ops.neffbuild_test.scaled(x), torch.ones(4))


def test_a_function_that_dynamo_was_told_not_to_trace_is_refused():
    def halved(x):
        return x / 2

    opaque_to_dynamo = torch._dynamo.allow_in_graph(halved)
    with pytest.raises(Exception, match="halved, whose code would become part of the program"):
        digest_of(lambda x: opaque_to_dynamo(x), torch.ones(4))


def test_another_process_folder_home_and_hash_seed_give_the_same(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_graph_digest as here; "
        "print(*here.digests_of_two_units())"
    )
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "4711",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "USER": "somebody-else",
        "OMP_NUM_THREADS": "1",
    }
    completed = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    here = digests_of_two_units()
    assert completed.stdout.split() == here
    assert here[0] != here[1]
