"""One layer of the decoder: attention, then a gated MLP, each on a normalised input.

    x = x + output(attention(norm(x)));  x = x + down(silu(gate(norm(x))) * up(norm(x)))

Every addition is followed by a norm, which may do both while it reads the rows once. So a layer
hands on the residual x and, not yet added, the update of its MLP: the next norm adds it.

RMSNorm is Zhang & Sennrich's (2019), the gated MLP Shazeer's SwiGLU (2020).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from torch import Tensor

from kernels.layer_parts import LayerParts
from kernels.native.layer import NativeLayer, Scratch
from minivllm.model.attention import KVCache, StepAttention
from minivllm.model.backend import native_library
from minivllm.model.ops import TORCH_OPS, Ops, select_ops
from minivllm.model.rope import Angles


class Layer(Protocol):
    """What a decoder does with a layer, one after the other.

    An x that is handed on may be written over. What comes back beside it is good until the same
    call of the next layer.
    """

    def attend(
        self, x: Tensor, update: Tensor, angles: Angles, cache: KVCache, step: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """(x, update) -> (x + update, what the heads give); writes the rows' keys and values.

        x, update  [num_tokens, hidden]
        heads      [num_tokens, num_heads * head_dim]
        """

    def finish(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """(x, heads) -> (x, update): the part in which a row needs no other row."""


LayerFactory = Callable[[LayerParts], Layer]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer as its parts in turn, on any device."""

    ops: Ops
    parts: LayerParts

    def attend(
        self, x: Tensor, update: Tensor, angles: Angles, cache: KVCache, step: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """See Layer."""
        parts = self.parts
        normed, x = self.ops.add_rms_norm(update, x, parts.attention_norm, parts.epsilon)
        heads = parts.split_heads(parts.query_key_value(normed))
        query = step.rotate_and_store(heads, angles, cache, parts.head_norms)
        return x, step.attend(query, cache).flatten(1)

    def finish(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """See Layer."""
        parts = self.parts
        normed, x = self.ops.add_rms_norm(parts.output(heads), x, parts.mlp_norm, parts.epsilon)
        return x, parts.down(self.ops.silu_and_mul(parts.gate_up(normed)))


TORCH_LAYER = partial(DecoderLayer, TORCH_OPS)


def select_layer(backend: str) -> LayerFactory:
    """The layer that goes with the attention backend of that name."""
    by_parts = partial(DecoderLayer, select_ops(backend))
    if backend != "native":
        return by_parts
    in_c = partial(NativeLayer, native_library(), Scratch())
    # In C it takes no other step than its backend's.
    return lambda parts: cast(Layer, in_c(parts)) if NativeLayer.takes(parts) else by_parts(parts)
