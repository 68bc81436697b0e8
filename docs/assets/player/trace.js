/* A trace's text becomes its header and its events, or a TraceError that names the line. */
;(function (player) {
  "use strict"

  player.TraceError = class TraceError extends Error {}

  /* Return {header, events}. `events[i]` stands in line i + 2 of the text. */
  player.parseTrace = function (text, schema = player.schema) {
    const lines = text.replace(/^\uFEFF/, "").split(/\r?\n/)
    while (lines.length && lines.at(-1).trim() === "") lines.pop()
    if (!lines.length) throw new player.TraceError("the trace is empty: it has no line at all")
    const header = parseLine(lines[0], 1, lines.length)
    check(header, schema.$defs.header, schema, "line 1, the header")
    const events = lines.slice(1).map((line, i) => {
      const number = i + 2
      const event = parseLine(line, number, lines.length)
      checkEvent(event, number, schema)
      checkBlocks(event, number, header)
      return event
    })
    if (!events.length) throw new player.TraceError("the trace has a header but no event")
    return { header, events }
  }

  function parseLine(line, number, numLines) {
    try {
      return JSON.parse(line)
    } catch {
      const isCut = number === numLines && number > 1
      const hint = isCut
        ? "; it is the last line: the run may have been cut off while writing it"
        : ""
      throw new player.TraceError(`line ${number} is not JSON: ${shorten(line)}${hint}`)
    }
  }

  function checkEvent(event, number, schema) {
    const kind = event?.event
    const known = schema.oneOf.map((option) => option.$ref.split("/").at(-1)).slice(1)
    if (typeof kind !== "string") {
      throw new player.TraceError(
        `line ${number} names no event: ${shorten(JSON.stringify(event))}`,
      )
    }
    if (!known.includes(kind)) {
      throw new player.TraceError(
        `line ${number}: there is no event "${kind}"; known are ${known.join(", ")}`,
      )
    }
    check(event, schema.$defs[kind], schema, `line ${number}, event ${kind}`)
  }

  /* The schema does not know how large this pool is. */
  function checkBlocks(event, number, header) {
    const scheduled = (event.scheduled ?? []).flatMap((work) => work.block_table)
    const named = [
      event.block ?? [],
      event.blocks ?? [],
      event.free ?? [],
      event.lru ?? [],
      scheduled,
    ]
    const wild = named.flat().find((block) => block >= header.num_kv_blocks)
    if (wild !== undefined) {
      const last = header.num_kv_blocks - 1
      throw new player.TraceError(
        `line ${number}, event ${event.event}: block ${wild}, but the last block of the pool is ${last}`,
      )
    }
    const ranges = [...(event.scheduled ?? []), ...("end" in event ? [event] : [])]
    const empty = ranges.find(({ start, end }) => start >= end)
    if (empty) {
      throw new player.TraceError(
        `line ${number}, event ${event.event}: [${empty.start}, ${empty.end}) holds no position`,
      )
    }
  }

  function check(value, definition, schema, where) {
    const isObject = typeof value === "object" && value !== null && !Array.isArray(value)
    const wrong = isObject ? player.misfit(value, definition, schema) : "it is not an object"
    if (wrong) throw new player.TraceError(`${where}: ${wrong}`)
  }

  function shorten(text) {
    return text.length > 60 ? `${text.slice(0, 60)} ...` : text
  }
})((window.BlockTablePlayer ??= {}))
