// @ts-check
// Marks that lead through a loss. Each points at a part of the page, says one thing, and can be left: Escape, the x, or
// the last one's end. Once left they never come by themselves again, as far as this browser remembers.

const LEFT = "kvlens-marks-left";
const FOLLOW_MS = 150, PATIENCE_MS = 20000, GAP = 10;
/**
 * @typedef {{ title: string, text: string, within: string, begins: string, inside: string }} Mark inside: a selector in the player
 * @typedef {{ run: string, marks: Mark[], unasked: boolean }} TourData
 */

/** @type {WeakMap<ShadowRoot, Tour>} */
const TOURS = new WeakMap();

// A browser may refuse to remember, and throws then.
const remembered = () => {
  try { return window.localStorage.getItem(LEFT) !== null; } catch { return false; }
};
const remember = () => {
  try { window.localStorage.setItem(LEFT, "1"); } catch { /* it asks again next time */ }
};

// The player hears what of it is shown, and draws it so that it is seen.
const tell = (/** @type {string} */ part) => window.dispatchEvent(new CustomEvent("kvlens:tour", { detail: part }));

/** A node of a component inside `part`. @param {Element} part @param {string} selector @returns {HTMLElement | null} */
function deep(part, selector) {
  const roots = [part, ...part.querySelectorAll("*")].flatMap((node) => (node.shadowRoot ? [node.shadowRoot] : []));
  return /** @type {HTMLElement | null} */ (roots.map((root) => root.querySelector(selector)).find((node) => node) ?? null);
}

class Tour {
  /** @param {ShadowRoot} root */
  constructor(root) {
    this.root = root;
    const node = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (root.querySelector(selector));
    this.place = node("#marks");
    this.ring = node("#ring");
    this.box = node("#box");
    /** @type {number | null} the mark that is shown */
    this.at = null;
    /** @type {string | null} */
    this.run = null;
    /** @type {Mark[]} */
    this.marks = [];
    this.waiting = this.following = 0; // timers
    this.next = /** @type {HTMLButtonElement} */ (node("#on"));
    this.back = /** @type {HTMLButtonElement} */ (node("#back"));
    this.keys = (/** @type {KeyboardEvent} */ event) => this.key(event);
    node("#around").onclick = () => this.open(0);
    node("#leave").onclick = () => this.leave();
    this.back.onclick = () => this.open((this.at ?? 0) - 1);
    this.next.onclick = () => ((this.at ?? 0) + 1 < this.marks.length ? this.open((this.at ?? 0) + 1) : this.leave());
  }

  /** @param {TourData} data */
  receive({ run, marks, unasked }) {
    const other = run !== this.run;
    Object.assign(this, { run, marks });
    if (other) {
      this.close();
      if (unasked && !remembered()) this.begin();
    } else if (this.at !== null) this.say();
  }

  // Unasked, the marks wait until the page stands still: all they point at is there.
  begin() {
    const began = Date.now();
    clearInterval(this.waiting);
    this.waiting = window.setInterval(() => {
      const late = Date.now() - began > PATIENCE_MS;
      const still = /** @type {HTMLElement | null} */ (document.querySelector('[data-testid="stApp"]'))?.dataset.testScriptState === "notRunning";
      if (!late && !(still && this.target(0))) return;
      clearInterval(this.waiting);
      if (!late && this.place.isConnected) this.open(0);
    }, FOLLOW_MS);
  }

  /** @param {number} at */
  open(at) {
    this.at = Math.max(0, at);
    if (!this.place.matches(":popover-open")) this.place.showPopover();
    this.say();
    this.target()?.scrollIntoView({ block: "center" });
    document.addEventListener("keydown", this.keys, true);
    clearInterval(this.following);
    this.following = window.setInterval(() => this.follow(), FOLLOW_MS);
    this.follow();
    this.next.focus({ preventScroll: true });
  }

  say() {
    const at = this.at ?? 0;
    const mark = this.marks[at], last = at + 1 === this.marks.length;
    const put = (/** @type {string} */ selector, /** @type {string} */ text) => {
      const node = this.root.querySelector(selector);
      if (node) node.textContent = text;
    };
    put("#count", `${at + 1} of ${this.marks.length}`);
    put("#title", mark.title);
    put("#text", mark.text);
    put("#on", last ? "Done" : "Next");
    this.back.disabled = at === 0;
    this.box.dataset.mark = String(at + 1);
    tell(mark.inside === "#map" ? "map" : "");
  }

  /** What a mark points at: a line of the verdict, known by its first words, or whatever a selector finds. @returns {HTMLElement | null} */
  target(at = this.at ?? 0) {
    const { within, begins, inside } = this.marks[at];
    const part = /** @type {HTMLElement | null} */ (document.querySelector(within));
    if (part && inside) return deep(part, inside);
    if (!begins || !part) return part;
    return [...part.querySelectorAll("strong")].find((strong) => strong.textContent.startsWith(begins)) ?? null;
  }

  // The ring goes where its target is, the box below or above it.
  follow() {
    if (!this.place.isConnected) {
      this.close();
      return;
    }
    const target = this.target();
    this.ring.hidden = !target;
    const area = target ? this.line(target) : new DOMRect(window.innerWidth / 2, window.innerHeight / 3, 0, 0);
    Object.assign(this.ring.style, {
      left: `${area.left - 6}px`, top: `${area.top - 4}px`, width: `${area.width + 12}px`, height: `${area.height + 8}px`,
    });
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const below = area.bottom + GAP + height < window.innerHeight;
    const top = below ? area.bottom + GAP : Math.max(GAP, area.top - GAP - height);
    this.box.style.left = `${Math.max(GAP, Math.min(area.left, window.innerWidth - width - GAP))}px`;
    this.box.style.top = `${top}px`;
  }

  /** All of a line that begins with a bold word, up to the next break: it may go over several rows. @param {HTMLElement} target */
  line(target) {
    if (target.tagName !== "STRONG") return target.getBoundingClientRect();
    const range = document.createRange();
    range.setStartBefore(target);
    /** @type {Node} */
    let end = target;
    while (end.nextSibling && end.nextSibling.nodeName !== "BR") end = end.nextSibling;
    range.setEndAfter(end);
    return range.getBoundingClientRect();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault();
    this.leave();
  }

  leave() {
    remember();
    this.close();
  }

  close() {
    this.at = null;
    if (this.place.matches(":popover-open")) this.place.hidePopover();
    clearInterval(this.following);
    clearInterval(this.waiting);
    document.removeEventListener("keydown", this.keys, true);
    tell("");
  }
}

/** @param {{ data: TourData, parentElement: ShadowRoot }} component */
export default function ({ data, parentElement }) {
  const known = TOURS.get(parentElement);
  const stale = !known || known.place !== parentElement.querySelector("#marks");
  if (stale) known?.close();
  const tour = stale ? new Tour(parentElement) : known;
  TOURS.set(parentElement, tour);
  tour.receive(data);
  return () => tour.close();
}
