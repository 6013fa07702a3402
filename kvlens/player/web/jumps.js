// @ts-check
// Places worth going to: the step of loss, the worst regret, corrections, recalls. A jump moves step, head and span together.

/** @import { Jump, RunHeader } from "./types.js" */

const JUMPS = [
  ["loss", "first loss", "no step was lost, or the loss against full KV was not recorded"],
  ["regret", "worst regret", "full attention's masses were not recorded, or nothing was missed"],
  ["correction", "next correction", "no correction was recorded"],
  ["recall", "next recall", "no recall was logged"],
];
const NAMED = ["loss", "lost", "regret", "correction"]; // what N and P go through; recalls are too many, they have Shift

export class Jumps {
  /** @param {Element} box @param {(place: Jump) => void} go */
  constructor(box, go) {
    this.go = go;
    this.step = 0;
    /** @type {Jump | null} */
    this.last = null;
    /** @type {Jump[]} */
    this.places = [];
    /** @type {Record<string, HTMLButtonElement>} */
    this.buttons = {};
    for (const [kind, title] of JUMPS) {
      const button = document.createElement("button");
      button.textContent = title;
      button.dataset.jump = kind;
      button.onclick = () => this.press(kind);
      box.append(button);
      this.buttons[kind] = button;
    }
  }

  /** @param {RunHeader} header @param {ArrayLike<number>} [corrections] step, layer, query head of each; -1: all of them */
  setRun(header, corrections = []) {
    const named = (/** @type {number} */ id) => (id < 0 ? null : id);
    this.places = header.jumps.slice();
    for (let i = 0; i < corrections.length; i += 3) {
      this.places.push({ kind: "correction", step: corrections[i], layer: named(corrections[i + 1]), head: named(corrections[i + 2]), span: null });
    }
    this.last = null;
    for (const [kind, title, absent] of JUMPS) {
      const places = this.placesOf([kind]);
      this.buttons[kind].disabled = places.length === 0;
      const key = NAMED.includes(kind) ? "N, P" : "Shift + N, P";
      const where = places.length === 1 ? `step ${places[0].step}` : `${places.length} ${kind === "correction" ? "places" : "steps"}`;
      this.buttons[kind].title = places.length ? `${title}: ${where} (${key})` : absent;
    }
  }

  /** @param {string[]} kinds */
  placesOf(kinds) {
    return this.places.filter((place) => kinds.includes(place.kind));
  }

  /** A button goes to the next place of its kind, of the same step too, and begins anew after the last one. @param {string} kind */
  press(kind) {
    const places = this.placesOf([kind]);
    const index = this.last && this.last.step === this.step ? places.indexOf(this.last) : -1;
    this.last = (index >= 0 && places[index + 1]) || places.find((place) => place.step > this.step) || places[0];
    this.go(this.last);
  }

  /** N and P: the nearest place after or before the step, if there is one. @param {1 | -1} direction @param {boolean} recalls */
  move(direction, recalls) {
    const places = this.placesOf(recalls ? ["recall"] : NAMED).sort((a, b) => direction * (a.step - b.step));
    const place = places.find((p) => direction * (p.step - this.step) > 0);
    if (place) this.go(place);
  }

  /** @param {number} step */
  moveTo(step) {
    this.step = step;
  }
}
