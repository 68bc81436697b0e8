/* Small helpers that make elements. */
;(function (player) {
  "use strict"

  const SVG = "http://www.w3.org/2000/svg"
  const NUM_COLOURS = 8

  /* An HTML element: make("p", {class: "x"}, "text", child). Attributes that are null are left out. */
  player.make = (tag, attributes = {}, ...children) =>
    fill(document.createElement(tag), attributes, children)

  /* An SVG element, in the same way. */
  player.draw = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS(SVG, tag), attributes, children)

  /* The class that colours whatever belongs to a sequence. Names are always shown beside it. */
  player.colourOf = (sequence) => `btp-owner-${(sequence?.arrival ?? 0) % NUM_COLOURS}`

  /* A token as the reader knows it: a letter, or its id; "?" if the trace never tells. */
  player.showToken = function (token, tokensAre) {
    if (token === null || token === undefined) return "?"
    return tokensAre === "letters" ? String.fromCharCode(65 + (token % 26)) : String(token)
  }

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false)
        element.setAttribute(name, value === true ? "" : value)
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined))
    return element
  }
})((window.BlockTablePlayer ??= {}))
