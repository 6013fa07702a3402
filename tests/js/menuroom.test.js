// The place of a figure on a page of Streamlit, by its key.
import assert from "node:assert/strict";
import { test } from "node:test";

test("a key is found by the class that Streamlit makes of it", async () => {
  globalThis.CSS = { escape: (name) => name };
  const { placeOf } = await import("../../kvlens/app/ui/common/menuroom.js");
  assert.equal(placeOf(" loss:a/b 1_menu "), ".st-key-loss-a-b-1_menu");
});
