// @ts-check
// What a view listens to outside its own nodes.

/** @typedef {{ el: { player: Element }, attach(): void, draw(): void, setTour?(on: boolean): void, key(event: KeyboardEvent): void }} Listener */

// Keys also work while the focus is on nothing that uses keys itself, so that a page can be played at once.
const KEY_USERS = "input, textarea, select, button, canvas, [contenteditable], [role=slider], [role=combobox], [role=grid], [role=menu]";

/** @param {Listener} view */
function pageKeys(view) {
  return (/** @type {KeyboardEvent} */ event) => {
    if (!(event.target instanceof Element && event.target.closest(KEY_USERS))) view.key(event);
  };
}

/** Everything outside its nodes that the view listens to; returns what takes it off again. @param {Listener} view */
export function listen(view) {
  const onRun = () => view.attach();
  const onKey = pageKeys(view);
  const redraw = () => view.draw();
  const onTour = (/** @type {Event} */ event) => view.setTour?.(event instanceof CustomEvent && event.detail === "map");
  const sizes = new ResizeObserver(redraw);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  window.addEventListener("kvlens:run", onRun);
  window.addEventListener("kvlens:tour", onTour);
  document.addEventListener("keydown", onKey);
  scheme.addEventListener("change", redraw);
  sizes.observe(view.el.player);
  return () => {
    window.removeEventListener("kvlens:run", onRun);
    window.removeEventListener("kvlens:tour", onTour);
    document.removeEventListener("keydown", onKey);
    scheme.removeEventListener("change", redraw);
    sizes.disconnect();
  };
}
