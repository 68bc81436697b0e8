/* Where the trace and the replay differ: each mismatch names the invariant and both sides. */
;(function (player) {
  "use strict"
  const { CACHE, sorted } = player.state

  function complain(state, invariant, message) {
    state.mismatches.push({ invariant, message })
  }

  function compare(state, invariant, what, told, derived) {
    if (told.join() === derived.join()) return
    complain(
      state,
      invariant,
      `${what}: the trace says [${told.join(", ")}], the replay [${derived.join(", ")}]`,
    )
  }

  function checkBudget(state, event) {
    const used = event.scheduled.reduce((sum, { start, end }) => sum + end - start, 0)
    if (used + event.budget_left !== state.budget)
      complain(
        state,
        "I8",
        `${used} tokens are charged and ${event.budget_left} left of a budget of ${state.budget}`,
      )
  }

  /* I12: who decodes gains a token in every step, or is preempted. A chapter's check also writes
     the state after operations that schedule nothing: that is no step. */
  function checkDecodes(state, event) {
    if (event.scheduled.length === 0 && event.budget_left === state.budget) return
    const scheduled = new Set(event.scheduled.map(({ sequence }) => sequence))
    for (const name of event.running) {
      const { numTokens, promptLength, computed } = state.sequences[name] ?? {}
      const isDecoding = numTokens > promptLength && computed === numTokens - 1
      if (isDecoding && !scheduled.has(name))
        complain(state, "I12", `${name} decodes, but is given no token in this step`)
    }
  }

  /* Compare what a block event says with what was derived, and go on with what it says. */
  function adopt(state, event) {
    const block = state.blocks[event.block]
    const label = `b${event.block}`
    if (event.ref_count !== block.holders.length)
      complain(
        state,
        "I2",
        `the trace counts ${event.ref_count} for ${label}, the replay ${block.holders.length}`,
      )
    if (sorted(event.holders).join() !== sorted(block.holders).join()) {
      complain(
        state,
        "I2",
        `by the trace ${event.holders.join(", ") || "nobody"} holds ${label}, by the replay ${block.holders.join(", ") || "nobody"}`,
      )
    }
    const isKeyOld = event.event === "evict" || event.event === "reset" || event.event === "publish"
    const key = block.holders.includes(CACHE) && !isKeyOld ? block.key : event.key
    if (event.key !== key)
      complain(state, "I7", `the trace names the key ${event.key} for ${label}, the replay ${key}`)
    block.holders = [...event.holders]
    block.refCount = event.ref_count
    block.key = block.holders.includes(CACHE) ? event.key : null
    block.isSuspect = state.mismatches.length > 0
  }

  player.mismatches = { complain, compare, checkBudget, checkDecodes, adopt }
})((window.BlockTablePlayer ??= {}))
