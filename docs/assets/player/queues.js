/* The queues, the token budget, and the order of the free list and of eviction. */
;(function (player) {
  "use strict"
  const { make } = player

  const MOST_ITEMS = 12

  player.drawQueues = function (state) {
    const used = state.budget - state.budgetLeft
    const share = Math.round((100 * used) / state.budget)
    return make(
      "dl",
      { class: "btp-queues" },
      entry("waiting", sequenceChips(state, state.waiting)),
      entry("running", sequenceChips(state, state.running)),
      entry(`token budget of step ${state.step || "1"}`, [
        make(
          "span",
          {
            class: "btp-budget",
            role: "img",
            "aria-label": `${used} of ${state.budget} tokens charged`,
          },
          make("span", { style: `width: ${share}%` }),
        ),
        make("span", { class: "btp-budget-text" }, `${used} of ${state.budget}`),
      ]),
      entry("free, next first", blockChips(state.free)),
      entry("idle, evicted first", blockChips(state.lru)),
    )
  }

  function entry(term, items) {
    return make(
      "div",
      {},
      make("dt", {}, term),
      make(
        "dd",
        { "data-queue": term.split(/[ ,]/)[0] },
        ...(items.length ? items : [make("span", { class: "btp-empty" }, "none")]),
      ),
    )
  }

  function sequenceChips(state, names) {
    return limit(names, (name) =>
      make("span", { class: `btp-chip ${player.colourOf(state.sequences[name])}` }, name),
    )
  }

  function blockChips(blocks) {
    return limit(blocks, (block) => make("span", { class: "btp-chip" }, `b${block}`))
  }

  function limit(items, show) {
    const chips = items.slice(0, MOST_ITEMS).map(show)
    if (items.length > MOST_ITEMS)
      chips.push(make("span", { class: "btp-empty" }, `and ${items.length - MOST_ITEMS} more`))
    return chips
  }
})((window.BlockTablePlayer ??= {}))
