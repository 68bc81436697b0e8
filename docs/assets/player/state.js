/* What the replay keeps of the pool, the tables and the queues, and small moves on it. */
;(function (player) {
  "use strict"

  const CACHE = "cache"

  function emptyBlock() {
    return { holders: [], refCount: 0, key: null, slots: [], isSuspect: false }
  }

  /* `tokens` are those the trace ever tells of; `numTokens` of them are known so far. */
  function newSequence(state, tokens, promptLength, mayRead) {
    const arrival = state.numArrivals++
    return {
      arrival,
      tokens,
      promptLength,
      mayRead,
      numTokens: promptLength,
      computed: 0,
      cached: 0,
      table: [],
      scheduled: null,
      status: "waiting",
      wasPreempted: false,
      reason: null,
    }
  }

  function insertByArrival(state, queue, name) {
    const { arrival } = state.sequences[name]
    const place = queue.findIndex((other) => state.sequences[other].arrival > arrival)
    queue.splice(place < 0 ? queue.length : place, 0, name)
  }

  function removeFrom(list, item) {
    const index = list.indexOf(item)
    if (index >= 0) list.splice(index, 1)
  }

  function sorted(list) {
    return [...list].sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0))
  }

  /* The state before the first event: all blocks free, nobody there. */
  function startState({ num_kv_blocks: numBlocks, max_num_batched_tokens: budget }) {
    const blocks = Array.from({ length: numBlocks }, () => emptyBlock())
    return {
      blocks,
      sequences: {},
      numArrivals: 0,
      waiting: [],
      running: [],
      finished: [],
      free: [...blocks.keys()],
      lru: [],
      step: 0,
      budget,
      budgetLeft: budget,
      touched: { blocks: [], sequence: null },
      mismatches: [],
    }
  }

  /* A copy to go on from. Tokens and written slots never change, so they are shared. */
  function copyState(state) {
    const sequences = {}
    for (const [name, sequence] of Object.entries(state.sequences)) {
      sequences[name] = { ...sequence, table: [...sequence.table] }
    }
    const copyBlock = (block) => ({
      ...block,
      holders: [...block.holders],
      slots: [...block.slots],
    })
    return {
      ...state,
      blocks: state.blocks.map(copyBlock),
      sequences,
      waiting: [...state.waiting],
      running: [...state.running],
      finished: [...state.finished],
      free: [...state.free],
      lru: [...state.lru],
    }
  }

  player.state = {
    startState,
    copyState,
    CACHE,
    emptyBlock,
    newSequence,
    insertByArrival,
    removeFrom,
    sorted,
  }
})((window.BlockTablePlayer ??= {}))
