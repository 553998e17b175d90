"""The picture of `flash-monitor`, for a terminal of 80 columns or more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrt.cli.terminal import micros, size

if TYPE_CHECKING:
    from flashrt.machine import Device, Measured
    from flashrt.probes.live import Core
    from flashrt.profiler.monitor import Hidden, LaneRate, Rates, View
    from flashrt.status.record import Splits, Status

OWN, FOREIGN, REST = "green", "red", "bright_black"
CELL = 26  # columns of one core
NAMED = 100  # columns from which devices have their names
SHOWN = 8  # lines of a list that may be long
NONE = "–"


def picture(view: View, width: int) -> Group:
    """Everything that there is to see, from top to bottom."""
    parts = [*_head(view, width), *_cores(view, width), *_devices(view, width)]
    if view.engine is not None:
        parts += [*_lanes(view.lanes), *_splits(view.engine.splits)]
    parts += _memory(view, width)
    if view.hidden is not None:
        parts += _hidden(view, view.hidden, width)
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _table(*heads: str, names: int = 1) -> Table:
    """Figures in columns behind the columns of names."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=REST)
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < names else "right", no_wrap=True, overflow="ellipsis")
    return table


def _bar(width: int, *parts: tuple[float, str]) -> Text:
    """Shares of 1 as lengths, each in its style; eighths of a column are rounded away."""
    text, begun = Text(), 0.0
    for share, style in parts:
        ended = min(1.0, begun + max(0.0, share))
        text.append("█" * (round(ended * width) - round(begun * width)), style)
        begun = ended
    return text.append("░" * (width - len(text)), REST)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _size(nbytes: int | None) -> str:
    return NONE if nbytes is None else size(nbytes)


# ---- what runs ---------------------------------------------------------------------
def _head(view: View, width: int) -> Iterator[RenderableType]:
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    status = view.engine
    if status is None:
        yield _ends(Text("no engine is running", "bold yellow"), clock, width)
        yield Text("start one and it appears here: flashrt run MODEL --prompt TEXT, or flashrt.LLM in Python")
        return
    name = Text.assemble((status.model, "bold"), f"  pid {status.pid}, up {_span(view.at - status.opened)}")
    yield _ends(name, clock, width)
    yield _flow(_pace(status, view.rates), width)
    yield _flow(_plan(status, view.at), width)
    if view.others:
        yield Text(f"also running: {', '.join(f'--pid {p}' for p in view.others)}", "dim")


def _flow(parts: Iterable[str], width: int) -> Text:
    """The parts in a row, in as many lines as they need; none is broken."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]} · {part}" if lines else part
        if lines and len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return Text("\n".join(lines))


def _ends(left: Text, right: str, width: int) -> Text:
    left.truncate(max(10, width - len(right) - 1), overflow="ellipsis")
    return left.append(" " * max(1, width - left.cell_len - len(right))).append(right, REST)


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _pace(status: Status, rates: Rates | None) -> Iterator[str]:
    if rates is None:
        yield "rates not known yet"
    elif rates.tokens is None or rates.rows is None:
        yield f"{rates.steps:,.1f} steps/s"
    else:
        yield f"{rates.rows:,.1f} tokens/s generated, {max(0.0, rates.tokens - rates.rows):,.0f} read"
        yield f"{rates.steps:,.1f} steps/s"
    if status.step is not None:
        yield f"last step {micros(status.step * 1e6)}"


def _plan(status: Status, now: float) -> Iterator[str]:
    if status.variant is not None:
        symbols = " ".join(f"{k}={status.symbols[k]}" for k in ("T", "N", "C") if k in status.symbols)
        yield f"plan {status.variant} {symbols}".rstrip()
    else:
        yield "no step has run yet"
    if status.queue is not None:
        yield f"{status.queue.running} running, {status.queue.waiting} waiting"
    loop = status.replanning
    if loop is not None and loop.planned_at is not None:
        yield f"re-planned {_ago(now - loop.planned_at)}"
        yield f"{loop.switches} switches"
    elif status.splits:
        yield "splits stand still: nothing re-plans"
    if loop is not None and loop.hit_share is not None:
        yield f"{loop.hit_share:.0%} of the experts asked for are kept, {loop.exchanged} exchanged"
    if loop is not None and loop.not_exchanged:
        yield f"experts aren't exchanged: {loop.not_exchanged}"
    if loop is not None and loop.last_recompile:
        yield f"{loop.recompiles} re-compile{'s' * (loop.recompiles != 1)}"
        yield f"last re-compile because {loop.last_recompile}"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 60 else f"{_span(seconds)} ago"


# ---- devices -----------------------------------------------------------------------
def _cores(view: View, width: int) -> Iterator[RenderableType]:
    own = "this engine" if view.engine else "flash-monitor"
    yield Text.assemble(
        ("\ncores  ", "bold"), ("█", OWN), f" {own}  ", ("█", FOREIGN), " others", _clocks(view.live.cores)
    )
    if why := view.live.reasons.get("cores"):
        yield Text(f"not known: {why}", "yellow")
        return
    columns = max(1, (width + 2) // (CELL + 2))
    grid = Table.grid(padding=(0, 2))
    cells = [_core(core) for core in view.live.cores]
    for at in range(0, len(cells), columns):
        grid.add_row(*cells[at : at + columns])
    yield grid


def _core(core: Core) -> Text:
    own, foreign = core.own or 0.0, core.foreign or 0.0
    bar = _bar(10, (own, OWN), (foreign, FOREIGN))
    text = Text(f"{core.cpu:>3} ").append_text(bar)
    text.append(f" {own:>4.0%}", OWN if own >= 0.01 else REST)
    return text.append(f" {foreign:>4.0%}", FOREIGN if foreign >= 0.01 else REST)


def _clocks(cores: Sequence[Core]) -> str:
    known = [core.mhz for core in cores if core.mhz is not None]
    return f"  {min(known) / 1e3:.1f} to {max(known) / 1e3:.1f} GHz" if known else ""


def _devices(view: View, width: int) -> Iterator[RenderableType]:
    named = width >= NAMED
    heads = ("device", *["name"] * named, "load", "own", "foreign", "free", "reads", "computes")
    table = _table(*heads, names=1 + named)
    gpus = {gpu.id: gpu for gpu in view.live.gpus}
    for device in view.machine.devices:
        gpu = gpus.pop(device.id, None)
        load = [_percent(gpu.load), NONE, NONE] if gpu else _loads(device, view.live.cores)
        free = gpu.free if gpu else view.live.free if device.pool else device.free
        name = [_short(device.name)] * named
        table.add_row(device.id, *name, *load, _size(free), *_limits(device))
    for gpu in gpus.values():
        name = [_short(gpu.name or "")] * named
        table.add_row(gpu.id, *name, _percent(gpu.load), NONE, NONE, _size(gpu.free), NONE, NONE)
    yield _title("devices and their limits")
    yield table
    for gpu in view.live.gpus:
        if state := gpu.lost or ", ".join(gpu.throttle or ()):
            yield Text(f"{gpu.id}: {'lost: ' if gpu.lost else 'held back by '}{state}", "yellow")
    if any(rate.how == "assumed" for d in view.machine.devices for rate in (d.read, _fastest(d)[1])):
        yield Text("? is assumed: flashrt devices --measure measures it", "dim")


def _loads(device: Device, cores: Iterable[Core]) -> list[str]:
    """Of the device's cores: how busy on average, by whom."""
    mine = [c for c in cores if not device.cpus or c.cpu in device.cpus]
    if not mine or any(c.busy is None or c.own is None or c.foreign is None for c in mine):
        return [NONE] * 3
    return [
        _percent(sum(shares) / len(mine))
        for shares in zip(*((c.busy or 0, c.own or 0, c.foreign or 0) for c in mine), strict=True)
    ]


def _limits(device: Device) -> tuple[str, str]:
    dtype, rate = _fastest(device)
    read = f"{device.read.value / 1e9:,.1f} GB/s{'?' * (device.read.how == 'assumed')}"
    return read, f"{rate.value / 1e9:,.0f} Gflop/s {dtype}{'?' * (rate.how == 'assumed')}"


def _fastest(device: Device) -> tuple[str, Measured]:
    return max(device.rates.items(), key=lambda item: item[1].value)


def _short(name: str) -> str:
    return name.replace("(R)", "").replace("(TM)", "").replace(" CPU", "").partition(" @")[0].strip()[:24]


# ---- lanes and splits --------------------------------------------------------------
def _lanes(lanes: Sequence[LaneRate]) -> Iterator[RenderableType]:
    if not lanes:
        return
    table = _table("lane", "", "busy", "waits", "moves", "computes", "of limit")
    for lane in lanes:
        bar = _bar(12, (lane.busy or 0.0, OWN), (lane.waiting or 0.0, "yellow"))
        moved = NONE if lane.bytes is None else f"{size(lane.bytes)}/s"
        done = f"{lane.flops / 1e9:,.0f} Gflop/s" if lane.flops else NONE
        share = f"{_percent(lane.share)}{'?' if lane.how == 'assumed' else ''}"
        table.add_row(
            f"{lane.device} {lane.lane}", bar, _percent(lane.busy), _percent(lane.waiting), moved, done, share
        )
    yield Text.assemble(
        ("\nlanes in the last step  ", "bold"), ("█", OWN), " busy  ", ("█", "yellow"), " waits"
    )
    yield table


def _splits(splits: Sequence[Splits]) -> Iterator[RenderableType]:
    if not splits:
        return
    table = _table("split", "", "at", "of")
    for split in splits[:SHOWN]:
        share = (split.at - split.first) / max(1, split.last - split.first)
        table.add_row(split.name, _bar(20, (share, "cyan")), f"{split.at:,}", f"{split.last:,}")
    yield _title("where the work is cut: channels before the cut")
    yield table
    if len(splits) > SHOWN:
        yield Text(f"and {len(splits) - SHOWN} more", "dim")


# ---- memory ------------------------------------------------------------------------
OWNERS = ("weights", "cache", "activations", "staging", "workspace")


def _memory(view: View, width: int) -> Iterator[RenderableType]:
    status = view.engine
    if status is not None and status.held:
        table = _table("owner on", *OWNERS, "all", "may use")
        for held in status.held:
            owners = [getattr(held, owner) for owner in OWNERS]
            table.add_row(held.device, *map(size, (*owners, held.total, held.limit)))
        yield _title("memory by owner")
        yield table
        if status.queue is not None:
            yield Text(f"the cache has {status.queue.pages_used:,} of {status.queue.pages:,} pages in use")
        if view.usage is not None:
            yield Text(
                f"the process has {_size(view.usage.resident)} in memory, program and libraries included"
            )
    yield from _tiers(view, width)


def _tiers(view: View, width: int) -> Iterator[RenderableType]:
    tiers = view.tiers
    if not tiers.total or tiers.free is None:
        yield Text(f"\nhost memory: not known ({tiers.reason})", "yellow")
        return
    own = (view.usage and view.usage.resident) or 0
    rest = max(0, tiers.total - tiers.free - own - (tiers.page_cache or 0))
    parts = [("page cache", tiers.page_cache or 0, "blue"), ("others", rest, FOREIGN)]
    if own:
        parts.insert(0, ("engine", own, OWN))
    yield _title(f"host memory {size(tiers.total)}")
    yield _bar(min(width, 100), *((nbytes / tiers.total, style) for _, nbytes, style in parts))
    legend = Text()
    for name, nbytes, style in parts:
        legend.append("█ ", style).append(f"{name} {size(nbytes)}  ")
    yield legend.append("░ ", REST).append(f"free {size(tiers.free)}")


def _hidden(view: View, hidden: Hidden, width: int) -> Iterator[RenderableType]:
    """Tiers of the host that stay out of sight, and the files behind the engine."""
    tiers, usage = view.tiers, hidden.usage
    yield _title("host tiers that other tools hide")
    yield _facts(
        width,
        ("transparent huge pages", tiers.huge), ("reserved huge pages", tiers.hugetlb),
        ("of these free", tiers.hugetlb_free),
        ("shared memory", tiers.shared), ("locked", tiers.locked), ("the kernel's own", tiers.kernel),
        ("swap space", tiers.swap), ("of it free", tiers.swap_free), ("compressed swap", tiers.compressed),
    )  # fmt: skip
    if usage is not None:
        yield _title("the engine's process")
        yield _facts(
            width,
            ("in memory", usage.resident), ("at most so far", usage.peak), ("anonymous", usage.anonymous),
            ("in huge pages", usage.huge), ("mapped files", usage.file), ("shared memory", usage.shared),
            ("its part of shared pages", usage.proportional), ("locked", usage.locked),
            ("swapped out", usage.swapped), ("reserved huge pages", usage.hugetlb),
        )  # fmt: skip
        if usage.reason:
            yield Text(f"not known: {usage.reason}", "yellow")
    if hidden.files:
        yield from _files(hidden, width)


def _facts(width: int, *facts: tuple[str, int | None]) -> Text:
    return _flow((f"{name} {_size(value)}" for name, value in facts), width)


def _files(hidden: Hidden, width: int) -> Iterator[RenderableType]:
    table = _table("file", "size", "in page cache", "mapped in")
    for file in hidden.files[:SHOWN]:
        cached = f"{size(file.cached)}" if file.cached is not None else NONE
        table.add_row(_tail(file.path, max(20, width - 44)), _size(file.size), cached, size(file.resident))
    yield _title("files of weights, and what is mapped")
    yield table
    if len(hidden.files) > SHOWN:
        rest = sum(f.resident for f in hidden.files[SHOWN:])
        yield Text(f"and {len(hidden.files) - SHOWN} more, {size(rest)} mapped in", "dim")
    for why in dict.fromkeys(f.reason for f in hidden.files if f.reason):
        yield Text(f"not known: {why}", "yellow")


def _tail(path: str, width: int) -> str:
    """The end of a long path, which tells more than its beginning."""
    name = str(Path(path))
    return name if len(name) <= width else f"…{name[1 - width :]}"
