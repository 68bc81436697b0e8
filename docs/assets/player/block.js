/* One block: its slots, its ref count, its holders and its key. */
;(function (player) {
  "use strict"
  const { draw } = player

  const MOST_IN_FULL = 48
  const MOST_HOLDERS = 4

  /* What is known of a block, in words. */
  player.describeBlock = function (state, id, tokensAre) {
    const { holders, refCount, key, slots } = state.blocks[id]
    const written = slots.filter(Boolean)
    const held = holders.length ? `ref count ${refCount}, held by ${holders.join(", ")}` : "free"
    const range = written.length
      ? `; positions ${written[0].position} to ${written.at(-1).position}: ${written.map(({ token }) => player.showToken(token, tokensAre)).join(" ")}`
      : ""
    return `b${id}: ${held}${range}${key === null ? "" : `; key ${key}`}`
  }

  /* How a block is drawn: in full, or small with ref count and owners where there are many. */
  player.blockSize = function ({ block_size: blockSize }, tokensAre, numShown) {
    if (numShown > MOST_IN_FULL) return { width: 44, height: 34, isSmall: true }
    const hasText = tokensAre === "letters" && blockSize <= 8
    const numRows = hasText ? 1 : Math.min(2, Math.ceil(blockSize / 8))
    const perRow = Math.ceil(blockSize / numRows)
    const slot = hasText ? 17 : 9
    const width = hasText ? Math.max(86, perRow * slot + 16) : 86
    return { width, height: 26 + numRows * slot + 36, slot, perRow, numRows, hasText, blockSize }
  }

  function kindOf({ holders }) {
    if (!holders.length) return "free"
    return holders.join() === "cache" ? "idle" : "used"
  }

  player.drawBlock = function (state, id, size, tokensAre) {
    const block = state.blocks[id]
    const isTouched = state.touched.blocks.includes(id)
    const classes = [
      "btp-block",
      `btp-${kindOf(block)}`,
      isTouched && "btp-touched",
      block.isSuspect && "btp-suspect",
    ]
    const cell = draw("g", {
      class: classes.filter(Boolean).join(" "),
      "data-block": id,
      "data-ref-count": block.refCount,
      "data-holders": block.holders.join(" "),
    })
    cell.append(
      draw("title", {}, player.describeBlock(state, id, tokensAre)),
      draw("rect", {
        class: "btp-frame",
        x: 1,
        y: 1,
        width: size.width - 2,
        height: size.height - 2,
        rx: 7,
      }),
      ...(size.isSmall ? drawSmall : drawInFull)(state, id, size, tokensAre),
    )
    return cell
  }

  function drawInFull(state, id, size, tokensAre) {
    const block = state.blocks[id]
    return [
      draw("text", { class: "btp-block-id", x: 9, y: 18 }, `b${id}`),
      drawRefCount(block.refCount, size.width - 15),
      ...drawSlots(block, size, tokensAre),
      ...drawHolders(state, block, {
        y: size.height - 33,
        height: 13,
        x: 8,
        width: size.width - 16,
      }),
      draw("text", { class: "btp-key", x: 9, y: size.height - 8 }, keyText(block)),
    ]
  }

  function drawSmall(state, id, size) {
    const block = state.blocks[id]
    return [
      draw("text", { class: "btp-small", x: 5, y: 14 }, String(id)),
      draw(
        "g",
        { class: "btp-count" },
        draw("text", { x: size.width - 5, y: 14, "text-anchor": "end" }, String(block.refCount)),
      ),
      ...drawHolders(state, block, { y: 20, height: 9, x: 4, width: size.width - 8 }),
    ]
  }

  function keyText(block) {
    if (block.key !== null) return `key ${block.key.slice(0, 6)}`
    return block.holders.length ? "no key" : "free"
  }

  function drawRefCount(count, x) {
    return draw(
      "g",
      { class: "btp-count" },
      draw("circle", { cx: x, cy: 14, r: 9 }),
      draw("text", { x, y: 18, "text-anchor": "middle" }, String(count)),
    )
  }

  /* A square a slot where there is room for its token, else one bar a row, filled as far as written. */
  function drawSlots(block, size, tokensAre) {
    const rows = [...Array(size.numRows).keys()].map((row) => {
      const slots = Math.min(size.perRow, size.blockSize - row * size.perRow)
      return { first: row * size.perRow, slots, y: 27 + row * size.slot }
    })
    const draws = size.hasText ? drawSlotRow : drawBar
    return rows.flatMap((row) => draws(block, row, size, tokensAre))
  }

  function drawSlotRow(block, { first, slots, y }, size, tokensAre) {
    const side = size.slot - 2
    return [...Array(slots).keys()].flatMap((i) => {
      const written = block.slots[first + i]
      const x = 8 + i * size.slot
      const square = { x, y, width: side, height: side, rx: 2 }
      if (!written) return [draw("rect", { class: "btp-slot", ...square })]
      const token = player.showToken(written.token, tokensAre)
      const at = { x: x + side / 2, y: y + 12, "text-anchor": "middle" }
      return [
        draw("rect", { class: "btp-slot btp-written", ...square }),
        draw("text", { class: "btp-token", ...at }, token),
      ]
    })
  }

  function drawBar(block, { first, slots, y }, size) {
    const numWritten = block.slots.slice(first, first + slots).filter(Boolean).length
    const slot = (size.width - 16) / size.perRow
    const bar = { x: 8, y, height: size.slot - 2, rx: 2 }
    return [
      draw("rect", { class: "btp-slot", ...bar, width: slots * slot }),
      draw("rect", { class: "btp-written", ...bar, width: numWritten * slot }),
    ]
  }

  /* A coloured bar for each table that holds the block; the first ones also by name. */
  function drawHolders(state, block, { x, y, width, height }) {
    const owners = block.holders.filter((holder) => holder !== "cache")
    const each = width / Math.min(MOST_HOLDERS, Math.max(1, owners.length))
    return owners.slice(0, MOST_HOLDERS).map((name, i) => {
      const hidden = owners.length - MOST_HOLDERS
      const text = i === MOST_HOLDERS - 1 && hidden > 0 ? `+${hidden + 1}` : shorten(name, each)
      const at = { x: x + i * each + each / 2 - 1, y: y + 10, "text-anchor": "middle" }
      return draw(
        "g",
        { class: `btp-holder ${player.colourOf(state.sequences[name])}` },
        draw("rect", { x: x + i * each, y, width: each - 2, height, rx: 3 }),
        height > 10 ? draw("text", at, text) : null,
      )
    })
  }

  function shorten(name, width) {
    const room = Math.max(1, Math.floor(width / 6.2))
    return name.length <= room ? name : `${name.slice(0, room)}`
  }
})((window.BlockTablePlayer ??= {}))
