// Shows a response to people: each vector as a drawing and as numbers, with its nearest ids.

import { drawn, element, fill, number } from "./page.js";
import { nearest, norm } from "./neighbours.js";
import { idAsJson, tableOf } from "./ids.js";
import { RequestError } from "./server.js";

const DRAWN_MAX = 128;
const HEIGHT = 32;
const ROWS_MAX = 8;

/**
 * Shows the response to a request with one example.
 *
 * words: the ids of each feature, as the user typed them; named: the labels of each table.
 */
export async function showResponse(response, model, words, named) {
  const missing = response.missing_ids ?? {};
  const note = [
    ...countsOf("Ids without a row", response.unknown_ids ?? {}),
    ...countsOf("Ids of lost parts, whose rows the vectors lack", missing),
  ];
  const isEmpty = (key) => vectorsOf(response, key).every((vector) => !norm(vector));
  const empty = response.keys.filter((key) => isEmpty(key) && !Object.hasOwn(missing, sourceOf(model, key).feature));
  if (empty.length) note.push(element("p", { class: "hint" }, `Zeros, of empty bags: ${empty.join(", ")}`));
  const keys = response.keys.filter((key) => !isEmpty(key));
  const boxes = keys.map((key) => boxOf(key, vectorsOf(response, key)));
  fill("response", element("h3", {}, "Vectors"), ...note, ...boxes);
  for (const [at, key] of keys.entries()) {
    const { feature, table } = sourceOf(model, key);
    const all = words[model.features.indexOf(feature)];
    const pooled = model.unpooled ? all.slice(0, 1) : all; // into the vector that is compared, the first
    if (named.has(table.name)) await addNearest(boxes[at], response, key, feature, table, pooled, named.get(table.name));
  }
}

/** Returns a note with the counts by feature; none if there are no counts. */
function countsOf(title, counts) {
  const words = Object.entries(counts).flatMap(([feature, count]) => [", ", `${count} of `, element("bdi", {}, feature)]);
  return words.length ? [element("p", { class: "note" }, `${title}: `, ...words.slice(1))] : [];
}

/** Returns the feature and table of a key, which is named feature or feature@table. */
function sourceOf(model, key) {
  for (const table of model.tables) {
    const feature = table.features.find((one) => key === one || key === `${one}@${table.name}`);
    if (feature !== undefined) return { feature, table };
  }
  return { feature: key, table: tableOf(model, key) };
}

/** Returns the vectors of a key: one if the model is pooled, otherwise one for each id. */
function vectorsOf(response, key) {
  if (!Array.isArray(response.values)) return response.values[key];
  const at = response.keys.indexOf(key);
  const start = response.length_per_key.slice(0, at).reduce((sum, one) => sum + one, 0);
  return [response.values[0].slice(start, start + response.length_per_key[at])];
}

function boxOf(key, vectors) {
  const shown = vectors.slice(0, ROWS_MAX).flatMap(vectorOf);
  const more = vectors.length > ROWS_MAX ? [element("p", { class: "hint" }, `and ${vectors.length - ROWS_MAX} more`)] : [];
  return element("article", { class: "vector" }, element("h4", {}, key), ...shown, ...more);
}

function vectorOf(vector) {
  const title = `${vector.length} numbers, norm ${number(norm(vector))}`;
  const values = vector.map((value) => (value === null ? "infinite" : String(value))).join(", ");
  return [
    element("p", { class: "hint" }, title),
    drawingOf(vector),
    element("details", {}, element("summary", {}, "Numbers"), element("p", { class: "numbers" }, values)),
  ];
}

/** Returns a drawing with a bar for each number, up or down from the middle. */
function drawingOf(vector) {
  const values = vector.slice(0, DRAWN_MAX);
  const most = Math.max(...values.map((value) => Math.abs(value ?? 0))) || 1;
  const bars = values.map((value, at) => {
    const height = Math.max(0.5, (Math.abs(value ?? 0) / most) * (HEIGHT / 2));
    const y = value < 0 ? HEIGHT / 2 : HEIGHT / 2 - height;
    return drawn("rect", { x: at + 0.1, y, width: 0.8, height, class: value < 0 ? "below" : "above" });
  });
  return drawn("svg", { class: "drawing", viewBox: `0 0 ${values.length} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
}

async function addNearest(box, response, key, feature, table, words, named) {
  const [vector] = vectorsOf(response, key);
  if (!norm(vector)) return;
  const but = new Set(words);
  const asked = words.map((word) => named.get(word) ?? word).join(", ");
  try {
    const found = await nearest(vector, response, feature, key, named, but, (id) => idAsJson(table, id));
    const items = found.map((one) => {
      const bar = element("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", `${Math.max(0, 100 * one.cosine).toFixed(1)}%`);
      return element("li", {}, element("span", {}, one.label), element("span", { class: "share" }, bar, one.cosine.toFixed(2)));
    });
    box.append(element("h5", {}, `Nearest to ${asked}, by cosine`), element("ol", { class: "nearest" }, ...items));
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    box.append(element("p", { class: "error" }, `The nearest: ${error.message}`));
  }
}
