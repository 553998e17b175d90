"""A long lawful stream, for tests of speed and of large dumps."""

from __future__ import annotations

from functools import partial

from flashrt.ir import micro, physical
from flashrt.ir.order import COMPUTE
from flashrt.ir.types import Dim, Input, Output, Symbol, TensorType, Weight, sym


def streamed(layers: int) -> micro.Stream:
    """Eight instructions a layer on five lanes of two devices: a weight ring four deep on the gpu, a split
    linear, copies both ways."""
    depth, size, s0 = 4, 1024, sym("s0")
    step = 4 * size * size
    slots: list[micro.Slot] = []
    instrs: list[micro.Instr] = []

    def slot(device: str, input: str = "") -> micro.SlotRef:
        slots.append(micro.Slot(len(slots), device, TensorType("f32", (sym("T"), size)), input=input))
        return micro.SlotRef(slots[-1].id)

    def part(ref: micro.SlotRef, lo: Dim, hi: Dim) -> micro.SlotRef:
        return micro.SlotRef(ref.slot, lo, hi)

    cpu = partial(micro.Dispatch, device="cpu:0", lane=COMPUTE)
    gpu = partial(micro.Dispatch, device="gpu:0", lane=COMPUTE)
    value = slot("cpu:0", "x")
    for layer in range(layers):
        tick, name = 8 * layer, f"w.{layer}"
        ring = (layer - depth) % layers
        wait = micro.Wait(8 * ring + 4, 0 if ring < layer else -1)
        here, there, half, whole = slot("cpu:0"), slot("gpu:0"), slot("gpu:0"), slot("cpu:0")
        node = f"layers.{layer}.linear"
        instrs += [
            micro.Prefetch(device="gpu:0", lane="copy_in", waits=(wait,), signals=tick, block=name, est=80,
                           bytes=step, node=node),
            cpu(signals=tick + 1, kernel="scale", args=(value,), attrs=(("by", 2),), dst=here,
                est=1 + sym("T"), node=node),
            micro.Transfer(device="cpu:0", lane="copy_out", waits=(micro.Wait(tick + 1),), signals=tick + 2,
                           src=here, dst=there, to="gpu:0"),
            cpu(kernel="linear.f32", args=(here, micro.BlockRef(name, 0, s0)), dst=part(whole, 0, s0), est=s0,
                bytes=4 * size * s0, node=node),
            gpu(waits=(micro.Wait(tick), micro.Wait(tick + 2)), signals=tick + 3, kernel="linear.f32",
                args=(there, micro.BlockRef(name, s0, size)), dst=part(half, s0, size), node=node),
            micro.Evict(device="gpu:0", lane="copy_in", waits=(micro.Wait(tick + 3),), signals=tick + 4,
                        block=name),
            micro.Transfer(device="gpu:0", lane="copy_out", waits=(micro.Wait(tick + 3),), signals=tick + 5,
                           src=part(half, s0, size), dst=part(whole, s0, size), to="cpu:0"),
            cpu(waits=(micro.Wait(tick + 5),), kernel="relu", args=(whole,), dst=here),
        ]  # fmt: skip
        value = here
    names = [f"w.{i}" for i in range(layers)]
    return micro.Stream(
        "streamed", (Symbol("T", 1, 512, 1),), (physical.Split("s0", tuple(range(0, size + 1, 16)), 512),),
        (Input("x", TensorType("f32", (sym("T"), size))),),
        tuple(Weight(n, TensorType("f32", (size, size)), (n,), "f32") for n in names), (), tuple(slots),
        tuple(b for i, n in enumerate(names) for b in (
            micro.Block(n, "gpu:0", 0, size, step, offset=i % depth * step),
            micro.Block(n, "cpu:0", 0, size, step, home="resident"))),
        tuple(instrs), (Output("y", f"%{value.slot}"),),
    )  # fmt: skip
