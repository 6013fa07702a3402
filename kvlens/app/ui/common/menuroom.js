// @ts-check
// Room for a menu: where the window ends too soon below its button, the page is scrolled until the menu is inside.

const ROOM = 190; // px, of a menu of two rows

/** @param {string} key of the menu's figure */
export function makeRoom(key) {
  const place = "st-key-" + `${key}_menu`.trim().replace(/[^a-zA-Z0-9_-]/g, "-");
  const button = document.querySelector(`.${CSS.escape(place)} button`);
  if (button && button.getBoundingClientRect().bottom > window.innerHeight - ROOM) button.scrollIntoView({ block: "center" });
}
