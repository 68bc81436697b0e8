"""Chapter 3's names over the finished engine: its pool, and its cache's tables without caching."""

from types import SimpleNamespace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.batch import ScheduledSequence
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.trace import Trace
from minivllm.errors import BlockError


class BlockManager:
    """The finished engine's KVCache; chapter 1's adapter keeps its sequences out of the cache."""

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.metrics = Metrics()
        config = EngineConfig(block_size=block_size, **options)
        self.kv = KVCache(num_blocks, config, self.metrics, Trace())

    @property
    def engine_blocks(self) -> Any:
        """The engine's own BlockManager, whose lists take() and release() work on."""
        return self.kv.blocks

    @property
    def ref_counts(self) -> list[int]:
        """How many hold each block."""
        return self.kv.blocks.ref_counts

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.kv.blocks.num_free

    def free_order(self) -> list[int]:
        """Free block ids, the next one to be handed out first."""
        return self.kv.blocks.free_order()

    def take(self) -> int:
        """Hand out a free block."""
        return self.kv.blocks.take(1)[0]

    def release(self, block: int) -> int:
        """Count one holder less."""
        self.kv.blocks.release([block])
        return self.kv.blocks.ref_counts[block]

    def can_allocate(self, sequence: Any, num_new_tokens: int) -> bool:
        """True if allocate would succeed."""
        return self.kv.can_allocate(sequence, num_new_tokens, [])

    def allocate(self, sequence: Any, num_new_tokens: int) -> None:
        """The engine says False where the chapters raise."""
        if not self.kv.allocate(sequence, num_new_tokens, []):
            raise BlockError("refused")

    def commit(self, sequence: Any, end: int) -> None:
        """The KV of positions up to `end` is written."""
        self.kv.commit(sequence, end)

    def free(self, sequence: Any) -> None:
        """Let go of all its blocks."""
        self.kv.free(sequence)

    def slot_mapping(self, sequence: Any, start: int, end: int) -> list[int]:
        """The slots that a step's attention stores these positions in."""
        import torch  # slow to import, and only this needs it

        from minivllm.model import attention

        step = ScheduledSequence(
            sequence.request_id,
            sequence.token_ids,
            start,
            end,
            sequence.block_table,
            sequence.params,
        )
        memory = torch.empty(self.num_blocks, self.block_size, 1, 1)
        cache = attention.KVCache(memory, memory)
        attend = attention.TorchAttention.begin_step([step], cache)
        slots: list[int] = attend.gathered.slot_mapping.tolist()
        return slots


def adapt() -> SimpleNamespace:
    """The names of chapter 3 that its tests, and later chapters' adapters, use."""
    return SimpleNamespace(BlockManager=BlockManager, BlockError=BlockError)
