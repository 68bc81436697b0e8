"""Ways to multiply rows by a weight matrix on a CPU, side by side: microseconds and rounding.

    python -m benchmarks.cpu_linear [--rounds N]

Shapes are those of the default model. Each way goes through 30 matrices in turn, as a step goes
through its layers, so that every weight comes from memory; the ways take turns, too, and the
figure is the lowest of all rounds. The error is the mean distance to the product in float64. The
last line counts in how many shapes the first row has the same bits as if it were multiplied alone.

    F.linear     the weight as it lies in the checkpoint
    transposed   (weight @ rows.t()).t()
    packed 0     oneDNN's order for an unknown number of rows
    packed 8     its order for 8 rows: what PackedLinear takes
    in halves    packed 8, the sum over the inputs in two parts
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from minivllm.model.linear import PackedLinear, packed_if_wide, select_linear

SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate, up": (3_072, 576), "down": (576, 1_536)}
"""(out_features, in_features) of the default model's layers."""

ROWS = (1, 8, 32, 128, 512)
NUM_LAYERS = 30

Way = Callable[[Tensor], Tensor]


class Found(NamedTuple):
    """One way, one shape.

    microseconds   a product
    error          mean distance to the product in float64
    bits_as_alone  the first row is what it is without the others
    """

    microseconds: float
    error: float
    bits_as_alone: bool


def plain(weight: Tensor) -> Way:
    """See the module."""
    return lambda rows: F.linear(rows, weight)


def transposed(weight: Tensor) -> Way:
    """See the module."""
    return lambda rows: (weight @ rows.t()).t()


def packed_for_any(weight: Tensor) -> Way:
    """See the module."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 0)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def packed_for_8(weight: Tensor) -> Way:
    """See the module."""
    return PackedLinear(weight, None)


def in_halves(weight: Tensor) -> Way:
    """See the module."""
    half = weight.shape[1] // 2
    parts = torch.split(weight, half, dim=1)
    first, second = (PackedLinear(part.contiguous(), None) for part in parts)
    return lambda rows: first(rows[:, :half]) + second(rows[:, half:])


WAYS: dict[str, Callable[[Tensor], Way]] = {
    "F.linear": plain,
    "transposed": transposed,
    "packed 0": packed_for_any,
    "packed 8": packed_for_8,
    "in halves": in_halves,
}


@torch.inference_mode()
def measure(
    shape: tuple[int, int], num_rows: int, num_rounds: int, num_layers: int = NUM_LAYERS
) -> dict[str, Found]:
    """What was found, by way."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * 0.05 for _ in range(num_layers)]
    rows = torch.randn(num_rows, shape[1], generator=generator)
    exact = rows.double() @ weights[0].double().t()
    layers = {name: [make(weight) for weight in weights] for name, make in WAYS.items()}
    fastest = dict.fromkeys(WAYS, float("inf"))
    for _ in range(num_rounds):
        for name, products in layers.items():
            started = perf_counter()
            for product in products:
                product(rows)
            seconds = (perf_counter() - started) / num_layers
            fastest[name] = min(fastest[name], seconds * 1e6)
    found = {}
    for name, (product, *_) in layers.items():
        result = product(rows)
        bits_as_alone = torch.equal(result[:1], product(rows[:1]))
        error = float((result - exact).abs().mean())
        found[name] = Found(fastest[name], error, bits_as_alone)
    return found


def main() -> int:
    """Print the table; exit code 2 where oneDNN has no packed weights."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_linear")
    parser.add_argument("--rounds", type=int, default=10, help="rounds a shape (default 10)")
    arguments = parser.parse_args()
    if select_linear(torch.device("cpu"), torch.float32) is not packed_if_wide:
        print("benchmarks.cpu_linear: this processor or this torch has no packed weights")
        return 2
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", sep=", ")
    print(f"\n{'us a product':22}" + "".join(f"{name:>12}" for name in WAYS))
    all_found = []
    for layer, shape in SHAPES.items():
        for num_rows in ROWS:
            found = measure(shape, num_rows, arguments.rounds)
            times = "".join(f"{each.microseconds:12.0f}" for each in found.values())
            print(f"{layer:10}{num_rows:>7} rows{times}", flush=True)
            all_found.append(found)
    errors = [sum(found[name].error for found in all_found) / len(all_found) for name in WAYS]
    print(f"{'mean error':22}" + "".join(f"{error:12.1e}" for error in errors))
    same = [sum(found[name].bits_as_alone for found in all_found) for name in WAYS]
    counts = "".join(f"{f'{count} of {len(all_found)}':>12}" for count in same)
    print(f"{'bits as alone':22}{counts}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
