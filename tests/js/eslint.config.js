// The lint of the product's JavaScript and of its tests.
import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    files: ["**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module" },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: { eqeqeq: ["error", "always", { null: "ignore" }], "no-var": "error", "prefer-const": "error", "no-unused-vars": ["error", { argsIgnorePattern: "^_" }], "no-eval": "error", "no-implied-eval": "error" },
  },
  {
    files: ["kvlens/**/*.js"],
    languageOptions: { globals: globals.browser },
    rules: {
      "no-restricted-globals": ["error", "fetch", "XMLHttpRequest", "WebSocket", "EventSource"],
      "no-restricted-properties": ["error", { property: "innerHTML" }, { property: "outerHTML" }, { property: "insertAdjacentHTML" }],
      "no-control-regex": "off", // control characters are made visible
    },
  },
  { files: ["tests/js/**/*.js"], languageOptions: { globals: globals.node } },
];
