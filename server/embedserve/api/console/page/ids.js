// Converts typed ids and weights to JSON.

/** Splits text at commas, and at spaces unless ids are strings. A string in double quotes is JSON, and may have commas. */
export function wordsOf(text, isString = false) {
  if (!isString) return text.split(/[\s,]+/).filter((word) => word !== "");
  const words = text.match(/\s*"(?:[^"\\]|\\.)*"\s*(?=,|$)|[^,]+/g) ?? [];
  return words.map((word) => word.trim()).filter((word) => word !== "").map(unquoted);
}

function unquoted(word) {
  if (!/^".*"$/s.test(word)) return word;
  try {
    return JSON.parse(word);
  } catch {
    return word;
  }
}

/** Returns words as text that wordsOf splits into the same words. Only strings have commas, quotes or outer spaces. */
export function textOf(words) {
  return words.map((word) => (/[,"]|^\s|\s$|^$/.test(word) ? JSON.stringify(word) : word)).join(", ");
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
