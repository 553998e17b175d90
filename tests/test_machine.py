"""The machine picture: JSON both ways, and a fingerprint of the hardware alone."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import ParseError, PlanError
from flashrt.machine import Device, Link, Machine, Measured, Workspace, from_json, to_json

numbers = st.floats(0, 1e15, allow_nan=False)
words = st.text(max_size=8)
measured = st.builds(Measured, numbers, st.sampled_from(["measured", "reported", "assumed"]))
devices = st.builds(
    Device,
    id=words, kind=words, name=words, memory=st.integers(0, 2**50), read=measured,
    rates=st.dictionaries(st.sampled_from(["f32", "bf16", "i8"]), measured),
    launch=measured, cores=st.integers(1, 256),
    kernels=st.lists(st.tuples(words, words), max_size=3).map(tuple),
    features=st.lists(words, max_size=3).map(tuple),
    free=st.none() | st.integers(0, 2**50), load=st.none() | st.floats(0, 1),
    cpus=st.lists(st.integers(0, 255), max_size=3).map(tuple),
    limit=st.none() | st.integers(1, 2**50), pool=words, gemv=st.none() | measured,
)  # fmt: skip
links = st.builds(Link, words, words, measured, measured)
machines = st.builds(
    Machine,
    devices=st.lists(devices, max_size=3).map(tuple),
    links=st.lists(links, max_size=3).map(tuple),
    taken_at=numbers,
)

CPU = Device(
    "cpu:0", "cpu", "Some CPU", 10**10, Measured(2e10, "measured"), {"f32": Measured(1e11, "assumed")},
    Measured(1.0, "assumed"), cores=8, kernels=(("linear.f32", "acc=f32"),), features=("avx2",),
    free=10**9, load=0.5,
)  # fmt: skip
GPU = replace(CPU, id="gpu:0", kind="gpu", name="Some GPU")
PAIR = Machine(
    (CPU, GPU), (Link("cpu:0", "gpu:0", Measured(1e10, "measured"), Measured(9.0, "reported")),), 5.0
)


@given(machines)
def test_json_round_trip(machine: Machine) -> None:
    """Everything reads back, the time included (which equality leaves out)."""
    back = from_json(to_json(machine))
    assert back == machine
    assert back.taken_at == machine.taken_at
    assert to_json(back) == to_json(machine)


# a change that makes it other hardware, for each field of a device; the rest is passing or measured
HARDWARE: dict[str, Any] = {
    "id": "cpu:1", "kind": "npu", "name": "Other", "memory": 1, "cores": 9,
    "kernels": (("linear.q4.16x32", "acc=f32"),), "features": ("avx2", "amx"),
    "cpus": (0, 1), "limit": 10**9, "pool": "host", "workspace": {"sample": Workspace(core=1)},
}  # fmt: skip
PASSING: dict[str, Any] = {
    "read": Measured(1.0, "reported"), "rates": {}, "launch": Measured(7.0, "measured"),
    "free": None, "load": 0.9, "gemv": Measured(1.0, "measured"),
}  # fmt: skip


def test_every_field_is_one_or_the_other() -> None:
    assert {f.name for f in fields(Device)} == set(HARDWARE) | set(PASSING)


@pytest.mark.parametrize("name", PASSING)
def test_fingerprint_ignores(name: str) -> None:
    changed = replace(PAIR, devices=(replace(CPU, **{name: PASSING[name]}), GPU))
    assert changed.fingerprint() == PAIR.fingerprint()


@pytest.mark.parametrize("name", HARDWARE)
def test_fingerprint_sees(name: str) -> None:
    changed = replace(PAIR, devices=(replace(CPU, **{name: HARDWARE[name]}), GPU))
    assert changed.fingerprint() != PAIR.fingerprint()


def test_fingerprint_ignores_time_links_and_the_order_of_kernels() -> None:
    two = (("a", "x"), ("b", "y"))
    one = Machine((replace(CPU, kernels=two, features=("p", "q")),))
    other = Machine((replace(CPU, kernels=two[::-1], features=("q", "p")),), PAIR.links, taken_at=99.0)
    assert one.fingerprint() == other.fingerprint()


def test_look_ups() -> None:
    assert PAIR.device("gpu:0") is GPU
    with pytest.raises(PlanError, match="no device 'npu:0'\ndevices: cpu:0, gpu:0"):
        PAIR.device("npu:0")
    assert PAIR.link("cpu:0", "gpu:0").rate == Measured(1e10, "measured")
    assert PAIR.link("gpu:0", "cpu:0").rate.how == "assumed"
    assert CPU.supports("linear.f32", "acc=f32") and not CPU.supports("linear.f32", "acc=f16")
    assert CPU.budget == 9 * 10**9
    assert replace(CPU, limit=5).budget == 5
    kernels = PAIR.with_kernels({"gpu": (("k", "n"),)})
    assert [d.kernels for d in kernels.devices] == [CPU.kernels, (("k", "n"),)]


def test_a_picture_from_before_core_groups() -> None:
    """Plans made then have neither cores, limit nor pool in their machine.json."""
    raw = json.loads(to_json(PAIR))
    for device in raw["devices"]:
        for name in ("cpus", "limit", "pool"):
            del device[name]
    assert from_json(json.dumps(raw)) == PAIR


def test_a_picture_from_before_products_were_measured() -> None:
    raw = json.loads(to_json(PAIR))
    for device in raw["devices"]:
        del device["gemv"]
    assert from_json(json.dumps(raw)) == PAIR


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"devices": [], "links": 3, "taken_at": 0}', '{"devices": {}, "links": []}',
     '{"devices": [{"id": "x"}], "links": [], "taken_at": 0}', to_json(PAIR)[:-20],
     to_json(PAIR).replace('"cores"', '"corse"'), to_json(PAIR).replace('"read": {', '"read": [{')],
)  # fmt: skip
def test_not_a_picture(text: str) -> None:
    with pytest.raises(ParseError, match=r"^some/machine\.json: not a machine picture"):
        from_json(text, path="some/machine.json")


@given(st.none() | st.integers() | words | st.lists(words) | st.dictionaries(words, words))
def test_garbage(value: object) -> None:
    with pytest.raises(ParseError):
        from_json(json.dumps({"devices": [value], "links": [], "taken_at": 0}))


def test_rates_that_can_be_measured() -> None:
    """Of types of activations that no kernel takes nothing can be known: nobody is asked to measure them."""
    kernels = (("linear.q4.16x32", "act=i8/32 acc=f32"),)
    device = Device(
        "cpu:0", "cpu", "", 1, Measured(1, "assumed"), {}, Measured(1, "assumed"), kernels=kernels
    )
    assert [r for r in ("read", "gemv", "f32", "i8", "bf16") if device.measurable(r)] == [
        "read", "gemv", "f32", "i8"
    ]  # fmt: skip
