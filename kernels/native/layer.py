"""A decoder layer in C, in two calls, so that a step of few rows does not wait for Python.

Part by part a layer is nine calls, each with its checks and a new tensor for what it returns.
layer.c makes the same calls in the same order: no bit of a result differs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.errors import KernelInputError
from kernels.layer_parts import LayerParts
from kernels.native.attention import NativeAttention, Pair
from kernels.native.linear import WIDTH, NativeLinear
from kernels.native.memory import in_large_pages
from kernels.native.pointers import floats

PARTS = ("norms", "query, key, value", "rotation", "attention", "output", "gate, up", "down")
"""What layer.c can add up the time of."""


class Scratch:
    """Memory that is kept for the next layer and the next step.

    Fresh memory would be cleared by the system, page by page, when it is first touched.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], its content undefined: the same memory for the same name."""
        rows = self._rows.get(name)
        if rows is None or rows.shape != (num_rows, size):
            needed = num_rows * size
            if name not in self._memory or self._memory[name].numel() < needed:
                self._memory[name] = in_large_pages(needed)
            rows = self._rows[name] = self._memory[name][:needed].view(num_rows, size)
        return rows


class _Weights(ctypes.Structure):
    """Struct weights in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int) for name in ("inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    """Struct layer in layer.c."""

    _fields_ = (
        *((name, _Weights) for name in ("query_key_value", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        ("epsilon", ctypes.c_float),
    )


class NativeLayer:
    """A layer as an engine's decoder asks for it: attend, then finish."""

    def __init__(self, library: ctypes.CDLL, scratch: Scratch, parts: LayerParts) -> None:
        """Take the parts. `scratch` may serve other layers, too, one call at a time.

        Raises KernelInputError unless takes(parts), or if C would misread a norm, or if the parts
        do not fit each other.
        """
        if not self.takes(parts):
            needed = f"must be NativeLinear, and down's inputs a multiple of {WIDTH}"
            raise KernelInputError(f"the linear layers of a layer {needed}")
        linears = [part for part in parts if isinstance(part, NativeLinear)]
        heads, output, gate_up, down = linears
        hidden, inner, head_dim = heads.in_features, down.in_features, parts.head_dim
        query_size, kv_size = parts.num_heads * head_dim, parts.num_kv_heads * head_dim
        got = [(part.in_features, part.out_features) for part in linears]
        size = query_size + 2 * kv_size
        fit = [(hidden, size), (query_size, hidden), (hidden, 2 * inner), (inner, hidden)]
        if got != fit:
            raise KernelInputError(f"the linear layers have sizes {got}; they must be {fit}")
        self._hidden, self._query_size, self._num_heads = hidden, query_size, parts.num_heads
        self._kv_shape = (parts.num_kv_heads, head_dim)
        self._floats_a_row = max(hidden + 3 * size, 2 * hidden + inner)
        # A gate's panel and an up's in turn.
        gate_and_up = gate_up.panels.view(2, -1, hidden, WIDTH).transpose(0, 1)
        panels = _in_one_piece(heads.panels, output.panels, gate_and_up, down.panels)
        norms = (
            ("attention_norm", parts.attention_norm, hidden),
            ("mlp_norm", parts.mlp_norm, hidden),
            ("query_norm", parts.query_norm, head_dim),
            ("key_norm", parts.key_norm, head_dim),
        )
        self._layer = _Layer(
            *(_weights(part, own) for part, own in zip(linears, panels, strict=True)),
            *(None if norm is None else floats(name, norm, size) for name, norm, size in norms),
            parts.epsilon,
        )
        # C knows addresses: what lies there must live as long as the layer.
        self._kept = (panels, norms, [part.bias for part in linears])
        self._scratch = scratch
        self._attend, self._finish = library.layer_attend, library.layer_finish

    @staticmethod
    def takes(parts: LayerParts) -> bool:
        """Whether gate and up end where a panel does, and all linear layers have panels."""
        down = parts.down
        linears = (parts.query_key_value, parts.output, parts.gate_up, down)
        whole = isinstance(down, NativeLinear) and down.in_features % WIDTH == 0
        return whole and all(isinstance(part, NativeLinear) for part in linears)

    def attend(
        self, x: Tensor, update: Tensor, angles: Pair, cache: Pair, step: NativeAttention
    ) -> tuple[Tensor, Tensor]:
        """(x, update) -> (x + update, heads), the first written over x; writes keys and values.

        x, update  [num_rows, hidden]
        returns    [num_rows, hidden], [num_rows, num_heads * head_dim]

        The heads are overwritten by the next call, of this layer or of another with its scratch.

        Raises KernelInputError, and MemoryError if there is no room for the threads to work in.
        """
        num_rows, kv_shape = step.batch.num_tokens, step.cache_shape[2:]
        if kv_shape != self._kv_shape:
            given, needed = (
                "{} heads of {}".format(*shape) for shape in (kv_shape, self._kv_shape)
            )
            raise KernelInputError(f"the cache has {given}; the layer's keys are {needed}")
        keys, values = cache
        heads = self._scratch.rows("heads", num_rows, self._query_size)
        failed = self._attend(
            ctypes.addressof(self._layer),
            step.struct_for(self._num_heads),
            floats("x", x, num_rows, self._hidden),
            floats("update", update, num_rows, self._hidden),
            heads.data_ptr(),
            *step.angles(angles),
            floats("keys", keys, *step.cache_shape),
            floats("values", values, *step.cache_shape),
            self._scratch.rows("between", num_rows, self._floats_a_row).data_ptr(),
            None,
        )
        if failed:
            raise MemoryError("no memory for attention to work in")
        return x, heads

    def finish(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """(x, heads) -> (x + output of the heads, update), the first written over x.

        The update is overwritten by the next call, as the heads are. Raises KernelInputError.
        """
        num_rows = x.shape[0]
        update = self._scratch.rows("update", num_rows, self._hidden)
        self._finish(
            ctypes.addressof(self._layer),
            floats("x", x, num_rows, self._hidden),
            floats("heads", heads, num_rows, self._query_size),
            update.data_ptr(),
            self._scratch.rows("between", num_rows, self._floats_a_row).data_ptr(),
            num_rows,
            None,
        )
        return x, update


def _in_one_piece(*tensors: Tensor) -> list[Tensor]:
    """Copies, one behind the other in memory: so they lie in the order in which they are read."""
    memory = in_large_pages(sum(tensor.numel() for tensor in tensors))
    copies = torch.split(memory, [tensor.numel() for tensor in tensors])
    return [
        copy.view(tensor.shape).copy_(tensor) for copy, tensor in zip(copies, tensors, strict=True)
    ]


def _weights(layer: NativeLinear, panels: Tensor) -> _Weights:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return _Weights(panels.data_ptr(), bias, layer.in_features, layer.out_features)
