// Ids as people write them, and as JSON has them.

/** What commas or spaces part; of strings, which may have spaces, commas alone. */
export function wordsOf(text, isString = false) {
  return text
    .split(isString ? "," : /[\s,]+/)
    .map((word) => word.trim())
    .filter((word) => word !== "");
}

/** An id as JSON: integers of any length as they stand, as numbers of JavaScript would be rounded. */
export function idAsJson(table, word) {
  return table.ids.id_type !== "string" && /^-?(0|[1-9]\d*)$/.test(word) ? word : JSON.stringify(word);
}

/** What is no number is sent as a string, which the server refuses with its place. */
export function weightAsJson(word) {
  return /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(word) ? word : JSON.stringify(word);
}

export function tableOf(model, feature) {
  return model.tables.find((table) => table.features.includes(feature));
}
