// Converts typed ids and weights to JSON.

/** Splits text at commas and spaces; string ids may contain spaces and are split at commas only. */
export function wordsOf(text, isString = false) {
  return text
    .split(isString ? "," : /[\s,]+/)
    .map((word) => word.trim())
    .filter((word) => word !== "");
}

/** Returns an id as JSON. Integers are copied as text, because JavaScript would round long ones. */
export function idAsJson(table, word) {
  return table.ids.id_type !== "string" && /^-?(0|[1-9]\d*)$/.test(word) ? word : JSON.stringify(word);
}

/** Returns a weight as JSON. Other text is sent as a string, which the server rejects by field. */
export function weightAsJson(word) {
  return /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(word) ? word : JSON.stringify(word);
}

export function tableOf(model, feature) {
  return model.tables.find((table) => table.features.includes(feature));
}
