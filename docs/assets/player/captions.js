/* One event in plain words, and the invariant that stands behind it.
 *
 * Each caption is {text, invariant, because}: what happened, the id, and what the id promises.
 */
;(function (player) {
  "use strict"

  const MOST_TOLD = 6 // of the sequences in a step

  const PROMISES = {
    I1: "every block is exactly one of free, cached and idle, or in use",
    I2: "a ref count is the number of block tables that hold the block, plus 1 if the cache does",
    I3: "no slot of a published block is ever written",
    I4: "position p reads KV that was computed from exactly tokens 0 to p",
    I5: "after a step the table has as many blocks as the computed positions fill",
    I6: "a key can be found only once all of its block's KV is written",
    I7: "a hit needs the same tokens, the same parents and the same key fields",
    I8: "a lookup leaves at least one token to compute",
    I9: "a refused allocation changes nothing",
    I10: "each request is in exactly one of waiting, running, finished",
    I11: "each step computes something or finishes something",
    I12: "a decoding sequence gains a token in every step, or is preempted",
  }

  /* `before` and `after` are the states around the event. */
  player.caption = function (event, before, after, header) {
    const [text, invariant] = tell[event.event](event, before, after, header)
    return { text, invariant, because: PROMISES[invariant] }
  }

  player.promiseOf = (invariant) => PROMISES[invariant]

  const tell = {
    add: ({ sequence, token_ids: ids }) => [
      `${sequence} arrives with ${count(ids.length, "prompt token")} and waits.`,
      "I10",
    ],

    match({ sequence, num_tokens: numTokens, blocks }, before, after, { block_size: size }) {
      if (!after.sequences[sequence].mayRead)
        return [`${sequence} may not read the cache, so its lookup finds nothing.`, "I7"]
      const limit = Math.floor((numTokens - 1) / size)
      const most = `of ${numTokens} tokens at most ${limit * size} may match`
      if (!blocks.length)
        return [`${sequence} looks up its prefix and finds nothing; ${most}.`, "I8"]
      return [
        `${sequence} looks up its prefix and finds ${names(blocks)}: ${blocks.length * size} tokens; ${most}. Looking changes nothing.`,
        limit === blocks.length ? "I8" : "I7",
      ]
    },

    pass_over: ({ sequence }) => [
      `${sequence} waits a step: a running sequence computes the next block of its prefix right now and will publish it.`,
      "I6",
    ],

    refuse: ({ sequence, num_new_tokens: wanted }, before) => [
      `The pool cannot give the blocks for ${count(wanted, "more token")} of ${sequence}: ${before.free.length} free, ${before.lru.length} cached and idle. Nothing has changed.`,
      "I9",
    ],

    allocate: ({ sequence, block, ref_count: refs }) => [
      `${sequence} takes the free block b${block}. Its ref count is ${refs}.`,
      "I1",
    ],

    reference: ({ sequence, block, ref_count: refs }, before) => [
      `${sequence} puts the cached block b${block} into its table; nothing is copied or computed. Ref count ${before.blocks[block].refCount} becomes ${refs}.`,
      "I2",
    ],

    write: ({ sequence, start, end, blocks }) => [
      `The KV of ${sequence} at ${positions(start, end)} is written, into ${names(blocks)}.`,
      "I4",
    ],

    publish: ({ sequence, block, key, ref_count: refs }) => [
      `All slots of b${block} are written, so ${sequence} publishes it: from now on the key ${key.slice(0, 8)} finds it. The cache counts as a holder: ref count ${refs}.`,
      "I6",
    ],

    swap: ({ sequence, block, ref_count: refs }) => [
      `${sequence} has computed a block that the cache holds already as b${block}. It takes b${block} into its table instead: ref count ${refs}. One key, one block.`,
      "I7",
    ],

    release({ sequence, block, ref_count: refs, holders }) {
      const rest =
        refs === 0
          ? `b${block} is free`
          : holders.join() === "cache"
            ? `only the cache still holds b${block}: it is idle, and may be evicted`
            : `${holders.join(", ")} still hold it`
      return [`${sequence} lets go of b${block}. Ref count ${refs}: ${rest}.`, "I2"]
    },

    evict: ({ block }) => [
      `Room is needed. b${block} is the idle block that was used least recently, so the cache forgets it, and it is free.`,
      "I1",
    ],

    reset: ({ block }) => [`The cache is reset: it forgets b${block}, which is free now.`, "I1"],

    preempt: ({ sequence, num_tokens: numTokens }) => [
      `${sequence}, the newest of those running, is preempted. It keeps its ${count(numTokens, "token")}, has no block, and waits again.`,
      "I10",
    ],

    finish({ sequence, reason, output_token_ids: ids }) {
      const why = {
        stop: "a stop token",
        length: "the length that was asked for",
        error: "an error",
      }[reason]
      return [`${sequence} ends after ${count(ids.length, "output token")}: ${why}.`, "I10"]
    },

    abort: ({ sequence, output_token_ids: ids }) => [
      `${sequence} is aborted after ${count(ids.length, "output token")}.`,
      "I10",
    ],

    step({ step, scheduled, budget_left: left }, before, after) {
      if (!scheduled.length) return [`Step ${step} is decided: there is nothing to compute.`, "I11"]
      const work = scheduled
        .slice(0, MOST_TOLD)
        .map(({ sequence, start, end }) => `${sequence} computes ${positions(start, end)}`)
      if (scheduled.length > MOST_TOLD) work.push(`and ${scheduled.length - MOST_TOLD} more`)
      return [
        `Step ${step} is decided: ${work.join(", ")}. ${after.budget - left} of ${after.budget} tokens of the budget are charged.`,
        "I12",
      ]
    },
  }

  function positions(start, end) {
    return end === start + 1 ? `position ${start}` : `positions ${start} to ${end - 1}`
  }

  function names(blocks) {
    return blocks.map((block) => `b${block}`).join(", ")
  }

  function count(number, noun) {
    return `${number} ${noun}${number === 1 ? "" : "s"}`
  }
})((window.BlockTablePlayer ??= {}))
