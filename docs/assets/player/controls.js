/* Moving through a trace: buttons, a slider, a list to jump by, keys, and a swipe. */
;(function (player) {
  "use strict"
  const { make } = player

  const SPEEDS = { slow: 2400, normal: 1200, fast: 400 }
  const SWIPE_PIXELS = 48
  const MOST_OPTIONS = 400
  const NOTABLE = new Set([
    "add",
    "step",
    "preempt",
    "refuse",
    "evict",
    "swap",
    "pass_over",
    "finish",
    "abort",
    "reset",
  ])

  /* `go(index)` moves to the state after that event; -1 is the start. */
  player.Controls = class Controls {
    #index = -1
    #timer = null

    constructor(events, go) {
      this.events = events
      this.go = go
      this.slider = make("input", {
        type: "range",
        min: 0,
        max: events.length,
        step: 1,
        value: 0,
        "aria-label": "event",
      })
      this.speed = make(
        "select",
        { "aria-label": "speed" },
        ...Object.keys(SPEEDS).map((name) =>
          make("option", { value: name, selected: name === "normal" }, name),
        ),
      )
      this.jump = make(
        "select",
        { "aria-label": "jump to an event" },
        make("option", { value: "" }, "jump to ..."),
        ...jumpOptions(events),
      )
      this.play = button("play", "Play", () => this.togglePlay())
      this.element = make(
        "div",
        { class: "btp-controls" },
        make(
          "div",
          { class: "btp-buttons" },
          button("start", "To the start", () => this.move(-1)),
          button("back", "Back one event", () => this.move(this.#index - 1)),
          this.play,
          button("forward", "Forward one event", () => this.move(this.#index + 1)),
          button("step", "Forward to the next step", () => this.move(this.#nextStep(1))),
        ),
        this.slider,
        make("div", { class: "btp-choices" }, this.speed, this.jump),
      )
      this.slider.addEventListener("input", () => this.move(Number(this.slider.value) - 1))
      this.jump.addEventListener("change", () => {
        if (this.jump.value !== "") this.move(Number(this.jump.value))
      })
    }

    get isPlaying() {
      return this.#timer !== null
    }

    /* Every move but one that play() makes stops playing. */
    move(index, isPlaying = false) {
      if (!isPlaying) this.stop()
      this.#index = Math.max(-1, Math.min(index, this.events.length - 1))
      this.slider.value = this.#index + 1
      this.slider.setAttribute(
        "aria-valuetext",
        `event ${this.#index + 1} of ${this.events.length}`,
      )
      this.jump.value = ""
      this.go(this.#index)
    }

    togglePlay() {
      if (this.isPlaying) return this.stop()
      const start = this.#index >= this.events.length - 1 ? -1 : this.#index
      setButton(this.play, "pause", "Pause")
      const tick = () => {
        this.move(this.#index + 1, true)
        if (this.#index >= this.events.length - 1) this.stop()
        else this.#timer = setTimeout(tick, SPEEDS[this.speed.value])
      }
      this.#index = start
      this.#timer = setTimeout(tick, 0)
    }

    stop() {
      clearTimeout(this.#timer)
      this.#timer = null
      setButton(this.play, "play", "Play")
    }

    /* Act on a key, unless it is meant for a list, a slider or a button that has the focus. */
    press(event) {
      const moves = {
        ArrowRight: () => this.move(this.#index + 1),
        ArrowLeft: () => this.move(this.#index - 1),
        PageDown: () => this.move(this.#nextStep(1)),
        PageUp: () => this.move(this.#nextStep(-1)),
        Home: () => this.move(-1),
        End: () => this.move(this.events.length - 1),
        " ": () => this.togglePlay(),
      }
      const isInField = event.target.matches("select, input, a")
      const isButtonPress = event.key === " " && event.target.matches("button")
      if (
        !(event.key in moves) ||
        isInField ||
        isButtonPress ||
        event.ctrlKey ||
        event.altKey ||
        event.metaKey
      )
        return
      moves[event.key]()
      event.preventDefault()
      event.stopPropagation()
    }

    /* A swipe to the left on `drawing` is a step forward, one to the right a step back. */
    listenToSwipes(drawing) {
      let start = null
      drawing.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "touch") start = { x: event.clientX, y: event.clientY }
      })
      drawing.addEventListener("pointerup", (event) => {
        if (!start) return
        const across = event.clientX - start.x
        const isSideways =
          Math.abs(across) > SWIPE_PIXELS &&
          Math.abs(across) > 2 * Math.abs(event.clientY - start.y)
        start = null
        if (isSideways) this.move(this.#index + (across < 0 ? 1 : -1))
      })
      drawing.addEventListener("pointercancel", () => (start = null))
    }

    #nextStep(direction) {
      for (let i = this.#index + direction; i >= 0 && i < this.events.length; i += direction) {
        if (this.events[i].event === "step") return i
      }
      return direction > 0 ? this.events.length - 1 : -1
    }
  }

  /* Index to begin at for data-start: a number of events, or the kind of an event. */
  player.findStart = function (events, wanted) {
    if (!wanted) return -1
    if (/^\d+$/.test(wanted)) return Number(wanted) - 1
    return events.findIndex(({ event }) => event === wanted)
  }

  function jumpOptions(events) {
    const numbered = events.map((event, i) => [event, i])
    const some =
      numbered.length > MOST_OPTIONS
        ? numbered.filter(([{ event }]) => NOTABLE.has(event))
        : numbered
    return some.slice(0, MOST_OPTIONS).map(([event, i]) => {
      const what =
        event.event === "step"
          ? `step ${event.step}`
          : [
              event.event.replace("_", " "),
              event.sequence,
              "block" in event ? `b${event.block}` : "",
            ]
              .filter(Boolean)
              .join(" ")
      return make("option", { value: i }, `${i + 1}  ${what}`)
    })
  }

  const ICONS = {
    start: "M6 5h2v14H6zM20 5v14L9 12z",
    back: "M17 5v14L6 12z",
    play: "M7 4v16l13-8z",
    pause: "M6 5h4v14H6zM14 5h4v14h-4z",
    forward: "M7 5v14l11-7z",
    step: "M4 5v14l10-7zM15 5h2v14h-2zM19 5h2v14h-2z",
  }

  function button(icon, label, press) {
    const element = make("button", { type: "button" })
    setButton(element, icon, label)
    element.addEventListener("click", press)
    return element
  }

  function setButton(element, icon, label) {
    element.setAttribute("aria-label", label)
    element.title = label
    element.replaceChildren(
      player.draw(
        "svg",
        { viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" },
        player.draw("path", { d: ICONS[icon] }),
      ),
    )
  }
})((window.BlockTablePlayer ??= {}))
