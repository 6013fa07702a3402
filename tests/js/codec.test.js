// What Python packs comes back, and a figure that was not recorded is never a number.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { NOT_RECORDED, decode, formatBytes, formatValue, unpack, visibleText } from "../../kvlens/player/web/codec.js";

const message = JSON.parse(readFileSync(new URL("message.json", import.meta.url), "utf8")); // tests/unit/test_player_payload.py packs the same

test("a message of Python's codec is unpacked, wherever in a buffer it is", () => {
  const bytes = Buffer.from(message.base64, "base64");
  const shifted = new Uint8Array(bytes.length + 3);
  shifted.set(bytes, 3);
  for (const data of [new Uint8Array(bytes), shifted.subarray(3), new Uint8Array(bytes).buffer]) {
    const { header, arrays } = unpack(data);
    assert.equal(header.text, message.header.text);
    assert.deepEqual(Object.keys(arrays), Object.keys(message.arrays));
    for (const [name, values] of Object.entries(message.arrays)) {
      assert.deepEqual([...arrays[name]], values.map((value) => value ?? NaN), name);
    }
  }
});

test("codes span lo to hi and the last code is not recorded", () => {
  assert.equal(decode(0, -1, 3), -1);
  assert.equal(decode(65534, -1, 3), 3);
  assert.equal(decode(32767, 0, 1), 0.5);
  assert.ok(Number.isNaN(decode(NOT_RECORDED, 0, 1)));
});

test("figures are printed with their unit", () => {
  const cases = [
    [0.123456, "share", "0.1235"], [-0.0001, "nats", "0.000 nats"], [1.5, "nats", "1.500 nats"], [1, "0 or 1", "yes"], [0, "0 or 1", "no"],
    [3, "spans", "3 spans"], [2.34567, "tokens", "2.346 tokens"], [3_610_000, "bytes", "3.61 MB"], [12, "", "12"],
  ];
  for (const [value, unit, text] of cases) assert.equal(formatValue(value, unit), text);
  for (const value of [NaN, null, undefined]) assert.equal(formatValue(value, "share"), "not recorded");
});

test("bytes change their unit at powers of a thousand", () => {
  assert.deepEqual([0, 999, 1000, 1_234_567, 2e9, -1500].map(formatBytes), ["0 B", "999 B", "1 kB", "1.23 MB", "2 GB", "-1.5 kB"]);
});

test("white space and controls are made visible and markup stays text", () => {
  assert.equal(visibleText("a\nb"), "a\u23ce\nb");
  assert.equal(visibleText("\t"), "\u21e5");
  assert.equal(visibleText("  "), "\u00b7\u00b7");
  assert.equal(visibleText(" a"), " a");
  assert.equal(visibleText(""), "\u2205");
  assert.equal(visibleText("\u0000\u001b\u007f"), "\u2400\u241b\u2421");
  assert.equal(visibleText("</script>"), "</script>");
});
