/* Where traces come from: scripts of this site, or a file that the reader chooses or drops. */
;(function (player) {
  "use strict"
  const { make } = player

  const MOST_BYTES = 50_000_000
  const here = document.currentScript.src
  const registered = {}
  const loading = {}

  /* Called by each script in generated/traces/: {title, tokens, text}. */
  player.registerTrace = function (name, trace) {
    registered[name] = trace
  }

  /* A promise of a registered trace. A script is loaded and not fetched, so it works from a file. */
  player.loadTrace = function (name) {
    if (registered[name]) return Promise.resolve(registered[name])
    loading[name] ??= new Promise((loaded, failed) => {
      const missing = () =>
        failed(new player.TraceError(`there is no trace named "${name}" in this site`))
      const script = make("script", {
        src: new URL(`../../generated/traces/${name}.js`, here).href,
      })
      script.addEventListener("load", () =>
        registered[name] ? loaded(registered[name]) : missing(),
      )
      script.addEventListener("error", missing)
      document.head.append(script)
    })
    return loading[name]
  }

  /* A button that opens a file, and `element` takes dropped ones. open({title, tokens, text}). */
  player.makeOpener = function (element, open, fail) {
    const input = make("input", {
      type: "file",
      accept: ".jsonl,.json,.txt",
      class: "btp-file",
      tabindex: "-1",
      "aria-label": "trace file",
    })
    const button = make("button", { type: "button", class: "btp-open" }, "Open a trace of yours")
    button.addEventListener("click", () => input.click())
    input.addEventListener("change", () => {
      if (input.files.length) read(input.files[0], open, fail)
      input.value = ""
    })
    element.addEventListener("dragover", (event) => {
      event.preventDefault()
      element.classList.add("btp-dropping")
    })
    element.addEventListener("dragleave", () => element.classList.remove("btp-dropping"))
    element.addEventListener("drop", (event) => {
      event.preventDefault()
      element.classList.remove("btp-dropping")
      const file = event.dataTransfer.files[0]
      if (file) read(file, open, fail)
    })
    return make("span", { class: "btp-opener" }, button, input)
  }

  async function read(file, open, fail) {
    if (file.size > MOST_BYTES) {
      return fail(
        new player.TraceError(
          `${file.name} has ${file.size} bytes; the player opens at most ${MOST_BYTES}`,
        ),
      )
    }
    open({ title: file.name, tokens: "ids", text: await file.text() })
  }
})((window.BlockTablePlayer ??= {}))
