/* What the theme leaves unsaid for readers who use a keyboard or a screen reader. */
window.addEventListener("load", () => {
  "use strict"
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  // What scrolls in a frame of its own must be reachable by the keys that scroll it.
  for (const frame of document.querySelectorAll(".figure, .md-typeset__scrollwrap, .formula")) {
    if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0
  }
})
