"""Ways to multiply rows by a weight matrix on a CPU, side by side: microseconds and rounding.

    python -m benchmarks.cpu_linear [--rounds N]

Shapes are those of the default model. Each way goes through 30 matrices in turn, as a step goes
through its layers, so that every weight comes from memory (one matrix of the head is larger than
the caches are, and is enough); the ways take turns, too, and the figure is the lowest of all
rounds. The error is the mean distance to the product in float64. `bits as alone` counts in how
many cases the first row has the same bits as if it were multiplied alone.

    F.linear       the weight as it lies in the checkpoint
    transposed     (weight @ rows.t()).t()
    oneDNN packed  the weight in oneDNN's order for 8 rows
    ours           kernels/native/linear.py

The last table says how fast ours is: the weights it reads with one row, the additions and
multiplications it does with many. What memory can bring is measured in the same run, as torch's
sums of 30 tensors of 20 MB. What the processor can compute is not: no program here shows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from kernels.native.linear import NativeLinear
from minivllm.model.backend import native_library, why_not

Way = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """A layer of the default model.

    shape  (out_features, in_features)
    rows   how many are multiplied, case by case
    """

    shape: tuple[int, int]
    rows: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return 4 * self.shape[0] * self.shape[1]


FEWEST_ROWS, MOST_ROWS = 1, 512
_ROWS = (FEWEST_ROWS, 8, 32, 128, MOST_ROWS)
LAYERS = {
    "qkv": Layer((960, 576), _ROWS),
    "output": Layer((576, 576), _ROWS),
    "gate, up": Layer((3_072, 576), _ROWS),
    "down": Layer((576, 1_536), _ROWS),
    "head": Layer((49_152, 576), (FEWEST_ROWS, 8, 32)),
}

NUM_MATRICES = 30
MOST_BYTES = 640_000_000
"""Of weights at a time: as they are, packed by oneDNN and packed by us."""

BYTES_TO_SUM = 600_000_000


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


def packed_by_onednn(weight: Tensor) -> Way:
    """See the module. torch's compiler packs weights with the same two functions."""
    # What oneDNN chooses for 8 serves every number of rows best.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def ours(weight: Tensor) -> Way:
    """See the module."""
    return NativeLinear(native_library(), weight, None)


def has_onednn() -> bool:
    """Whether torch packs float32 weights here."""
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return is_x86 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def ways() -> dict[str, Callable[[Tensor], Way]]:
    """Those that can run here, by name."""
    packed = {"oneDNN packed": packed_by_onednn} if has_onednn() else {}
    return {"F.linear": plain, "transposed": transposed, **packed, "ours": ours}


def matrices_for(layer: Layer) -> int:
    """How many matrices to go through in turn: fewer where so many would take too much memory."""
    return max(1, min(NUM_MATRICES, MOST_BYTES // (3 * layer.num_bytes)))


def fastest_of(num_rounds: int, *actions: Callable[[], object]) -> list[float]:
    """The lowest seconds of each; they take turns."""
    fastest = [float("inf")] * len(actions)
    for _ in range(num_rounds):
        for index, action in enumerate(actions):
            started = perf_counter()
            action()
            fastest[index] = min(fastest[index], perf_counter() - started)
    return fastest


@torch.inference_mode()
def measure(layer: Layer, num_rounds: int) -> dict[int, dict[str, Found]]:
    """What was found, by number of rows and way."""
    generator = torch.Generator().manual_seed(0)
    num_matrices = matrices_for(layer)
    weights = [torch.randn(layer.shape, generator=generator) * 0.05 for _ in range(num_matrices)]
    products = {name: [make(weight) for weight in weights] for name, make in ways().items()}
    found = {}
    for num_rows in layer.rows:
        rows = torch.randn(num_rows, layer.shape[1], generator=generator)
        exact = rows.double() @ weights[0].double().t()
        turns = [partial(_each, these, rows) for these in products.values()]
        times = fastest_of(num_rounds, *turns)
        found[num_rows] = {
            name: _judge(product, rows, exact, seconds / num_matrices)
            for (name, (product, *_)), seconds in zip(products.items(), times, strict=True)
        }
    return found


def _each(products: list[Way], rows: Tensor) -> None:
    for product in products:
        product(rows)


def _judge(product: Way, rows: Tensor, exact: Tensor, seconds: float) -> Found:
    result = product(rows)
    error = float((result - exact).abs().mean())
    return Found(seconds * 1e6, error, torch.equal(result[:1], product(rows[:1])))


def bytes_a_second(num_rounds: int) -> float:
    """What memory brings: the sums of as many tensors in turn, which no cache can hold together."""
    pieces = [torch.ones(BYTES_TO_SUM // 4 // NUM_MATRICES) for _ in range(NUM_MATRICES)]
    (seconds,) = fastest_of(num_rounds, lambda: [piece.sum() for piece in pieces])
    return sum(4 * piece.numel() for piece in pieces) / seconds


def rates_of_ours(layer: Layer, found: dict[int, dict[str, Found]]) -> tuple[float, float | None]:
    """(GB/s of weights with the fewest rows, GFLOP/s with the most; None: not measured)."""
    gigabytes = layer.num_bytes / found[FEWEST_ROWS]["ours"].microseconds / 1e3
    if MOST_ROWS not in found:
        return gigabytes, None
    # A multiplication and an addition for each row and weight.
    operations = 2 * MOST_ROWS * layer.shape[0] * layer.shape[1]
    return gigabytes, operations / found[MOST_ROWS]["ours"].microseconds / 1e3


def main() -> int:
    """Print the tables; exit code 2 where our kernels cannot run."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_linear")
    parser.add_argument("--rounds", type=int, default=10, help="rounds a shape (default 10)")
    arguments = parser.parse_args()
    if missing := why_not("native", torch.device("cpu"), torch.float32):
        print(f"benchmarks.cpu_linear: {missing}")
        return 2
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", sep=", ")
    if not has_onednn():
        print("oneDNN packed is left out: this processor or this torch has no packed weights")
    print(f"\n{'us a product':22}" + "".join(f"{name:>15}" for name in ways()))
    all_found: list[dict[str, Found]] = []
    rates = {}
    for name, layer in LAYERS.items():
        found = measure(layer, arguments.rounds)
        for num_rows, row in found.items():
            times = "".join(f"{each.microseconds:15,.0f}" for each in row.values())
            print(f"{name:10}{num_rows:>7} rows{times}", flush=True)
        all_found += found.values()
        rates[name] = rates_of_ours(layer, found)
    errors = [sum(row[name].error for row in all_found) / len(all_found) for name in ways()]
    print(f"{'mean error':22}" + "".join(f"{error:15.1e}" for error in errors))
    same = [sum(row[name].bits_as_alone for row in all_found) for name in ways()]
    counts = "".join(f"{f'{count} of {len(all_found)}':>15}" for count in same)
    print(f"{'bits as alone':22}{counts}")
    few, many = f"{FEWEST_ROWS} row, GB/s", f"{MOST_ROWS} rows, GFLOP/s"
    print(f"\n{'ours':10}{few:>15}{many:>20}")
    for name, (gigabytes, gigaflops) in rates.items():
        shown = "-" if gigaflops is None else f"{gigaflops:.0f}"
        print(f"{name:10}{gigabytes:15.1f}{shown:>20}")
    limit = bytes_a_second(arguments.rounds) / 1e9
    print(f"memory brings {limit:.1f} GB/s (torch's sums over {BYTES_TO_SUM / 1e6:,.0f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
