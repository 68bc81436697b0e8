/* The pool, the tables and the queues after each event of a trace.
 *
 * The replay does not believe the trace: it derives every ref count, holder and queue itself and
 * compares. Where the two differ, the state carries a mismatch that names the invariant, and the
 * replay goes on with what the trace says, so that one fault is reported once.
 */
;(function (player) {
  "use strict"
  const { copyState, newSequence, removeFrom, startState } = player.state
  const { adopt, complain } = player.mismatches

  // A state is made by replaying from the checkpoint before it: not far, and not many in memory.
  const LEAST_DISTANCE = 64
  const MOST_CHECKPOINTS = 100

  player.Replay = class Replay {
    #checkpoints = []

    constructor({ header, events }) {
      this.header = header
      this.events = events
      this.outputs = findOutputs(events)
      this.hasAdds = events.some(({ event }) => event === "add")
      this.distance = Math.max(LEAST_DISTANCE, Math.ceil(events.length / MOST_CHECKPOINTS))
      const state = startState(this.header)
      this.mismatches = []
      for (let i = 0; i < events.length; i++) {
        if (i % this.distance === 0) this.#checkpoints.push(copyState(state))
        this.#apply(state, i)
        if (state.mismatches.length) this.mismatches.push(i)
      }
    }

    /* The state after events[index]; the start of the run for index -1. */
    at(index) {
      if (index < 0) return startState(this.header)
      const nearest = Math.floor(index / this.distance)
      const state = copyState(this.#checkpoints[nearest])
      for (let i = nearest * this.distance; i <= index; i++) this.#apply(state, i)
      return state
    }

    #apply(state, i) {
      const event = this.events[i]
      state.touched = {
        blocks: [event.block ?? event.blocks ?? []].flat(),
        sequence: event.sequence ?? null,
      }
      state.mismatches = []
      const { sequence } = event
      if (event.event === "add") this.#add(state, event, i)
      else if (sequence && !Object.hasOwn(state.sequences, sequence))
        this.#addUnknown(state, sequence)
      player.applyEvent[event.event]?.(state, event, this.header)
      if ("holders" in event) adopt(state, event)
    }

    #add(state, event, i) {
      const { sequence: name, token_ids: prompt } = event
      removeFrom(state.finished, name)
      state.sequences[name] = newSequence(
        state,
        [...prompt, ...(this.outputs.get(i) ?? [])],
        prompt.length,
        event.cache_read,
      )
      state.waiting.push(name)
    }

    /* A trace of the block manager alone need not add anybody; a trace of an engine must. */
    #addUnknown(state, name) {
      if (this.hasAdds) complain(state, "I10", `${name} was never added`)
      state.sequences[name] = newSequence(state, [], null, true)
      state.waiting.push(name)
    }
  }

  /* Index of an `add` -> the tokens that its sequence went on to generate, told when it ended. */
  function findOutputs(events) {
    const outputs = new Map()
    const added = new Map()
    events.forEach((event, i) => {
      if (event.event === "add") added.set(event.sequence, i)
      if (event.output_token_ids) outputs.set(added.get(event.sequence), event.output_token_ids)
    })
    return outputs
  }
})((window.BlockTablePlayer ??= {}))
