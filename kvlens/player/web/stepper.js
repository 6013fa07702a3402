// @ts-check
// Moving through the steps of a run, alone (player.js) or beside another (app/ui/compare/player/pair.js): buttons, keys, the clock of playing.
// A view extends Stepper.

/** @import { Commit, Nodes, Selection } from "./types.js" */

const RATES = [1, 2, 5, 10, 20, 30, 60];
const SHORT = 40; // steps: up to here a run is played slowly at first
const COMMIT_MS = 220;

export class Stepper {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    this.root = root;
    root.addEventListener("redraw", () => this.draw()); // for a picture to keep
    const nodes = [...root.querySelectorAll("[id]")].map((node) => [node.id, node]);
    this.el = /** @type {Nodes} */ (Object.fromEntries(nodes));
    this.playing = false;
    this.frames = 0;
    this.steps = 0;
    this.step = 0;
    this.layer = 0;
    this.head = 0;
    /** @type {string | null} how the strip is coloured; null: not decided */
    this.mode = "surprisal";
    /** @type {Commit} */
    this.setStateValue = () => {};
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.startTime = 0;
    this.startStep = 0;
    this.ratePicked = false; // by the user, for all runs that follow
  }

  // ---- what a view has of its own ----------------------------------------------------------------------------------

  draw() {}

  refresh() {}

  /** @returns {boolean} */
  get loaded() {
    return false;
  }

  /** @returns {Selection} */
  selection() {
    return { step: this.step, layer: this.layer, head: this.head };
  }

  /** @param {KeyboardEvent} _event @returns {Record<string, () => void>} */
  ownKeys(_event) {
    return {};
  }

  // ---- moving --------------------------------------------------------------------------------------------------------

  // `own`: what further buttons do, by name; `modes`: [value, text] of the strip's colours.
  /** @param {Record<string, () => void>} own @param {[string, string][]} modes */
  wireSteps(own, modes) {
    const { el } = this;
    /** @type {Record<string, () => void>} */
    const act = {
      first: () => this.go(0), last: () => this.go(this.steps - 1), back: () => this.go(this.step - 1), forward: () => this.go(this.step + 1),
      play: () => this.toggle(), ...own,
    };
    for (const button of /** @type {NodeListOf<HTMLElement>} */ (this.root.querySelectorAll("[data-act]"))) {
      const name = button.dataset.act ?? "";
      button.onclick = () => act[name]();
    }
    RATES.forEach((rate) => el.rate.add(new Option(String(rate), String(rate))));
    modes.forEach(([value, text]) => el.mode.add(new Option(text, value)));
    el.rate.onchange = () => { this.ratePicked = true; this.restartClock(); };
    el.mode.onchange = () => { this.mode = el.mode.value; this.draw(); };
    el.scrub.oninput = () => { this.pause(); this.go(Number(el.scrub.value)); };
    el.number.onchange = () => this.go(Math.round(Number(el.number.value)) || 0);
    el.player.onkeydown = (e) => this.key(e);
  }

  /** @param {number} steps */
  setSteps(steps) {
    this.steps = steps;
    this.el.scrub.max = this.el.number.max = String(Math.max(0, steps - 1));
    this.el.of.textContent = `/ ${steps - 1}`;
    if (!this.ratePicked) this.el.rate.value = steps <= SHORT ? "1" : "20";
  }

  /** @param {number} step @param {number} [delay] milliseconds until Python hears of it */
  go(step, delay = COMMIT_MS) {
    if (!this.loaded) return;
    this.step = Math.max(0, Math.min(this.steps - 1, step));
    if (this.playing) this.restartClock();
    this.draw();
    if (!this.playing) this.commit(delay);
  }

  commit(delay = COMMIT_MS) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.setStateValue("selection", this.selection()), delay);
  }

  toggle() {
    if (this.playing) {
      this.pause();
      return;
    }
    if (this.step >= this.steps - 1) this.step = 0;
    this.playing = true;
    this.restartClock();
    this.showPlay();
    requestAnimationFrame((now) => this.tick(now));
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this.showPlay();
    this.draw();
    this.commit(0);
  }

  restartClock() {
    this.startTime = performance.now();
    this.startStep = this.step;
  }

  /** @param {number} now */
  tick(now) {
    if (!this.playing) return;
    const due = Math.min(this.steps - 1, this.startStep + Math.floor(((now - this.startTime) / 1000) * Number(this.el.rate.value)));
    if (due > this.step) {
      this.step = due;
      this.frames++;
      this.draw();
      if (due === this.steps - 1) {
        this.pause();
        return;
      }
    }
    requestAnimationFrame((next) => this.tick(next));
  }

  showPlay() {
    this.el.play.textContent = this.playing ? "Pause" : "Play";
    this.el.player.dataset.playing = String(this.playing);
  }

  /** @param {number} layer @param {number} head */
  pickHead(layer, head) {
    if (layer === this.layer && head === this.head) return;
    Object.assign(this, { layer, head });
    this.refresh();
    this.commit();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const from = event.composedPath()[0];
    const typing = from instanceof HTMLSelectElement || (from instanceof HTMLInputElement && from.type === "number");
    if (!this.loaded || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    /** @type {Record<string, (() => void) | null>} */
    const acts = {
      ArrowLeft: () => { this.pause(); this.go(this.step - by); }, ArrowRight: () => { this.pause(); this.go(this.step + by); },
      Home: () => { this.pause(); this.go(0); }, End: () => { this.pause(); this.go(this.steps - 1); },
      " ": from instanceof HTMLButtonElement ? null : () => this.toggle(), ...this.ownKeys(event),
    };
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key]; // Caps Lock does not matter
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }
}
