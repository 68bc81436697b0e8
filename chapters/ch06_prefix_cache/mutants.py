"""Wrong answers to chapter 6, each one small, most of them seen in real engines.

Many leave the tokens of a simple run right: that is why the chapter checks contents and counts.
"""

from chapters.catalog import Mutant

_CHAIN = "parent = hash_function(parent + tokens_as_bytes(token_ids[start : start + block_size]))"
_ROOT = "parent = hash_function(repr(key_fields).encode())"
_HOLDS = """        same_start = self.parent is parent and self.key_fields == key_fields
        return same_start and self.tokens == tokens
"""
_LIMIT = "limit = (sequence.num_tokens - 1) // self.block_size"
_MATCH_TEST = """            if found is None or not found.holds(
                self._tokens(sequence, i), parent, sequence.key_fields
            ):
                break
"""
_REFUSAL = """        if not self.can_allocate(sequence, num_new_tokens, hits):
            raise BlockError(
"""
_REFERENCE_HITS = """        for block in hits:
            self._reference(block)
            sequence.block_table.append(block)
        sequence.num_computed_tokens += len(hits) * self.block_size
"""
_MAKE_ROOM = """        while self.num_free < num_missing:
            self._evict_oldest()
"""
_TAKE = "        sequence.block_table += [self.take() for _ in range(num_missing)]\n"
_FULL = "self.keys(sequence)[: end // self.block_size]"
_PUBLISH = """                self.cached[key] = self._cached_at[block] = found
                self.ref_counts[block] += 1
"""
_COLLISION = """            elif not found.holds(tokens, parent, sequence.key_fields):
                break
"""
_SWAP = """            elif found.block != block:
                self._reference(found.block)
                sequence.block_table[i] = found.block
                self.release(block)
"""
_FREE = """            block = sequence.block_table.pop()
            if self.release(block) == 1 and block in self._cached_at:
"""
_CAP = """        while len(self.idle) > self.max_num_idle:
            self._evict_oldest()
"""
_OLDEST = "block, cached = self.idle.popitem(last=False)"
_IN_USE = """        if self.num_usable < self.num_blocks:
            return False
"""

MUTANTS = (
    # Keys
    Mutant(
        name="unchained_key",
        task="6.1",
        broken="C6.2",
        story="Two prompts that share a middle share its KV, although it saw different starts.",
        changes=((_CHAIN, _CHAIN.replace("parent + ", "")),),
    ),
    Mutant(
        name="key_of_the_tail",
        task="6.1",
        broken="C6.1",
        story="The last, half-full block has a key, too: two sequences would write into it.",
        changes=(
            (
                "range(0, len(token_ids) - block_size + 1, block_size)",
                "range(0, len(token_ids), block_size)",
            ),
        ),
    ),
    Mutant(
        name="key_of_single_bytes",
        task="6.1",
        broken="C6.4",
        story="bytes(token_ids) raises for the first token id above 255.",
        changes=((_CHAIN, _CHAIN.replace("tokens_as_bytes(", "bytes(")),),
    ),
    Mutant(
        name="key_of_low_bytes",
        task="6.1",
        broken="C6.4",
        story="Ids that differ by 256 have the same key: hits are lost, or wrong where trusted.",
        changes=(
            (
                _CHAIN,
                "tokens = token_ids[start : start + block_size]\n"
                "        parent = hash_function(parent + bytes(each % 256 for each in tokens))",
            ),
        ),
    ),
    Mutant(
        name="key_without_fields",
        task="6.1",
        broken="C6.3",
        story="A prompt under another adapter, or another user's salt, has the same keys.",
        changes=((_ROOT, 'parent = hash_function(b"")'),),
    ),
    Mutant(
        name="fields_joined_as_text",
        task="6.1",
        broken="C6.3",
        story='The fields ("a", "b") and ("ab",), or "1" and 1, give the same keys.',
        changes=((_ROOT, 'parent = hash_function("".join(map(str, key_fields)).encode())'),),
    ),
    Mutant(
        name="compares_its_own_tokens_only",
        task="6.1",
        broken="C6.5",
        story="When hashes collide, a block is taken that was computed behind other tokens.",
        changes=((_HOLDS, "        return self.tokens == tokens\n"),),
    ),
    Mutant(
        name="compares_no_fields",
        task="6.1",
        broken="C6.5",
        story="When hashes collide, one user's block is given to another.",
        changes=((_HOLDS, _HOLDS.replace(" and self.key_fields == key_fields", "")),),
    ),
    # Lookup
    Mutant(
        name="whole_prompt_is_a_hit",
        task="6.2",
        broken="C6.7",
        story="Nothing is left to compute, so there are no logits to choose the next token from.",
        changes=((_LIMIT, "limit = sequence.num_tokens // self.block_size"),),
    ),
    Mutant(
        name="collision_trusted_by_lookup",
        task="6.2",
        broken="I7",
        story="Two blocks with the same hash are taken for each other, once in a blue moon.",
        changes=((_MATCH_TEST, "            if found is None:\n                break\n"),),
    ),
    Mutant(
        name="lookup_goes_on_behind_a_miss",
        task="6.2",
        broken="C6.6",
        story="Blocks are grafted into the table at positions where they do not belong.",
        changes=((_MATCH_TEST, "            if found is None:\n                continue\n"),),
    ),
    Mutant(
        name="lookup_misses_the_last_block",
        task="6.2",
        broken="C6.6",
        story="No wrong value, but 16 tokens of each request are computed for nothing.",
        changes=((_LIMIT, "limit = (sequence.num_tokens - 1) // self.block_size - 1"),),
    ),
    Mutant(
        name="lookup_counts_as_use",
        task="6.2",
        broken="C6.9",
        story="A waiting request looks up in each step and keeps its prefix; others lose theirs.",
        changes=(
            (
                "            hits.append(found)\n",
                "            hits.append(found)\n"
                "            if found.block in self.idle:\n"
                "                self.idle.move_to_end(found.block)\n",
            ),
        ),
    ),
    # Sharing and publishing
    Mutant(
        name="share_is_not_counted",
        task="6.3",
        broken="I2",
        story="The first reader to end frees the block under all others.",
        changes=(
            (
                "        self.ref_counts[block] += 1\n        self.idle.pop(block, None)\n",
                "        self.idle.pop(block, None)\n",
            ),
        ),
    ),
    Mutant(
        name="hit_stays_idle",
        task="6.3",
        broken="I1",
        story="A block that is being read is still on the list of those to evict.",
        changes=(("        self.idle.pop(block, None)\n", ""),),
    ),
    Mutant(
        name="hits_are_computed_again",
        task="6.3",
        broken="C6.10",
        story="The prefix is written anew, into blocks that others are reading.",
        changes=(("        sequence.num_computed_tokens += len(hits) * self.block_size\n", ""),),
    ),
    Mutant(
        name="hits_behind_the_new_blocks",
        task="6.3",
        broken="C6.10",
        story="The sequence reads its own empty blocks as its start, and the prefix as its end.",
        changes=(
            (
                _REFERENCE_HITS,
                _REFERENCE_HITS.replace("sequence.block_table.append(block)", "pass"),
            ),
            (_TAKE, _TAKE + "        sequence.block_table += hits\n"),
        ),
    ),
    Mutant(
        name="idle_hits_counted_as_usable",
        task="6.3",
        broken="C6.11",
        story="An allocation is promised that would have to evict the very blocks it shares.",
        changes=(("<= self.num_usable - num_idle_hits", "<= self.num_usable"),),
    ),
    Mutant(
        name="only_free_blocks_are_usable",
        task="6.3",
        broken="C6.11",
        story="Once the pool is full of cached blocks, no request is admitted any more.",
        changes=(("<= self.num_usable - num_idle_hits", "<= self.num_free"),),
    ),
    Mutant(
        name="refused_allocation_keeps_its_hits",
        task="6.3",
        broken="I9",
        story="Each attempt of a waiting request adds holders that never let go.",
        changes=(
            (_REFERENCE_HITS, ""),
            (
                "        num_missing = self._num_missing(sequence, num_new_tokens, hits)\n"
                "        if not",
                "        num_missing = self._num_missing(sequence, num_new_tokens, hits)\n"
                "        fits = self.can_allocate(sequence, num_new_tokens, hits)\n"
                f"{_REFERENCE_HITS}"
                "        if not",
            ),
            (
                _REFUSAL,
                _REFUSAL.replace("self.can_allocate(sequence, num_new_tokens, hits)", "fits"),
            ),
        ),
    ),
    Mutant(
        name="refused_allocation_changes_the_lru_order",
        task="6.3",
        broken="I9",
        story="A request that cannot run decides which prefixes the others lose.",
        changes=(
            (
                _REFUSAL,
                "        for block in hits:\n"
                "            if block in self.idle:\n"
                "                self.idle.move_to_end(block)\n"
                f"{_REFUSAL}",
            ),
        ),
    ),
    Mutant(
        name="published_at_allocation",
        task="6.3",
        broken="I6",
        story="Another request of the same step reads KV that nobody has written yet.",
        changes=(
            (
                _TAKE,
                f"{_TAKE}"
                "        computed = sequence.num_computed_tokens\n"
                "        self.commit(sequence, computed + num_new_tokens)\n"
                "        sequence.num_computed_tokens = computed\n",
            ),
        ),
    ),
    Mutant(
        name="partial_block_published",
        task="6.3",
        broken="I6",
        story="A block is found of which the last slots are still empty.",
        changes=((_FULL, "self.keys(sequence)[: -(-end // self.block_size)]"),),
    ),
    Mutant(
        name="known_tokens_taken_for_computed",
        task="6.3",
        broken="I6",
        story="The newest token is known, but its KV is not written: its block is published.",
        changes=((_FULL, "self.keys(sequence)"),),
    ),
    Mutant(
        name="cache_is_not_counted",
        task="6.3",
        broken="I2",
        story="A finished request's blocks become free while keys still find them.",
        changes=((_PUBLISH, _PUBLISH.splitlines(keepends=True)[0]),),
    ),
    Mutant(
        name="second_copy_is_kept",
        task="6.3",
        broken="C6.14",
        story="A sequence holds blocks behind a copy that the cache does not know, so parents"
        " can be evicted before their children.",
        changes=((_SWAP, ""),),
    ),
    Mutant(
        name="second_copy_leaks",
        task="6.3",
        broken="I2",
        story="The block that was computed for nothing is never given back.",
        changes=((_SWAP, "".join(_SWAP.splitlines(keepends=True)[:-1])),),
    ),
    Mutant(
        name="collision_trusted_by_commit",
        task="6.3",
        broken="I7",
        story="A sequence throws away what it has computed and reads another one's block.",
        changes=((_COLLISION, ""),),
    ),
    Mutant(
        name="published_behind_a_collision",
        task="6.3",
        broken="C6.15",
        story="A block from the middle of a prompt is cached as if it stood at the start.",
        changes=((_COLLISION, _COLLISION.replace("break", "continue")),),
    ),
    # Eviction
    Mutant(
        name="head_released_first",
        task="6.4",
        broken="C6.16",
        story="The start of a chain is evicted first, and all behind it can never be found again.",
        changes=((_FREE, _FREE.replace("pop()", "pop(0)")),),
    ),
    Mutant(
        name="block_in_use_becomes_idle",
        task="6.4",
        broken="I1",
        story="A block is evicted and overwritten while another request reads it.",
        changes=((_FREE, _FREE.replace("== 1", ">= 1")),),
    ),
    Mutant(
        name="fifo_by_publish",
        task="6.4",
        broken="C6.17",
        story="The system prompt, published first and used by everybody, is evicted first.",
        changes=(
            (
                _OLDEST,
                "block = next(block for block in self._cached_at if block in self.idle)\n"
                "        cached = self.idle.pop(block)",
            ),
        ),
    ),
    Mutant(
        name="most_recent_evicted",
        task="6.4",
        broken="C6.17",
        story="What was used a moment ago goes, and what nobody asks for stays.",
        changes=((_OLDEST, "block, cached = self.idle.popitem()"),),
    ),
    Mutant(
        name="everything_evicted",
        task="6.4",
        broken="C6.17",
        story="One block is needed, and the whole cache is gone.",
        changes=((_MAKE_ROOM, _MAKE_ROOM.replace("self.num_free < num_missing", "self.idle")),),
    ),
    Mutant(
        name="hits_evicted_to_make_room",
        task="6.4",
        broken="C6.17",
        story="A request evicts its own prefix between finding and referencing it.",
        changes=((_REFERENCE_HITS + _MAKE_ROOM, _MAKE_ROOM + _REFERENCE_HITS),),
    ),
    Mutant(
        name="stale_key_left",
        task="6.4",
        broken="C6.18",
        story="The old key finds a block that another request is writing to.",
        changes=(("        del self.cached[cached.key]\n", ""),),
    ),
    Mutant(
        name="evicted_block_is_lost",
        task="6.4",
        broken="C6.18",
        story="The evicted block never comes back to the free list: the pool shrinks.",
        changes=(
            (
                "        self.release(block)\n        self.evictions += 1\n",
                "        self.evictions += 1\n",
            ),
        ),
    ),
    Mutant(
        name="cap_ignored",
        task="6.4",
        broken="C6.19",
        story="The share of the pool that the cache may keep is a setting without effect.",
        changes=((_CAP, ""),),
    ),
    Mutant(
        name="cap_off_by_one",
        task="6.4",
        broken="C6.19",
        story="A cache that may keep 4 blocks keeps 3.",
        changes=((_CAP, _CAP.replace(">", ">=")),),
    ),
    Mutant(
        name="reset_while_in_use",
        task="6.4",
        broken="C6.20",
        story="After new weights, a running request goes on to publish blocks of the old ones.",
        changes=((_IN_USE, ""),),
    ),
)
