"""tag: every node says where it may run, and why."""

from __future__ import annotations

from flashrt.ir.ops import OPS
from flashrt.ir.text import to_text
from flashrt.passes.recognise import recognise
from flashrt.passes.tag import NO_KERNEL, tag
from tests.passes.evaluating import raw


def test_named_operations_take_both_from_the_table() -> None:
    got = tag(recognise(raw("llama")))
    for node in got.nodes:
        assert (node.affinity, node.why) == (OPS[node.op].affinity, OPS[node.op].why)
    assert next(n for n in got.nodes if n.op == "attention").affinity == ("gpu", "cpu")


def test_raw_operators_run_on_the_host_and_say_so() -> None:
    nodes = {n.name: n for n in tag(recognise(raw("mlp"))).nodes}
    assert (nodes["softmax"].affinity, nodes["softmax"].why) == (("cpu",), NO_KERNEL)


def test_golden(golden) -> None:  # type: ignore[no-untyped-def]
    golden("tag/mlp.logical", to_text(tag(recognise(raw("mlp")))))
