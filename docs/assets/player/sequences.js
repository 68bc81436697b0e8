/* Each sequence as a strip of tokens, cut into blocks, with the physical block under each. */
;(function (player) {
  "use strict"
  const { make, draw } = player

  const MOST_GROUPS = 40 // of one sequence; the middle of a longer one is folded
  const NUM_HEAD_GROUPS = 12
  const MOST_SEQUENCES = 10
  const MOST_BAR = 10 // pixels a position, up to which no token fits into it

  /* Return an element with one row a sequence: running, then waiting, then the last that ended. */
  player.drawSequences = function (state, { header, tokensAre }) {
    const all = [...state.running, ...state.waiting, ...state.finished.slice(-3)]
    // The first ones, and whoever the event is about.
    const names = all.filter((name, i) => i < MOST_SEQUENCES || name === state.touched.sequence)
    const rows = names.map((name) => drawRow(state, name, header, tokensAre))
    const hidden = all.length - names.length
    if (hidden) rows.push(make("p", { class: "btp-empty" }, `${hidden} more are not drawn.`))
    if (!rows.length) rows.push(make("p", { class: "btp-empty" }, "No request yet."))
    return make("div", { class: "btp-sequences" }, ...rows)
  }

  function drawRow(state, name, { block_size: size }, tokensAre) {
    const sequence = state.sequences[name]
    const isTouched = state.touched.sequence === name
    const groups = groupsOf(sequence, size)
    return make(
      "div",
      {
        class: `btp-sequence ${player.colourOf(sequence)}${isTouched ? " btp-touched" : ""}`,
        "data-sequence": name,
      },
      make(
        "div",
        { class: "btp-sequence-head" },
        make("span", { class: "btp-name" }, name),
        make("span", { class: "btp-status" }, statusOf(sequence)),
      ),
      make(
        "div",
        { class: "btp-strip" },
        ...groups.map((index) =>
          index === null ? gap(sequence, size) : drawGroup(sequence, index, size, tokensAre),
        ),
      ),
    )
  }

  function statusOf(sequence) {
    const { numTokens, computed, cached } = sequence
    if (sequence.status === "finished")
      return sequence.reason === "abort" ? "aborted" : `finished: ${sequence.reason}`
    const known = numTokens === null ? "" : `, ${numTokens} tokens known`
    const found = cached ? `, ${cached} of them found in the cache` : ""
    const again =
      sequence.status === "waiting" && sequence.wasPreempted ? " after a preemption" : ""
    return `${sequence.status}${again}: ${computed} computed${found}${known}`
  }

  /* Logical block numbers, with null where the middle is folded. */
  function groupsOf({ numTokens, tokens, table, status }, size) {
    const known = status === "finished" ? tokens.length : (numTokens ?? 0)
    const number = Math.max(Math.ceil(known / size), table.length)
    const all = [...Array(number).keys()]
    if (number <= MOST_GROUPS) return all
    return [
      ...all.slice(0, NUM_HEAD_GROUPS),
      null,
      ...all.slice(number - (MOST_GROUPS - NUM_HEAD_GROUPS)),
    ]
  }

  function gap(sequence, size) {
    const folded =
      Math.max(Math.ceil((sequence.numTokens ?? 0) / size), sequence.table.length) - MOST_GROUPS
    return make("span", { class: "btp-gap" }, `${folded} blocks`)
  }

  /* Each position as a square with its token. */
  function drawPositions(sequence, index, size, cell, tokensAre) {
    return [...Array(size).keys()].flatMap((i) => {
      const position = index * size + i
      const kind = kindOf(sequence, position)
      const square = drawRun(kind, 1 + i * cell, cell - 1, position)
      if (kind === "beyond") return [square]
      const text = player.showToken(sequence.tokens[position], tokensAre)
      const at = { x: 1 + i * cell + (cell - 1) / 2, y: 14, "text-anchor": "middle" }
      const shown = text.length > 2 ? "·" : text
      return [square, draw("text", { class: `btp-token btp-on-${kind}`, ...at }, shown)]
    })
  }

  /* Neighbours of one kind as one bar: a block of 16 has one or two of them. */
  function drawRuns(sequence, index, size, cell) {
    const runs = []
    for (let i = 0; i < size; i++) {
      const kind = kindOf(sequence, index * size + i)
      if (runs.at(-1)?.kind === kind) runs.at(-1).length++
      else runs.push({ kind, first: i, length: 1 })
    }
    return runs.map(({ kind, first, length }) =>
      drawRun(kind, 1 + first * cell, length * cell - 1, index * size + first),
    )
  }

  function drawRun(kind, x, width, position) {
    const place = { x, y: 1, width, height: 17, rx: 2, "data-position": position }
    return draw("rect", { class: `btp-position btp-${kind}`, ...place })
  }

  function drawGroup(sequence, index, size, tokensAre) {
    const cell = tokensAre === "letters" || size <= 4 ? 17 : 4
    const width = size * cell + 2
    const block = sequence.table[index]
    const group = draw("svg", {
      class: "btp-group",
      width,
      height: 38,
      viewBox: `0 0 ${width} 38`,
      role: "img",
      "aria-label": labelOf(sequence, index, size, tokensAre),
    })
    group.append(
      ...(cell > MOST_BAR ? drawPositions : drawRuns)(sequence, index, size, cell, tokensAre),
    )
    const text = block === undefined ? "no block" : `b${block}`
    group.append(
      draw("path", {
        class: block === undefined ? "btp-brace btp-none" : "btp-brace",
        d: `M1 21 v4 h${width - 3} v-4`,
      }),
      draw(
        "text",
        {
          class: block === undefined ? "btp-table btp-none" : "btp-table",
          x: width / 2,
          y: 36,
          "text-anchor": "middle",
        },
        text,
      ),
    )
    return group
  }

  /* found: from the cache. computed. now: being computed in this step. known: waits. beyond: no token yet. */
  function kindOf(sequence, position) {
    const { numTokens, tokens, computed, cached, scheduled, status } = sequence
    const known = status === "finished" ? tokens.length : (numTokens ?? computed)
    if (status === "finished") return position < known ? "past" : "beyond"
    if (position < cached) return "found"
    if (position < computed) return "computed"
    if (scheduled && position >= scheduled.start && position < scheduled.end) return "now"
    return position < known ? "known" : "beyond"
  }

  function labelOf(sequence, index, size, tokensAre) {
    const block = sequence.table[index]
    const text = sequence.tokens
      .slice(index * size, Math.min((index + 1) * size, sequence.numTokens ?? 0))
      .map((token) => player.showToken(token, tokensAre))
    return `logical block ${index}: ${text.join(" ")}; ${block === undefined ? "no physical block" : `physical block ${block}`}`
  }

  /* What the colours of the positions mean. */
  player.stripLegend = () =>
    make(
      "p",
      { class: "btp-legend" },
      make("span", { class: "btp-mark btp-mark-found" }),
      "found in the cache ",
      make("span", { class: "btp-mark btp-mark-computed" }),
      "computed ",
      make("span", { class: "btp-mark btp-mark-now" }),
      "computed in this step ",
      make("span", { class: "btp-mark btp-mark-known" }),
      "still to compute",
    )
})((window.BlockTablePlayer ??= {}))
