"""ONNX's products, convolutions, pools, norms, attention and recurrent layers as torch functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from flashrt.errors import UnsupportedModel
from flashrt.frontend.onnx_ops import Tensor, operator, unsupported

Ints = Sequence[int]
LONGEST = 64  # steps of a recurrent layer: they are written out one by one


@dataclass(frozen=True, slots=True)
class Flipped:
    """A weight [K, N] that is kept as [N, K]."""

    weight: Tensor


# ---- products ------------------------------------------------------------------------
@operator("MatMul")
def matmul(x: Tensor, y: Tensor | Flipped) -> Tensor:
    if isinstance(y, Flipped):
        return F.linear(x, y.weight)
    if not x.is_floating_point():
        raise unsupported("dtype", str(x.dtype).removeprefix("torch."))
    return torch.matmul(x, y)


@operator("Gemm")
def gemm(
    x: Tensor, y: Tensor | Flipped, bias: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Tensor:  # fmt: skip
    if not x.is_floating_point():
        raise unsupported("dtype", str(x.dtype).removeprefix("torch."))
    x = x.t() if transA else x
    weight = y.weight if isinstance(y, Flipped) else y if transB else y.t()
    if alpha == beta == 1 and (bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[0])):
        return F.linear(x, weight, bias)
    product = F.linear(x, weight) * alpha
    return product if bias is None else product + bias * beta


@operator("Einsum")
def einsum(*xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *xs)


# ---- convolutions and pools ------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Window:
    """The geometry of a convolution or pool: kernel, stride, dilation and pads of each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        pairs = list(zip(self.before, self.after, strict=True))[::-1]
        return F.pad(x, [p for pair in pairs for p in pair], value=value) if any(map(any, pairs)) else x


def _window(
    x: Tensor, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, auto_pad: str, ceil_mode: int = 0
) -> _Window:
    n = x.dim() - 2
    stride, dilation = tuple(strides or [1] * n), tuple(dilations or [1] * n)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    before, after = [0] * n, [0] * n
    if auto_pad == "NOTSET" and pads:
        before, after = list(pads[:n]), list(pads[n:])
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        for i, (span, step) in enumerate(zip(spans, stride, strict=True)):
            if not isinstance(x.shape[i + 2], int):
                raise UnsupportedModel(f"auto_pad={auto_pad} with a size that the model leaves open")
            total = max(0, (-(-x.shape[i + 2] // step) - 1) * step + span - x.shape[i + 2])
            before[i] = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            after[i] = total - before[i]
    elif auto_pad not in ("NOTSET", "VALID"):
        raise unsupported("auto_pad", auto_pad)
    if min(before + after, default=0) < 0:
        raise unsupported("pads", tuple(before + after))
    if ceil_mode:
        for i, (span, step) in enumerate(zip(spans, stride, strict=True)):
            after[i] += _rest(x.shape[i + 2], before[i], after[i], span, step)
    return _Window(tuple(kernel), stride, dilation, tuple(before), tuple(after))


def _rest(extent: Any, before: int, after: int, span: int, step: int) -> int:
    """What a pool that rounds up reads beyond its padding: a last window that begins inside it."""
    if not isinstance(extent, int):
        raise UnsupportedModel("ceil_mode=1 with a size that the model leaves open")
    length = extent + before + after
    count = -(-(length - span) // step) + 1
    if (count - 1) * step >= extent + before:
        count -= 1
    return max(0, (count - 1) * step + span - length)


_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@operator("Conv")
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET", dilations: Ints = (),
    group: int = 1, kernel_shape: Ints = (), pads: Ints = (), strides: Ints = (),
) -> Tensor:  # fmt: skip
    n = _rank(x, _CONV)
    window = _window(x, tuple(weight.shape[2:]), strides, dilations, pads, auto_pad)
    padding: Any = window.before
    if window.before != window.after:
        x, padding = window.pad(x), 0
    return _CONV[n](x, weight, bias, window.stride, padding, window.dilation, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET", dilations: Ints = (),
    group: int = 1, kernel_shape: Ints = (), output_padding: Ints = (), output_shape: Ints = (),
    pads: Ints = (), strides: Ints = (),
) -> Tensor:  # fmt: skip
    """As a convolution of x with zeros between its elements, and the kernel turned around."""
    n = _rank(x, _CONV)
    if auto_pad != "NOTSET" or output_shape:
        raise UnsupportedModel("auto_pad and output_shape aren't supported")
    kernel, stride = tuple(weight.shape[2:]), tuple(strides or [1] * n)
    dilation, extra = tuple(dilations or [1] * n), tuple(output_padding or [0] * n)
    pads = tuple(pads or [0] * 2 * n)
    for i, step in enumerate(stride):
        x = _spread(x, i + 2, step)
    edges = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    low = [e - p for e, p in zip(edges, pads[:n], strict=True)]
    high = [e - p + o for e, p, o in zip(edges, pads[n:], extra, strict=True)]
    if min(low + high) < 0:
        raise unsupported("pads", pads)
    x = F.pad(x, [p for pair in list(zip(low, high, strict=True))[::-1] for p in pair])
    per_group = weight.shape[0] // group
    parts = weight.flip(list(range(2, n + 2))).reshape(group, per_group, *weight.shape[1:])
    turned = parts.transpose(1, 2).reshape(group * weight.shape[1], per_group, *kernel)
    return _CONV[n](x, turned, bias, 1, 0, dilation, group)


def _spread(x: Tensor, dim: int, step: int) -> Tensor:
    """step-1 zeros between the elements along an axis."""
    if step == 1:
        return x
    wide = F.pad(x.unsqueeze(dim + 1), [0, 0] * (x.dim() - dim - 1) + [0, step - 1])
    shape = [*x.shape[:dim], x.shape[dim] * step, *x.shape[dim + 1 :]]
    return wide.reshape(shape).narrow(dim, 0, (x.shape[dim] - 1) * step + 1)


_MAX_POOL: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool")
def max_pool(
    x: Tensor, *, kernel_shape: Ints, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints = (),
    pads: Ints = (), storage_order: int = 0, strides: Ints = (),
) -> Tensor:  # fmt: skip
    n = _rank(x, _MAX_POOL)
    if not x.is_floating_point():
        raise unsupported("dtype", str(x.dtype).removeprefix("torch."))
    window = _window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return _MAX_POOL[n](window.pad(x, -math.inf), window.kernel, window.stride, 0, window.dilation)


@operator("AveragePool")
def average_pool(
    x: Tensor, *, kernel_shape: Ints, auto_pad: str = "NOTSET", ceil_mode: int = 0,
    count_include_pad: int = 0, dilations: Ints = (), pads: Ints = (), strides: Ints = (),
) -> Tensor:  # fmt: skip
    """Sums of windows over the number of elements that count in them."""
    n = _rank(x, _AVG_POOL)
    if any(d != 1 for d in dilations):
        raise unsupported("dilations", tuple(dilations))
    window = _window(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    plain = _AVG_POOL[n](window.pad(x), window.kernel, window.stride)
    if not any(window.before) and not any(window.after):
        return plain
    counted = torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype)
    if count_include_pad:
        own = _window(x, kernel_shape, strides, dilations, pads, auto_pad)
        counted, beyond = own.pad(counted, 1), [w - o for w, o in zip(window.after, own.after, strict=True)]
        counted = F.pad(counted, [p for b in beyond[::-1] for p in (0, b)])
    else:
        counted = window.pad(counted)
    return plain / _AVG_POOL[n](counted, window.kernel, window.stride)


def _rank(x: Tensor, known: dict[int, Any]) -> int:
    if x.dim() - 2 not in known:
        raise UnsupportedModel(f"an input of {x.dim()} dimensions isn't supported")
    return x.dim() - 2


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), True)


# ---- norms -----------------------------------------------------------------------------
@operator("BatchNormalization")
def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 0,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise unsupported("training_mode", 1)
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


@operator("LayerNormalization")
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:  # fmt: skip
    """The normalised values, and what they were normalised with: the mean and one over the deviation."""
    shape = list(x.shape[axis % x.dim() :])
    dims = list(range(axis % x.dim(), x.dim()))
    mean = x.mean(dims, True)
    deviation = torch.rsqrt(((x - mean) ** 2).mean(dims, True) + epsilon)
    if not all(isinstance(n, int) for n in shape):
        raise UnsupportedModel("the axes that are normalised have a size that the model leaves open")
    if list(scale.shape) == shape and (bias is None or list(bias.shape) == shape):
        return F.layer_norm(x, shape, scale, bias, epsilon), mean, deviation
    plain = F.layer_norm(x, shape, None, None, epsilon) * scale
    return plain if bias is None else plain + bias, mean, deviation


@operator("RMSNormalization")
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    dims = list(range(axis % x.dim(), x.dim()))
    return x * torch.rsqrt((x * x).mean(dims, True) + epsilon) * scale


@operator("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    shape = [-1, *[1] * (x.dim() - 2)]
    dims = list(range(2, x.dim()))
    centred = x - x.mean(dims, True)
    normed = centred / torch.sqrt((centred * centred).mean(dims, True) + epsilon)
    return normed * scale.reshape(shape) + bias.reshape(shape)


@operator("GroupNormalization")
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1,
    opset: int,
) -> Tensor:  # fmt: skip
    if opset < 21:  # until then scale and bias are those of a group
        channels = int(x.shape[1]) // num_groups
        scale, bias = (v.unsqueeze(1).expand(-1, channels).reshape(-1) for v in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LRN")
def local_response_norm(
    x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = F.pad(x * x, [0, 0] * (x.dim() - 2) + [before, after])
    total = sum(squares.narrow(1, i, x.shape[1]) for i in range(size))
    return x / (bias + total * (alpha / size)) ** beta


@operator("MeanVarianceNormalization")
def mean_variance_norm(x: Tensor, *, axes: Ints = (0, 2, 3)) -> Tensor:
    mean = x.mean(list(axes), True)
    variance = (x * x).mean(list(axes), True) - mean * mean
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


# ---- attention ---------------------------------------------------------------------------
@operator("Attention")
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: int = 0,
    kv_num_heads: int | None = None, q_num_heads: int | None = None, scale: float | None = None,
    softcap: float = 0.0, qk_matmul_output_mode: int = 0, softmax_precision: int | None = None,
) -> Tensor:  # fmt: skip
    """[B,H,T,D], or [B,T,H*D] with the numbers of heads; without a cache."""
    if softcap or softmax_precision not in (None, 1):
        raise UnsupportedModel("softcap and softmax_precision aren't supported")
    if mask is not None and mask.shape[-1] != k.shape[-2]:
        raise UnsupportedModel("a mask that is shorter than the keys isn't supported")
    flat = q.dim() == 3
    if flat:
        if q_num_heads is None or kv_num_heads is None:
            raise UnsupportedModel("inputs of three dimensions need q_num_heads and kv_num_heads")
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    group = int(q.shape[1]) // int(k.shape[1])
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        rows, columns = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])
        scores = torch.where(columns <= rows, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if mask is not None:  # a query that sees no key gets zeros
        weights = torch.where(scores.amax(-1, True) == -math.inf, 0.0, weights)
    y = weights @ v
    return y.transpose(1, 2).flatten(2) if flat else y


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


# ---- recurrent layers --------------------------------------------------------------------
_Step = Callable[[Tensor, list[Tensor]], list[Tensor]]


def _recurrent(
    x: Tensor, states: Sequence[Tensor | None], hidden: int, direction: str, layout: int,
    cell: Callable[[int], _Step],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Runs a cell over the steps of x [T,B,I] → (y [T,D,B,H], last states [D,B,H] each).

    cell: direction → (x [B,I], states) → the next states, the first of which is the output.
    """
    if layout:
        raise unsupported("layout", 1)
    if not isinstance(x.shape[0], int) or x.shape[0] > LONGEST:
        raise UnsupportedModel(f"a sequence of {x.shape[0]} steps isn't supported: at most {LONGEST}")
    orders = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}
    if direction not in orders:
        raise unsupported("direction", direction)
    outputs, lasts = [], []
    for d, order in enumerate(orders[direction]):
        zeros = x.new_zeros([x.shape[1], hidden])
        now = [zeros if s is None else s[d] for s in states]
        step, made = cell(d), []
        for t in range(x.shape[0])[::order]:
            now = step(x[t], now)
            made.append(now[0])
        outputs.append(torch.stack(made[::order]))
        lasts.append(now)
    y = torch.stack(outputs, 1)
    return y, [torch.stack(list(s)) for s in zip(*lasts, strict=True)]


def _plain(lengths: Tensor | None, activations: Any, usual: Sequence[str], clip: float | None) -> None:
    """Refuses what the cells below don't do."""
    if lengths is not None:
        raise UnsupportedModel("sequence_lens isn't supported")
    if clip is not None:
        raise unsupported("clip", clip)
    if activations is not None and any(
        a != u for a, u in zip(activations, itertools.cycle(usual), strict=False)
    ):
        raise unsupported("activations", tuple(activations))


def _biases(b: Tensor | None, d: int, rows: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if b is None else (b[d][:rows], b[d][rows:])


@operator("LSTM")
def lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
    h: Tensor | None = None, c: Tensor | None = None, *, hidden_size: int, direction: str = "forward",
    activations: Any = None, clip: float | None = None, input_forget: int = 0, layout: int = 0,
) -> Any:  # fmt: skip
    """Gates stand in the order input, output, forget, cell."""
    _plain(lengths, activations, ("Sigmoid", "Tanh", "Tanh"), clip)
    if input_forget:
        raise unsupported("input_forget", 1)

    def cell(d: int) -> _Step:
        bias_x, bias_h = _biases(b, d, 4 * hidden_size)

        def step(x: Tensor, now: list[Tensor]) -> list[Tensor]:
            gates = F.linear(x, w[d], bias_x) + F.linear(now[0], r[d], bias_h)
            i, o, f, g = gates.split(hidden_size, 1)
            memory = torch.sigmoid(f) * now[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(memory), memory]

        return step

    y, (last, memory) = _recurrent(x, (h, c), hidden_size, direction, layout, cell)
    return y, last, memory


@operator("GRU")
def gru(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
    h: Tensor | None = None, *, hidden_size: int, direction: str = "forward", activations: Any = None,
    clip: float | None = None, linear_before_reset: int = 0, layout: int = 0,
) -> Any:  # fmt: skip
    """Gates stand in the order update, reset, hidden."""
    _plain(lengths, activations, ("Sigmoid", "Tanh"), clip)

    def cell(d: int) -> _Step:
        bias_x, bias_h = _biases(b, d, 3 * hidden_size)
        two = 2 * hidden_size

        def step(x: Tensor, now: list[Tensor]) -> list[Tensor]:
            z_x, r_x, h_x = F.linear(x, w[d], bias_x).split(hidden_size, 1)
            head = F.linear(now[0], r[d][:two], None if bias_h is None else bias_h[:two])
            z_h, r_h = head.split(hidden_size, 1)
            update, reset = torch.sigmoid(z_x + z_h), torch.sigmoid(r_x + r_h)
            last = None if bias_h is None else bias_h[two:]
            if linear_before_reset:
                new = torch.tanh(h_x + reset * F.linear(now[0], r[d][two:], last))
            else:
                new = torch.tanh(h_x + F.linear(reset * now[0], r[d][two:], last))
            return [(1 - update) * new + update * now[0]]

        return step

    y, (last,) = _recurrent(x, (h,), hidden_size, direction, layout, cell)
    return y, last


@operator("RNN")
def rnn(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
    h: Tensor | None = None, *, hidden_size: int, direction: str = "forward", activations: Any = None,
    clip: float | None = None, layout: int = 0,
) -> Any:  # fmt: skip
    _plain(lengths, activations, ("Tanh",), clip)

    def cell(d: int) -> _Step:
        bias_x, bias_h = _biases(b, d, hidden_size)

        def step(x: Tensor, now: list[Tensor]) -> list[Tensor]:
            return [torch.tanh(F.linear(x, w[d], bias_x) + F.linear(now[0], r[d], bias_h))]

        return step

    y, (last,) = _recurrent(x, (h,), hidden_size, direction, layout, cell)
    return y, last
