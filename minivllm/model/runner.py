"""The runner: a scheduled batch becomes tensors, logits, and tokens. One function a thought."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from kernels.batch import PagedBatch
from kernels.decode_graphs import CudaGraphRecorder, DecodeGraphs
from kernels.spare_memory import MOST_BLOCKS, out_of_memory, spare_memory, step_bytes
from kernels.transfer import to_device
from minivllm.config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from minivllm.core.batch import SampledToken, ScheduledBatch, ScheduledSequence, TokenLogprobs
from minivllm.errors import ConfigError, DeviceError, ModelError
from minivllm.model.attention import KVCache, select_attention_backend
from minivllm.model.backend import choose_backend
from minivllm.model.decoder import Decoder
from minivllm.model.layer import select_layer
from minivllm.model.linear import select_linear
from minivllm.model.loader import Checkpoint, ModelFolder, resolve_model
from minivllm.model.ops import select_ops
from minivllm.model.sampler import Sampler

# Logits of a whole prompt are large (1,000 rows x 50,000 tokens = 200 MB): so many at a time.
_SCORED_ROWS = 128


def select_device(requested: str) -> torch.device:
    """The torch device: auto is cuda where torch sees one, else cpu. Raises DeviceError."""
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise DeviceError("device is 'cuda', but torch sees no CUDA GPU; use cpu or auto")
    return torch.device("cpu" if requested == "cpu" or not has_cuda else "cuda")


def select_dtype(requested: str, device: torch.device, weight_dtype: str) -> torch.dtype:
    """The dtype to compute in: auto is float32 on cpu and the checkpoint's own dtype elsewhere."""
    own = "float32" if device.type == "cpu" else weight_dtype
    dtype: torch.dtype = getattr(torch, own if requested == "auto" else requested)
    return dtype


class ModelRunner:
    """Implements core.batch.Runner with a real model. It trusts what the engine has checked."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model that `config` names. Raises ConfigError, DeviceError, ModelError."""
        self.device = select_device(config.device)
        self._config = config
        folder = ModelFolder.open(resolve_model(config.model))
        self.dtype = select_dtype(config.dtype, self.device, folder.weight_dtype)
        self.backend = choose_backend(config.attention_backend, self.device, self.dtype)
        self._begin_attention = select_attention_backend(self.backend)
        self.model_config = folder.config
        self.model_path = folder.path
        self.vocab_size = folder.config.vocab_size
        self.max_model_len = folder.config.max_position_embeddings
        self.eos_token_ids: Sequence[int] = folder.eos_token_ids
        self._decoder = self._build(folder)
        self._sampler = Sampler()
        self._kv: list[KVCache] = []
        self._graphs: DecodeGraphs | None = None

    @property
    def position_config(self) -> str:
        """How positions enter the keys: KV computed under another one is not the same KV."""
        return f"{self.model_config.rope!r} head_dim={self.model_config.head_dim}"

    def load_weights(self, path: str) -> None:
        """Take the weights of another checkpoint of the same network; the KV cache stays.

        Raises ModelError, and keeps the old weights, if they cannot be read or do not fit.
        """
        folder = ModelFolder.open(resolve_model(path))
        differences = [
            f"{name} is {new!r}, not {old!r}"
            for name, new in asdict(folder.config).items()
            if new != (old := asdict(self.model_config)[name])
        ]
        if differences:
            raise ModelError(f"{path} holds another network: {'; '.join(differences)}")
        self._decoder = self._build(folder)
        if self._graphs is not None:
            self._graphs.forget()

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of keys and values, all layers together, for `block_size` tokens."""
        config = self.model_config
        values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return values_per_token * block_size * self.dtype.itemsize

    @property
    def spare_bytes(self) -> int:
        """Bytes for the pool where nobody says: on a GPU what is free, less what a step needs."""
        if self.device.type != "cuda":
            return DEFAULT_KV_CACHE_BYTES
        held = sum(part.nbytes for cache in self._kv for part in cache)
        needed = step_bytes(self.model_config, self._config, self.dtype.itemsize)
        most = MOST_BLOCKS * self.kv_bytes_per_block(self._config.block_size)
        return max(min(spare_memory(self.device, held) - needed, most), 0)

    def init_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the paged KV cache, its content undefined. Raises ConfigError if memory is short."""
        config = self.model_config
        shape = (2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        block_bytes = self.kv_bytes_per_block(block_size)
        self._kv, self._graphs = [], None  # first give back what an earlier call took
        try:
            for _ in range(config.num_layers):
                keys, values = torch.empty(shape, dtype=self.dtype, device=self.device)
                self._kv.append(KVCache(keys, values))
        except out_of_memory(self.device) as error:
            self._kv = []
            needed = f"{num_blocks} KV blocks need {num_blocks * block_bytes:,} bytes"
            more = f"more than {self.device} has; lower num_kv_blocks or kv_cache_bytes"
            raise ConfigError(f"{needed}, {more}") from error
        self._graphs = self._decode_graphs(num_blocks, block_size)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Write the KV of every [start, end) and choose the next tokens; see core.batch.Runner.

        Up to the choice nothing waits for the device: numbers go there from pinned memory, and
        launches return at once, unless a prompt's log-probabilities are asked for: they are read.
        The next step is scheduled only when this one's tokens are known.
        """
        hidden = self._compute(batch.sequences)
        # Of sequence i it holds the rows [row_ends[i - 1], row_ends[i]).
        row_ends = list(accumulate(len(_wanted(s)) for s in batch.sequences))
        for sequence, row_end in zip(batch.sequences, row_ends, strict=True):
            if sequence.prompt_logprobs is not None:
                rows = hidden[row_end - (sequence.end - sequence.start) : row_end]
                self._score_prompt(sequence, rows, sequence.prompt_logprobs)
        return self._sample(batch.sequences, hidden, row_ends)

    def _build(self, folder: ModelFolder) -> Decoder:
        checkpoint = Checkpoint(folder.path, self.device, self.dtype)
        name = self.backend
        kernels = select_linear(name), select_ops(name), select_layer(name)
        try:
            decoder = Decoder(folder.config, checkpoint, *kernels)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"{self.device} has too little memory for {folder.path}") from error
        checkpoint.check_all_used()
        return decoder

    def _decode_graphs(self, num_blocks: int, block_size: int) -> DecodeGraphs | None:
        """Recordings of decode steps, for the kernels on a GPU; None elsewhere."""
        if self.device.type != "cuda" or self.backend != "triton":
            return None
        return DecodeGraphs(
            CudaGraphRecorder,
            device=self.device,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self._config.max_num_seqs,
            max_context_len=self._config.max_model_len or self.max_model_len,
        )

    def _compute(self, sequences: list[ScheduledSequence]) -> Tensor:
        """Compute [start, end) of all sequences; hidden states of what is _wanted of each."""
        # The row of each sequence's position start.
        firsts = accumulate((s.end - s.start for s in sequences), initial=0)
        rows = zip(sequences, firsts, strict=False)  # the last one is the end of all rows
        # One row at least: a kernel takes no empty batch.
        wanted = [first + position - s.start for s, first in rows for position in _wanted(s)] or [0]
        if self._graphs is not None and self._graphs.fits(sequences):
            return self._take(self._graphs.hidden(sequences, self._decode), wanted)
        # An array: a step may have many thousand tokens, and nothing is computed before.
        ids = chain.from_iterable(s.token_ids[s.start : s.end] for s in sequences)
        token_ids = to_device(np.fromiter(ids, np.int64), self.device)
        step = self._begin_attention(sequences, self._kv[0])
        return self._decoder.hidden(token_ids, self._kv, step, to_device(wanted, self.device))

    def _decode(self, token_ids: Tensor, batch: PagedBatch) -> Tensor:
        """What a CUDA graph records; see decode_graphs.Forward."""
        from kernels.step_attention import TritonAttention  # not on every machine

        return self._decoder.hidden(token_ids, self._kv, TritonAttention.of(batch))

    def _sample(
        self, sequences: list[ScheduledSequence], hidden: Tensor, row_ends: list[int]
    ) -> list[SampledToken]:
        """Choose a token for each sequence whose newest token was computed, from its last row."""
        sampling = [sequence for sequence in sequences if sequence.samples]
        if not sampling:
            return []
        ends = zip(sequences, row_ends, strict=True)
        last_rows = [row_end - 1 for sequence, row_end in ends if sequence.samples]
        logits = self._decoder.logits(self._take(hidden, last_rows))
        return self._sampler.sample(logits, sampling, self.eos_token_ids)

    def _take(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """`rows` of [n, hidden], ascending; all of them need no copy."""
        return hidden if len(rows) == len(hidden) else hidden[to_device(rows, self.device)]

    def _score_prompt(
        self, sequence: ScheduledSequence, hidden: Tensor, scores: list[TokenLogprobs | None]
    ) -> None:
        """Fill `scores` by position for what these rows predict; row i predicts start + i + 1.

        The row of the prompt's last token predicts no prompt token.
        """
        end = min(sequence.end, sequence.num_prompt_tokens - 1) + 1
        for first in range(sequence.start + 1, end, _SCORED_ROWS):
            scored = range(first, min(first + _SCORED_ROWS, end))
            rows = hidden[scored.start - 1 - sequence.start : scored.stop - 1 - sequence.start]
            next_token_ids = sequence.token_ids[scored.start : scored.stop]
            scores[scored.start : scored.stop] = self._sampler.prompt_logprobs(
                self._decoder.logits(rows), next_token_ids, sequence.params.prompt_logprobs or 0
            )


def _wanted(sequence: ScheduledSequence) -> range:
    """Positions whose hidden states are read: the newest token's, or all if it asks for scores."""
    if sequence.prompt_logprobs is not None:
        return range(sequence.start, sequence.end)
    return range(sequence.end - sequence.samples, sequence.end)
