/* Search, when the site is opened from a file.
 *
 * A browser refuses to start a Worker from file://, so here a hidden frame plays the worker: it
 * has its own global object, loads the worker's script, and passes messages both ways. Over http
 * nothing is replaced.
 */
;(function () {
  "use strict"
  if (location.protocol !== "file:") return

  window.Worker = class FrameWorker extends EventTarget {
    onmessage = null
    onerror = null

    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search worker"
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      // What a worker's script relies on: importScripts, and postMessage to whoever made it.
      inside.importScripts = (...urls) => loadInOrder(inside.document, urls)
      inside.postMessage = (data) => this.receive(data)
      this.ready = loadInOrder(inside.document, [url])
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }

    receive(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
  }

  /* Load scripts one after another; the promise is kept when the last one has run. */
  function loadInOrder(frameDocument, urls) {
    return urls.reduce(
      (before, url) => before.then(() => load(frameDocument, url)),
      Promise.resolve(),
    )
  }

  function load(frameDocument, url) {
    return new Promise((loaded, failed) => {
      const script = frameDocument.createElement("script")
      script.src = url
      script.onload = loaded
      script.onerror = () => failed(new Error(`cannot load ${url}`))
      frameDocument.body.append(script)
    })
  }
})()
