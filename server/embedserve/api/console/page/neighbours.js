// Finds the labelled ids with the nearest vectors: fetched from the server, compared in the browser.

import { ask, inPath } from "./server.js";

const EXAMPLES_MAX = 1000;
const NEAREST_MAX = 6;
const labels = new Map();
const vectors = new Map();

/** Returns the label of each id of a model, by table. */
export async function labelsOfModel(model) {
  if (!labels.has(model)) {
    const { tables } = await ask(`console/labels/${inPath(model)}`);
    labels.set(model, new Map(Object.entries(tables).map(([table, ids]) => [table, new Map(Object.entries(ids))])));
  }
  return labels.get(model);
}

/** Returns the ids of ``named`` nearest to ``vector``, except ``but``, as [{id, label, cosine}]. */
export async function nearest(vector, model, version, feature, key, named, but, written) {
  const ids = [...named.keys()];
  const kept = `${model}@${version} ${key}`;
  if (!vectors.has(kept)) {
    vectors.clear(); // only one table's vectors are cached
    vectors.set(kept, await vectorsOf(ids, `${model}@${version}`, feature, key, written));
  }
  const all = vectors.get(kept);
  const found = ids.map((id, at) => ({ id, label: named.get(id), cosine: cosine(vector, all[at]) }));
  return found
    .filter((one) => !but.has(one.id) && one.cosine > -1)
    .sort((one, other) => other.cosine - one.cosine)
    .slice(0, NEAREST_MAX);
}

async function vectorsOf(ids, name, feature, key, written) {
  const all = [];
  for (let start = 0; start < ids.length; start += EXAMPLES_MAX) {
    const bags = ids.slice(start, start + EXAMPLES_MAX).map((id) => `[${written(id)}]`);
    const body = `{"features":{${JSON.stringify(feature)}:[${bags}]},"output_keys":[${JSON.stringify(key)}]}`;
    all.push(...(await ask(`models/${inPath(name)}/embed`, body)).values);
  }
  return all;
}

function cosine(one, other) {
  const size = norm(one) * norm(other);
  return size ? one.reduce((sum, value, at) => sum + value * other[at], 0) / size : -2;
}

export function norm(vector) {
  return Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
}
