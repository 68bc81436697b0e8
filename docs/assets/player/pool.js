/* The pool as a grid: one cell a block, as large as the number of blocks allows. */
;(function (player) {
  "use strict"
  const { make, draw } = player

  const MOST_BLOCKS = 256
  const GAP = 8
  const MOST_SCALE = 1.3

  /* Which blocks to draw: all of a small pool, and of a large one those that the trace touches. */
  player.blocksToDraw = function ({ header, events }) {
    const all = [...Array(header.num_kv_blocks).keys()]
    if (all.length <= MOST_BLOCKS) return all
    const touched = new Set(
      events.flatMap((event) => [event.block ?? [], event.blocks ?? []].flat()),
    )
    return all.filter((block) => touched.has(block)).slice(0, MOST_BLOCKS)
  }

  /* Return an element of at most `width` pixels. `onChoose(block)` is called for a chosen cell. */
  player.drawPool = function (state, { header, shown, width, tokensAre, chosen, onChoose }) {
    const size = player.blockSize(header, tokensAre, shown.length)
    const mostPerRow = Math.max(1, Math.floor((width + GAP) / (size.width + GAP)))
    const numRows = Math.max(1, Math.ceil(shown.length / mostPerRow))
    const perRow = Math.max(1, Math.ceil(shown.length / numRows)) // even rows
    const fullWidth = perRow * (size.width + GAP) - GAP
    const fullHeight = numRows * (size.height + GAP) - GAP
    const scale = Math.min(MOST_SCALE, width / fullWidth)
    const label = `Pool of ${header.num_kv_blocks} blocks: ${state.free.length} free, ${state.lru.length} cached and idle`
    const svg = draw("svg", {
      class: "btp-pool",
      width: fullWidth * scale,
      height: fullHeight * scale,
      viewBox: `0 0 ${fullWidth} ${fullHeight}`,
      role: "group",
      "aria-label": label,
    })
    shown.forEach((id, i) => {
      const x = (i % perRow) * (size.width + GAP)
      const y = Math.floor(i / perRow) * (size.height + GAP)
      const cell = player.drawBlock(state, id, size, tokensAre)
      cell.setAttribute("transform", `translate(${x} ${y})`)
      cell.classList.toggle("btp-chosen", id === chosen)
      cell.addEventListener("click", () => onChoose(id === chosen ? null : id))
      svg.append(cell)
    })
    return svg
  }

  /* What the marks mean. */
  player.poolLegend = () =>
    make(
      "p",
      { class: "btp-legend" },
      make("span", { class: "btp-mark btp-mark-free" }),
      "free ",
      make("span", { class: "btp-mark btp-mark-idle" }),
      "only the cache holds it ",
      make("span", { class: "btp-mark btp-mark-used" }),
      "in a block table ",
      make("span", { class: "btp-mark btp-mark-count" }, "n"),
      "ref count",
    )
})((window.BlockTablePlayer ??= {}))
