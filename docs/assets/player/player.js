/* The block-table player: puts the parts together, in each element of its class.
 *
 *   <div class="block-table-player" data-trace="shared-prefix" data-start="reference"></div>
 *
 *   data-trace   name of a recorded trace (docs/generated/traces); without it the player waits for
 *                a file of the reader's own
 *   data-start   where to begin: a number of events, or the kind of an event; else the beginning
 *   data-choose  offers all recorded traces in a list
 */
;(function (player) {
  "use strict"
  const { make } = player

  class BlockTablePlayer {
    constructor(element) {
      this.element = element
      this.title = make("span", { class: "btp-title" })
      this.message = make("div", { class: "btp-message", role: "alert", hidden: true })
      this.body = make("div", {
        class: "btp-body",
        tabindex: 0,
        role: "group",
        "aria-label": "block-table player: arrow keys step, space plays",
      })
      this.chooser = this.#makeChooser()
      const opener = player.makeOpener(
        element,
        (trace) => this.open(trace),
        (error) => this.fail(error),
      )
      element.replaceChildren(
        make("div", { class: "btp-head" }, this.chooser ?? this.title, opener),
        this.message,
        this.body,
      )
      this.body.addEventListener("keydown", (event) => {
        this.controls?.press(event)
        if (event.key === "b" || event.key === "B") this.#chooseNext(event.key === "b" ? 1 : -1)
      })
      new ResizeObserver(() => this.#redraw()).observe(element)
    }

    /* Show a recorded trace by its name. */
    async load(name, start = null) {
      try {
        this.open(await player.loadTrace(name), start)
      } catch (error) {
        this.fail(error)
      }
    }

    /* Show a trace from its text; a broken one is reported and what was shown stays. */
    open({ title, tokens, text }, start = null) {
      let trace
      try {
        trace = player.parseTrace(text)
        this.replay = new player.Replay(trace)
      } catch (error) {
        return this.fail(error, title)
      }
      this.message.hidden = true
      this.trace = trace
      this.tokensAre = tokens
      this.shown = player.blocksToDraw(trace)
      this.chosen = null
      this.index = -1
      this.title.textContent = title
      if (this.chooser) this.#choose(title)
      this.caption = make("p", { class: "btp-caption", "aria-live": "polite" })
      this.mismatch = make("div", { class: "btp-mismatch", role: "alert", hidden: true })
      this.stage = make("div", { class: "btp-stage" })
      this.controls?.stop()
      this.controls = new player.Controls(trace.events, (index) => this.#show(index))
      this.controls.listenToSwipes(this.stage)
      this.body.replaceChildren(
        this.controls.element,
        this.caption,
        this.mismatch,
        this.stage,
        this.#notes(),
      )
      this.controls.move(player.findStart(trace.events, start))
    }

    /* Say why a trace cannot be shown. */
    fail(error, title = null) {
      if (!(error instanceof player.TraceError)) console.error(error)
      this.message.replaceChildren(
        make("strong", {}, "This trace cannot be played. "),
        `${title ? `${title}: ` : ""}${error.message}`,
      )
      this.message.hidden = false
    }

    #show(index) {
      this.index = index
      this.before = this.replay.at(index - 1)
      this.state = this.replay.at(index)
      this.#tell()
      this.#redraw()
    }

    #tell() {
      const event = this.trace.events[this.index]
      this.caption.setAttribute("aria-live", this.controls.isPlaying ? "off" : "polite")
      if (!event) {
        const {
          num_kv_blocks: blocks,
          block_size: size,
          max_num_batched_tokens: budget,
        } = this.trace.header
        this.caption.replaceChildren(
          `The start: ${blocks} blocks of ${size} slots, all free, and a budget of ${budget} tokens a step.`,
        )
      } else {
        const { text, invariant, because } = player.caption(
          event,
          this.before,
          this.state,
          this.trace.header,
        )
        this.caption.replaceChildren(
          make(
            "span",
            { class: "btp-event" },
            `${this.index + 1}/${this.trace.events.length} ${event.event.replace("_", " ")}`,
          ),
          ` ${text} `,
          make("span", { class: "btp-invariant" }, `${invariant}: ${because}.`),
        )
      }
      this.mismatch.hidden = !this.state.mismatches.length
      this.mismatch.replaceChildren(
        ...this.state.mismatches.map(({ invariant, message }) =>
          make(
            "p",
            {},
            make("strong", {}, `${invariant} does not hold. `),
            `${message}. (${player.promiseOf(invariant)})`,
          ),
        ),
      )
    }

    #redraw() {
      if (!this.state) return
      const width = this.stage.clientWidth || this.element.clientWidth
      const choose = (block) => {
        this.chosen = block
        this.#redraw()
      }
      const common = { header: this.trace.header, tokensAre: this.tokensAre }
      this.stage.replaceChildren(
        player.drawPool(this.state, {
          ...common,
          shown: this.shown,
          width,
          chosen: this.chosen,
          onChoose: choose,
        }),
        this.#chosenBlock(),
        player.drawSequences(this.state, common),
        player.drawQueues(this.state),
      )
    }

    #chosenBlock() {
      const text =
        this.chosen === null ? "" : player.describeBlock(this.state, this.chosen, this.tokensAre)
      return make("p", { class: "btp-detail", "aria-live": "polite" }, text)
    }

    /* Choose the block after, or before, the chosen one: what a click does, by key. */
    #chooseNext(direction) {
      if (!this.trace) return
      const { length } = this.shown
      const at =
        this.chosen === null ? (direction > 0 ? -1 : length) : this.shown.indexOf(this.chosen)
      this.chosen = this.shown[(at + direction + length) % length]
      this.#redraw()
    }

    /* Legends, how many blocks are not drawn, and where the replay and the trace differ. */
    #notes() {
      const hidden = this.trace.header.num_kv_blocks - this.shown.length
      const faults = this.replay.mismatches
      const jump = make("button", { type: "button", class: "btp-open" }, "Go to the first one")
      jump.addEventListener("click", () => this.controls.move(faults[0]))
      return make(
        "div",
        { class: "btp-notes" },
        player.poolLegend(),
        player.stripLegend(),
        hidden
          ? make("p", {}, `${hidden} of ${this.trace.header.num_kv_blocks} blocks are not drawn.`)
          : null,
        faults.length
          ? make(
              "p",
              { class: "btp-faults" },
              `In ${faults.length} of ${this.trace.events.length} events the trace breaks an invariant. `,
              jump,
            )
          : null,
      )
    }

    #makeChooser() {
      if (!("choose" in this.element.dataset)) return null
      const options = Object.entries(player.traceIndex).map(([name, title]) =>
        make("option", { value: name }, title),
      )
      const list = make(
        "select",
        { "aria-label": "recorded trace", class: "btp-title btp-traces" },
        ...options,
      )
      list.addEventListener("change", () => this.load(list.value))
      return list
    }

    /* Select the trace that is shown; a file of the reader's own joins the list by its name. */
    #choose(title) {
      let option = [...this.chooser.options].find(({ text }) => text === title)
      if (!option)
        this.chooser.append((option = make("option", { value: "", disabled: true }, title)))
      option.selected = true
    }
  }

  function startAll() {
    for (const element of document.querySelectorAll(".block-table-player:not(.btp-started)")) {
      element.classList.add("btp-started")
      const { trace, start } = element.dataset
      const started = new BlockTablePlayer(element)
      if (trace) started.load(trace, start)
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", startAll)
  else startAll()
})((window.BlockTablePlayer ??= {}))
