/* What each kind of event does to the state, and what must hold for it. */
;(function (player) {
  "use strict"
  const { CACHE, emptyBlock, insertByArrival, removeFrom, sorted } = player.state
  const { complain, compare, checkBudget, checkDecodes } = player.mismatches

  /* What each kind of event does. Block events end in adopt(). */
  const apply = {
    match(state, event, { block_size: size }) {
      const sequence = state.sequences[event.sequence]
      knowTokens(state, event, sequence)
      const most = event.num_tokens - 1
      if (event.blocks.length * size > most) {
        complain(
          state,
          "I8",
          `${event.blocks.length} blocks of ${size} match, but at most ${most} of ${event.num_tokens} tokens may`,
        )
      }
      for (const block of event.blocks) {
        if (!state.blocks[block].holders.includes(CACHE))
          complain(state, "I6", `b${block} was found, but the cache does not hold it`)
      }
    },

    allocate(state, event) {
      const block = state.blocks[event.block]
      if (block.holders.length)
        complain(
          state,
          "I1",
          `b${event.block} is handed out, but ${block.holders.join(", ")} still hold it`,
        )
      admit(state, event.sequence)
      removeFrom(state.free, event.block)
      state.blocks[event.block] = { ...emptyBlock(), holders: [...block.holders, event.sequence] }
      state.sequences[event.sequence].table.push(event.block)
    },

    reference(state, event, { block_size: size }) {
      const sequence = state.sequences[event.sequence]
      const block = state.blocks[event.block]
      if (!block.holders.includes(CACHE))
        complain(state, "I6", `b${event.block} is a hit, but the cache does not hold it`)
      admit(state, event.sequence)
      block.holders.push(event.sequence)
      removeFrom(state.lru, event.block)
      sequence.table.push(event.block)
      sequence.computed += size
      sequence.cached += size
    },

    write(state, event, { block_size: size }) {
      const sequence = state.sequences[event.sequence]
      if (event.start !== sequence.computed)
        complain(
          state,
          "I4",
          `${event.sequence} writes from position ${event.start}, but ${sequence.computed} are computed`,
        )
      for (let position = event.start; position < event.end; position++) {
        const id = sequence.table[Math.floor(position / size)]
        if (id === undefined) {
          complain(
            state,
            "I5",
            `${event.sequence} writes position ${position}, but its table has ${sequence.table.length} blocks`,
          )
          break
        }
        if (state.blocks[id].holders.includes(CACHE))
          complain(state, "I3", `position ${position} is written into b${id}, which is published`)
        state.blocks[id].slots[position % size] = {
          position,
          token: sequence.tokens[position] ?? null,
        }
      }
      sequence.computed = event.end
      sequence.scheduled = null
      if (sequence.numTokens !== null && event.end === sequence.numTokens) sequence.numTokens += 1
    },

    publish(state, event, { block_size: size }) {
      const block = state.blocks[event.block]
      const numWritten = block.slots.filter(Boolean).length
      if (numWritten < size)
        complain(
          state,
          "I6",
          `b${event.block} is published, but ${numWritten} of its ${size} slots are written`,
        )
      const twin = state.blocks.findIndex(({ key }) => key === event.key)
      if (twin >= 0) complain(state, "I7", `b${twin} is published under this key already`)
      block.holders.push(CACHE)
    },

    swap(state, event) {
      const { table } = state.sequences[event.sequence]
      const block = state.blocks[event.block]
      const index = table.findIndex((id) => !state.blocks[id].holders.includes(CACHE))
      if (!block.holders.includes(CACHE))
        complain(state, "I7", `b${event.block} is swapped in, but the cache does not hold it`)
      block.holders.push(event.sequence)
      removeFrom(state.lru, event.block)
      if (index < 0) complain(state, "I7", `${event.sequence} holds no block of its own to swap`)
      else table[index] = event.block
    },

    release(state, event) {
      const { table } = state.sequences[event.sequence]
      const block = state.blocks[event.block]
      if (!block.holders.includes(event.sequence))
        complain(state, "I2", `${event.sequence} releases b${event.block}, which it does not hold`)
      removeFrom(block.holders, event.sequence)
      // The other half of a swap releases a block that is no longer in the table.
      if (table.at(-1) === event.block) table.pop()
      else if (table.includes(event.block)) {
        complain(
          state,
          "I5",
          `${event.sequence} releases b${event.block}, which is not the last block of its table`,
        )
        removeFrom(table, event.block)
      }
      letGo(state, event.block)
    },

    evict(state, event) {
      const oldest = state.lru[0]
      if (!state.lru.includes(event.block))
        complain(
          state,
          "I1",
          `b${event.block} is evicted, but ${state.blocks[event.block].holders.join(", ") || "nobody"} holds it`,
        )
      else if (oldest !== event.block)
        complain(state, "I7", `b${event.block} is evicted, but b${oldest} was used less recently`)
      forget(state, event.block)
    },

    reset(state, event) {
      if (!state.lru.includes(event.block))
        complain(state, "I1", `b${event.block} is reset, but it is not idle`)
      forget(state, event.block)
    },

    preempt(state, event) {
      const sequence = state.sequences[event.sequence]
      knowTokens(state, event, sequence)
      if (sequence.table.length)
        complain(
          state,
          "I5",
          `${event.sequence} is preempted, but its table still holds ${sequence.table.map((b) => `b${b}`).join(", ")}`,
        )
      removeFrom(state.running, event.sequence)
      insertByArrival(state, state.waiting, event.sequence)
      Object.assign(sequence, {
        computed: 0,
        cached: 0,
        scheduled: null,
        status: "waiting",
        wasPreempted: true,
      })
    },

    finish(state, event) {
      const sequence = state.sequences[event.sequence]
      const known =
        sequence.promptLength === null
          ? null
          : sequence.promptLength + event.output_token_ids.length
      if (known !== null && sequence.numTokens !== null && known !== sequence.numTokens) {
        complain(
          state,
          "I10",
          `${event.sequence} ends with ${known} tokens, but ${sequence.numTokens} were known`,
        )
      }
      if (sequence.table.length)
        complain(
          state,
          "I2",
          `${event.sequence} has ended, but its table still holds ${sequence.table.map((b) => `b${b}`).join(", ")}`,
        )
      removeFrom(state.waiting, event.sequence)
      removeFrom(state.running, event.sequence)
      state.finished.push(event.sequence)
      Object.assign(sequence, { status: "finished", scheduled: null, reason: event.reason })
    },

    abort(state, event, header) {
      apply.finish(state, event, header)
    },

    step(state, event) {
      if (event.step !== state.step + 1)
        complain(state, "I11", `step ${event.step} follows step ${state.step}`)
      state.step = event.step
      compare(state, "I10", "waiting", event.waiting, state.waiting)
      compare(state, "I10", "running", event.running, state.running)
      compare(state, "I1", "free", sorted(event.free), sorted(state.free))
      compare(state, "I1", "cached and idle, oldest first", event.lru, state.lru)
      for (const sequence of Object.values(state.sequences)) sequence.scheduled = null
      for (const work of event.scheduled) schedule(state, work)
      checkBudget(state, event)
      checkDecodes(state, event)
      state.budgetLeft = event.budget_left
      state.waiting = [...event.waiting]
      state.running = [...event.running]
      state.free = [...event.free]
      state.lru = [...event.lru]
    },
  }

  function schedule(state, work) {
    const sequence = state.sequences[work.sequence]
    if (!sequence)
      return complain(state, "I10", `${work.sequence} is scheduled, but was never added`)
    sequence.scheduled = { start: work.start, end: work.end }
    compare(state, "I5", `block table of ${work.sequence}`, work.block_table, sequence.table)
    if (work.start !== sequence.computed)
      complain(
        state,
        "I4",
        `${work.sequence} computes from position ${work.start}, but ${sequence.computed} are computed`,
      )
    if (sequence.numTokens !== null && work.end > sequence.numTokens)
      complain(
        state,
        "I8",
        `${work.sequence} computes up to ${work.end}, but has ${sequence.numTokens} tokens`,
      )
  }

  function admit(state, name) {
    const sequence = state.sequences[name]
    if (sequence.status === "running") return
    removeFrom(state.waiting, name)
    insertByArrival(state, state.running, name)
    sequence.status = "running"
  }

  function letGo(state, id) {
    const { holders } = state.blocks[id]
    if (holders.length === 0) makeFree(state, id)
    else if (holders.length === 1 && holders[0] === CACHE) state.lru.push(id)
  }

  function forget(state, id) {
    removeFrom(state.blocks[id].holders, CACHE)
    removeFrom(state.lru, id)
    if (!state.blocks[id].holders.length) makeFree(state, id)
  }

  function makeFree(state, id) {
    state.blocks[id] = emptyBlock()
    if (!state.free.includes(id)) state.free.unshift(id)
  }

  function knowTokens(state, event, sequence) {
    if (sequence.numTokens !== null && sequence.numTokens !== event.num_tokens)
      complain(
        state,
        "I10",
        `${event.sequence} has ${event.num_tokens} tokens, but ${sequence.numTokens} were known`,
      )
    sequence.numTokens = event.num_tokens
  }

  player.applyEvent = apply
})((window.BlockTablePlayer ??= {}))
