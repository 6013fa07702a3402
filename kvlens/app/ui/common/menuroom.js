// @ts-check
// Room for a menu: where the window ends too soon below its button, the page is scrolled until the menu is inside.

const ROOM = 190; // px, of a menu of two rows

/** The element that Streamlit draws under a key, as a selector. @param {string} key */
export function placeOf(key) {
  return `.${CSS.escape("st-key-" + key.trim().replace(/[^a-zA-Z0-9_-]/g, "-"))}`;
}

/** @param {string} key of the menu's figure */
export function makeRoom(key) {
  const button = document.querySelector(`${placeOf(`${key}_menu`)} button`);
  if (button && button.getBoundingClientRect().bottom > window.innerHeight - ROOM) button.scrollIntoView({ block: "center" });
}
