"""A real engine that keeps what each sequence reads: its logits, its keys and values.

After every step the keys and values of each scheduled sequence are gathered through its block
table, positions [0, end), and compared there and then with what it read before, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minivllm import SamplingParams
from minivllm.core.batch import SampledToken, ScheduledBatch
from minivllm.output import RequestOutput
from tests.alignment import ATOL, RTOL, Oracle, RecordingEngine

BLOCK_SIZE = 4


class Tiny(NamedTuple):
    """A saved model, and what transformers computes with it."""

    folder: Path
    oracle: Oracle


class Recorded(RecordingEngine):
    """Block size 4, every check on; slots that nobody has written hold NaN.

    kv       request id -> [num_layers, 2 (keys, values), positions, num_kv_heads, head_dim]
    tables   request id -> its block table in its last step
    ranges   for each step: request id -> the positions [start, end) it computed
    """

    def __init__(self, tiny: Tiny, **config: Any) -> None:
        super().__init__(tiny.folder, block_size=BLOCK_SIZE, **config)
        self._tiny = tiny
        self.kv: dict[str, torch.Tensor] = {}
        self.tables: dict[str, list[int]] = {}
        self.ranges: list[dict[str, tuple[int, int]]] = []
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        for keys, values in self.engine.runner._kv:
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._execute_and_record

    def add(self, name: str, prompt: list[int], num_tokens: int) -> None:
        """Add a request for exactly `num_tokens` greedy tokens."""
        self.requests[name] = (prompt, num_tokens)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self.engine.add_request(name, prompt, params)

    def step(self) -> dict[str, tuple[int, int]]:
        """One step; the positions that each scheduled sequence computed."""
        for output in self.engine.step():
            if output.finished:
                self.outputs[output.request_id] = output
        return self.ranges[-1]

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_unfinished_requests():
            self.step()

    def ref_counts(self, name: str, num_blocks: int) -> list[int]:
        """How many refer to each of the first blocks that `name` holds or held."""
        return [self.engine.kv.blocks.ref_counts[b] for b in self.tables[name][:num_blocks]]

    def read(self, block_table: list[int], num_positions: int) -> torch.Tensor:
        """Gather [0, num_positions) through a block table; see `kv`."""
        layers = [torch.stack((keys, values)) for keys, values in self.engine.runner._kv]
        return torch.stack(layers)[:, :, block_table].flatten(2, 3)[:, :, :num_positions]

    def check_against_the_cache_off_and_transformers(self, *, writer: str) -> None:
        """Tokens, logits, keys and values of all requests, as an engine without cache has them.

        What the others got from the cache, `writer` has computed: bit for bit as it does in an
        engine without cache. There each request runs alone, so that its prefill has the same
        shapes, and float32 the same order of additions.
        """
        off = Recorded(self._tiny, enable_prefix_caching=False)
        for name, (prompt, num_tokens) in self.requests.items():
            off.add(name, prompt, num_tokens)
            off.finish()
        for name, (_, num_tokens) in self.requests.items():
            output = self.outputs[name]
            assert output.finish_reason == "length", name
            assert output.token_ids == off.outputs[name].token_ids, name
            assert off.outputs[name].num_cached_tokens == 0
            logits = self.logits(name, num_tokens)
            assert_close(logits, off.logits(name, num_tokens), f"{name}: logits with cache off")
            self._check_transformers(self._tiny.oracle, name, logits)
            assert_same_kv(self.kv[name], off.kv[name], f"{name} with the cache on and off")
            cached = slice(output.num_cached_tokens)
            what = f"what {name} got from the cache and {writer} computes without one"
            assert_identical(self.kv[name][:, :, cached], off.kv[writer][:, :, cached], what)

    def _check_transformers(self, oracle: Oracle, name: str, logits: torch.Tensor) -> None:
        prompt, num_tokens = self.requests[name]
        token_ids = self.outputs[name].token_ids
        assert token_ids == oracle.generate(prompt, num_tokens), name
        assert_close(logits, oracle.logits(prompt, token_ids), f"{name}: logits of transformers")

    def _execute_and_record(self, batch: ScheduledBatch) -> list[SampledToken]:
        given = {s.request_id: self.read(s.block_table, s.start) for s in batch.sequences}
        sampled = self._execute(batch)
        self.ranges.append({s.request_id: (s.start, s.end) for s in batch.sequences})
        for sequence in batch.sequences:
            name, table = sequence.request_id, list(sequence.block_table)
            now = self.read(table, sequence.end)
            before = self.kv.get(name, given[name])
            what = f"what {name} reads in step {len(self.ranges)} and read before it"
            assert_same_kv(now[:, :, : before.shape[2]], before, what)
            # One key, one block: a block may have been swapped for one that another sequence
            # computed, in a prefill of another shape. Those positions are equal, not identical.
            is_kept = [
                block == block_before
                for block, block_before in zip(table, self.tables.get(name, table), strict=False)
            ]
            kept = [p for p in range(before.shape[2]) if is_kept[p // BLOCK_SIZE]]
            assert_identical(now[:, :, kept], before[:, :, kept], what)
            self.kv[name], self.tables[name] = now, table
        return sampled


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, atol=ATOL, rtol=RTOL, msg=lambda message: f"{what}: {message}"
    )


def assert_same_kv(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Position by position equal, up to the order of additions in float32."""
    _assert_each_position(
        found, expected, lambda one, other: torch.allclose(one, other, ATOL, RTOL), what
    )


def assert_identical(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Position by position equal bit for bit; NaN, a slot that nobody has written, never is."""
    _assert_each_position(found, expected, torch.equal, what)


def _assert_each_position(
    found: torch.Tensor,
    expected: torch.Tensor,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
    what: str,
) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape}, expected {expected.shape}"
    wrong = [
        position
        for position in range(found.shape[2])
        if not agree(found[:, :, position], expected[:, :, position])
    ]
    assert wrong == [], f"{what}: keys or values differ at the positions {wrong}"
