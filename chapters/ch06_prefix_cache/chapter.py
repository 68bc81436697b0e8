"""What chapter 6 asks for."""

from chapters.catalog import Chapter, Task

CHAPTER = Chapter(
    number=6,
    name="ch06_prefix_cache",
    title="Prefix cache",
    minutes=180,
    builds="A pool that keeps what it has computed, and gives a new request the blocks of the"
    " longest prefix that it shares with an earlier one.",
    needs=("ch03_block_manager",),
    observed=("CachingBlockManager",),
    tasks=(
        Task(
            number="6.1",
            title="Block keys",
            contract={
                "C6.1": "block_keys() gives one key for each full block, first to last, and none"
                " for the tokens after the last full block.",
                "C6.2": "A key covers its block's tokens and all tokens before them: another token"
                " changes the key of its own block and of all later ones, and no earlier key.",
                "C6.3": "Other key fields give other keys: the first key is chained to a root that"
                " is made from repr(key_fields).",
                "C6.4": "Every token id counts in full, those above 255 too.",
                "C6.5": "holds() is True only for equal tokens, the same parent object and equal"
                " key fields.",
            },
            hints=(
                "`5 6 7 8` is the second block of one prompt and the first of another. Are their"
                " keys and values equal? What did each of them attend to?",
                "Walk over the full blocks and carry a hash along. It starts as the hash of"
                " repr(key_fields).encode(); each block's key is the next value.",
                "For each start in range(0, len(token_ids) - block_size + 1, block_size):"
                " parent = hash_function(parent + tokens_as_bytes(the block's tokens)), and"
                " parent is the block's key. holds: `self.parent is parent` and two `==`.",
            ),
        ),
        Task(
            number="6.2",
            title="Longest prefix",
            contract={
                "C6.6": "match() returns the blocks of the longest cached prefix, first block"
                " first, and ends at the first block that misses.",
                "C6.7": "match() looks up (num_tokens - 1) // block_size blocks at most.",
                "C6.8": "A block found under a key is a hit only if it holds the same tokens"
                " behind the hit before it, under the same key fields.",
                "C6.9": "match() changes nothing: no count, no table, no LRU order.",
            },
            hints=(
                "All 8 tokens of a prompt are cached, block size 4. If both blocks are hits,"
                " what is left to compute, and where would the next token come from?",
                "Go through the keys from the first on, and stop at the first that is not in"
                " self.cached, or whose block does not hold what you look for. The parent that"
                " you expect is the hit before.",
                "limit = (num_tokens - 1) // block_size. For i, key in"
                " enumerate(self.keys(sequence)[:limit]): found = self.cached.get(key); if it is"
                " None or not found.holds(self._tokens(sequence, i), parent,"
                " sequence.key_fields): break; else append it. Return their .block.",
            ),
        ),
        Task(
            number="6.3",
            title="Share and publish",
            contract={
                "C6.10": "allocate() puts the hits at the head of the table, counts one more holder"
                " for each, and counts their positions as computed.",
                "C6.11": "can_allocate() is True exactly when the blocks needed besides the hits"
                " are at most those free or idle, idle hits not counted.",
                "C6.12": "allocate() raises BlockError, and changes nothing, when can_allocate()"
                " is False.",
                "C6.13": "commit() publishes each block whose positions are all computed, and"
                " counts the cache as one more holder; it publishes no other block.",
                "C6.14": "commit() of a block whose content is cached already puts the cached block"
                " into the table and releases the sequence's own.",
                "C6.15": "commit() of a block whose key is taken by other content publishes neither"
                " it nor any block after it.",
            },
            hints=(
                "Three blocks, two of them idle, one free. A prompt hits both idle ones and needs"
                " two more. num_usable is 3. What is left for it once it holds its hits?",
                "Two steps, the same order each time: first ask (can_allocate changes nothing),"
                " then act (reference the hits, make room, take). In commit, walk over the blocks"
                " that are full now; for each key there are four cases: not cached; cached with"
                " other content; cached in this very block; cached in another block.",
                "not cached: a new CachedBlock, into self.cached and self._cached_at, the count one"
                " more. Other content: break. Another block: self._reference(found.block), put it"
                " into the table, self.release(the own one). Then parent = found. Full are the"
                " first end // block_size blocks.",
            ),
        ),
        Task(
            number="6.4",
            title="Idle blocks and eviction",
            contract={
                "C6.16": "free() releases the last block first; a cached block that no table holds"
                " any more is then the most recently used idle one, any other is free.",
                "C6.17": "allocate() evicts only when too few blocks are free, the least recently"
                " used idle block first, no more than needed, and never a hit.",
                "C6.18": "An evicted block is free, and no key finds it.",
                "C6.19": "After free() at most max_num_idle blocks are idle; the least recently"
                " used are evicted.",
                "C6.20": "reset() forgets all and returns True; while a sequence holds a block it"
                " returns False and changes nothing.",
            },
            hints=(
                "A chain of three blocks becomes idle, and one of them must go. If it is the first"
                " one, what are the other two still good for?",
                "The last block of a table is released first, so it is the oldest in self.idle."
                " A cached block that no table holds counts 1: the cache. To evict is to undo"
                " publishing: both dictionaries, and the count.",
                "free: pop from the table; if self.release(block) == 1 and block in"
                " self._cached_at: self.idle[block] = self._cached_at[block]. Evict:"
                " self.idle.popitem(last=False), del self.cached[key], del"
                " self._cached_at[block], self.release(block), count it.",
            ),
        ),
    ),
)
