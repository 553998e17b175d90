"""A language model's configuration → its raw logical graph. No weight is needed or read."""

from __future__ import annotations

import copy
import gc
import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashrt.errors import UnsupportedModel
from flashrt.frontend import complex_rope, expert_weights, hooks, names, renamed, rope, spelled, trace
from flashrt.frontend import positions as positions_of_ranges
from flashrt.ir.logical import Graph, Node
from flashrt.ir.ops import PAGE
from flashrt.ir.types import Dim, Input, Output, State, Symbol, TensorType, Weight, attrs, sym

TOKENS = 512  # most tokens of one step
ROWS = 64  # most rows of logits, and most sequences, of one step
WRAPPER = "lm"
EXAMPLE_TOKENS, EXAMPLE_ROWS = 11, 3  # unequal and above 1, else export takes them for constants


@dataclass(frozen=True, slots=True)
class Traced:
    """A language model as data.

    constants: values of what no file holds, by the name its weight has as source.
    transposed: sources that a Hugging Face checkpoint stores as [in, out]; the graph means [out, in].
    aliases: source → other names a checkpoint may hold the same tied tensor under.
    prefix: the model's common part of names ("model", "transformer").
    conversions: how transformers' loader renames a checkpoint's tensors.
    """

    graph: Graph
    constants: Mapping[str, NDArray[np.generic]]
    transposed: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]
    prefix: str
    conversions: renamed.Conversions


class FlatLM(torch.nn.Module):
    """(ids i32[T], positions i32[T], rows i32[N]) → logits [N,V]: a transformers model over a flat batch.

    given: whether the model is told positions, or counts them itself.
    """

    def __init__(self, lm: torch.nn.Module, given: bool) -> None:
        super().__init__()
        self.lm, self.given = lm, given
        self.selects = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kept = {"logits_to_keep": rows} if self.selects else {}
        out = self.lm(
            input_ids=ids.view(1, -1),
            position_ids=positions.view(1, -1) if self.given else None,
            use_cache=False,
            **kept,
        )
        logits: torch.Tensor = out.logits[0]
        return logits if self.selects else logits[rows]


def build(
    config: Any, device: str, context: int, implementation: str = hooks.IMPLEMENTATION
) -> torch.nn.Module:
    """The model that the configuration describes, in float32, its RoPE frozen at `context` tokens.

    Raises:
        UnsupportedModel: transformers can't build it.
    """
    from transformers import AutoModelForCausalLM  # slow to import: only when a model is traced

    hooks.register()
    config = copy.deepcopy(config)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:
        raise UnsupportedModel(
            f"transformers can't build a model of type {config.model_type!r}: {_first_line(error)}"
        ) from error
    rope.freeze(model, context)
    for module in model.modules():
        if getattr(module, "is_causal", None) is False:  # some leave it to the mask, which we let none build
            module.is_causal = True  # type: ignore[assignment]
    hooks.use(model, implementation)
    return model.eval()  # type: ignore[no-any-return]


def export(
    model: torch.nn.Module, device: str, context: int, tokens: int = TOKENS, rows: int = ROWS, *,
    given: bool = True, buffers: Mapping[str, NDArray[np.generic]] | None = None,
) -> Any:  # fmt: skip
    """The model's torch.export program over a flat batch of sequences of up to `context` tokens.

    given: whether the model is told positions. buffers: values of its buffers, when it has none itself.

    Raises:
        UnsupportedModel: torch can't export it, with torch's reason.
    """
    t, n = torch.export.Dim("T", min=1, max=tokens), torch.export.Dim("N", min=1, max=rows)
    ids, positions = (torch.zeros(EXAMPLE_TOKENS, dtype=torch.int32, device=device) for _ in range(2))
    wanted = torch.zeros(EXAMPLE_ROWS, dtype=torch.int32, device=device)
    try:
        with torch.no_grad(), _without_collection():
            program = torch.export.export(
                FlatLM(model, given), (ids, positions, wanted), dynamic_shapes=({0: t}, {0: t}, {0: n}),
                strict=False, prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
            complex_rope.take(program)
            program = spelled.take(program, _values(program, buffers or {}), context)
            positions_of_ranges.take(program)
            return program
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} can't be traced as one graph: {told(error)}",
            hint="models that carry state from token to token other than attention keys aren't supported",
        ) from error


def _values(program: Any, buffers: Mapping[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    """What is known of a program's buffers and constants."""
    held = {**program.state_dict, **program.constants}
    names = [n for n in held if n not in program.graph_signature.parameters]
    given = {f"{WRAPPER}.{name}": torch.from_numpy(value) for name, value in buffers.items()}
    return {n: held[n] for n in names if not held[n].is_meta} | {n: given[n] for n in names if n in given}


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: it takes a third of the time, over millions of small objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def told(error: Exception) -> str:
    """An error's first line, and the innermost function of a transformers model that it came through."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [code for code in codes if "/models/" in code.co_filename]
    place = f" in {frames[-1].co_qualname} ({Path(frames[-1].co_filename).name})" if frames else ""
    return _first_line(error) + place


def trace_model(
    config: Any, *, name: str, context: int, given: bool = True, tokens: int = TOKENS, rows: int = ROWS
) -> Traced:
    """Builds the model without memory, exports it and makes its raw graph. given: as in `export`."""
    model, buffers = build(config, "meta", context), rope.constants(config, context)
    program = export(model, "meta", context, tokens, rows, given=given, buffers=buffers)
    raw = trace.import_program(
        program, name, symbols=symbols(context, tokens, rows), torch_names=torch_names(program),
        prefixes=[WRAPPER, model.base_model_prefix], outputs=["logits"],
    )  # fmt: skip
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    graph = _sources(raw, tied, model.base_model_prefix)
    graph, transposed = out_first(expert_weights.flat_weights(graph))
    constants = _constants(graph, program, buffers)
    aliases: dict[str, tuple[str, ...]] = {}
    for other, source in tied.items():
        aliases[source] = (*aliases.get(source, ()), other)
    prefix, how = model.base_model_prefix, renamed.conversions(model)
    return Traced(finish(graph), constants, transposed, aliases, prefix, how)


def _constants(
    graph: Graph, program: Any, buffers: Mapping[str, NDArray[np.generic]]
) -> dict[str, NDArray[np.generic]]:
    """Values of the sources that are in no checkpoint: buffers, and tensors written in the model's code."""
    found = {}
    for source in (s for w in graph.weights for s in w.sources):
        held = program.constants.get(f"{WRAPPER}.{source}", program.constants.get(source))
        if source in buffers:
            found[source] = buffers[source]
        elif held is not None:
            if held.is_meta:
                raise UnsupportedModel(
                    f"the value of the model's constant {source} isn't known without its weights"
                )
            found[source] = held.detach().numpy()
    return found


def torch_names(program: Any) -> dict[str, str]:
    """torch's own symbols → T and N."""
    found = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in ("ids", "rows"):
            found[str(node.meta["val"].shape[0].node.expr)] = "T" if node.name == "ids" else "N"
    return found


def symbols(context: int, tokens: int = TOKENS, rows: int = ROWS) -> tuple[Symbol, ...]:
    """The symbols of every language model's graph."""
    return (
        Symbol("T", 1, tokens, 1),  # tokens of the step
        Symbol("N", 1, rows, 1),  # rows of logits
        Symbol("S", 1, rows, 1),  # sequences of the step
        Symbol("M", 1, -(-context // PAGE), -(-min(256, context) // PAGE)),  # pages of the longest sequence
        Symbol("C", 1, context, min(256, context)),  # tokens of the longest sequence
        Symbol("P", 1, 1 << 24, 256),  # pages in the pool
        Symbol("H", 1, context, 1),  # tokens of history that sampling looks at
    )


def _sources(graph: Graph, tied: Mapping[str, str], prefix: str) -> Graph:
    """Names weights as a checkpoint does, and tied ones as the tensor that holds them."""
    renamed: dict[str, str] = {}
    weights: dict[str, Weight] = {}
    for weight in graph.weights:
        source = weight.sources[0].removeprefix(f"{WRAPPER}.")
        source = tied.get(source, source)
        name = names.strip(source, [prefix])
        if name in weights and weights[name].sources != (source,):
            name = source  # `model.norm` beside `norm`
        renamed[weight.name] = name
        weights[name] = replace(weight, name=name, sources=(source,))
    nodes = tuple(replace(n, inputs=tuple(_renamed(a, renamed) for a in n.inputs)) for n in graph.nodes)
    return replace(graph, weights=tuple(weights.values()), nodes=nodes)


def _renamed(argument: str, renamed: Mapping[str, str]) -> str:
    return f"@{renamed[argument[1:]]}" if argument[0] == "@" else argument


def out_first(graph: Graph) -> tuple[Graph, frozenset[str]]:
    """addmm(bias, x, w[in,out]) → linear(x, w[out,in], bias): the graph, and the sources this turns round."""
    uses: dict[str, set[bool]] = {}
    for node in graph.nodes:
        for place, argument in enumerate(node.inputs):
            uses.setdefault(argument, set()).add(_is_product(node) and place == 2)
    turned = {w.name for w in graph.weights if uses.get(f"@{w.name}") == {True}}
    nodes = tuple(_as_linear(n) if _is_product(n) and n.inputs[2][1:] in turned else n for n in graph.nodes)
    weights = tuple(_turn(w) if w.name in turned else w for w in graph.weights)
    sources = frozenset(s for w in weights if w.name in turned for s in w.sources)
    return replace(graph, nodes=nodes, weights=weights), sources


def _is_product(node: Node) -> bool:
    plain = node.op == "aten.addmm" and node.attr("alpha") == 1 and node.attr("beta") == 1
    return plain and node.inputs[2][0] == "@"


def _as_linear(node: Node) -> Node:
    bias, x, weight = node.inputs
    return replace(node, op="aten.linear", inputs=(x, weight, bias), attrs=())


def _turn(weight: Weight) -> Weight:
    return replace(weight, type=weight.type.with_shape(*reversed(weight.type.shape)))


def finish(graph: Graph) -> Graph:
    """Adds what a language model's graph has beyond its trace: KV state, page tables, sampling."""
    t, n, s, m, h = (sym(x) for x in "TNSMH")
    paged = (Input("seq", TensorType("i32", (t,))), Input("pages", TensorType("i32", (s, m))))
    choice = ("temperature", "f32"), ("top_k", "i32"), ("top_p", "f32"), ("min_p", "f32"), ("penalty", "f32")
    by_row = (*choice, ("seed", "i64"), ("draw", "i64"))
    sampling = (
        *(Input(x, TensorType(d, (n,))) for x, d in by_row),
        Input("history", TensorType("i32", (n, h))),
    )
    nodes, states = _with_states(graph)
    logits = graph.outputs[0].value
    inputs = (f"%{logits}", *(f"%{i.name}" for i in sampling))
    sample = Node("sample", "sample", inputs, TensorType("i32", (n,)), origin="flashrt")
    return replace(
        graph,
        inputs=(*graph.inputs, *paged, *sampling),
        states=states,
        nodes=(*nodes, sample),
        outputs=(Output("logits", logits), Output("tokens", "sample")),
    )


def _with_states(graph: Graph) -> tuple[tuple[Node, ...], tuple[State, ...]]:
    """Gives every attention site its own state; sites fed by the same keys and values share one."""
    types = {f"%{n.name}": n.type for n in graph.nodes}
    slots: dict[tuple[str, str], State] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == "flashrt.attention":
            q, k, v = (types[a].shape for a in node.inputs[:3])
            kind = TensorType("f32", (sym("P"), 2, k[1], PAGE, _wider(k[2], v[2])))
            state = slots.setdefault(node.inputs[1:3], State(f"kv.{len(slots)}", kind))  # type: ignore[arg-type]
            node = _with_state(node, q, k, v, state.name)
        nodes.append(node)
    return tuple(nodes), tuple(slots.values())


def _wider(a: Dim, b: Dim) -> Dim:
    assert isinstance(a, int) and isinstance(b, int)
    return max(a, b)


def _with_state(node: Node, q: tuple[Dim, ...], k: tuple[Dim, ...], v: tuple[Dim, ...], state: str) -> Node:
    sinks = node.inputs[3:]
    return replace(
        node,
        inputs=(*node.inputs[:3], "%positions", "%seq", "%pages", *sinks),
        attrs=attrs(
            heads=q[1], kv_heads=k[1], head_dim=q[2], value_dim=v[2],  # type: ignore[arg-type]
            scale=node.attr("scale"), window=node.attr("window"), softcap=node.attr("softcap"),
            causal=node.attr("causal"), sinks=bool(sinks),
        ),
        reads=(state,),
        writes=(state,),
    )  # fmt: skip
