// Building blocks of the page. Text becomes text nodes, never markup, whatever names contain.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element; children are elements or texts, and null attributes are left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Creates an SVG element, as ``element`` does for HTML. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Replaces the children of an element. */
export function fill(id, ...children) {
  byId(id).replaceChildren(...children);
}

/** Sets a text only if it differs, so that screen readers announce only changes. */
export function say(id, text) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
}

/**
 * Creates a table. Headings are texts, or [text, "number"] for columns of numbers. A row is a list of
 * texts or elements, and its first cell is its heading. On narrow screens a row becomes a list.
 */
export function table(caption, headings, rows, foot = null) {
  const titles = headings.map((one) => (Array.isArray(one) ? one[0] : one));
  const kinds = headings.map((one) => (Array.isArray(one) ? one[1] : null));
  const line = (row) =>
    element(
      "tr",
      {},
      ...row.map((cell, at) =>
        element(at ? "td" : "th", { scope: at ? null : "row", class: kinds[at], "data-heading": titles[at] }, cell),
      ),
    );
  const head = titles.map((title, at) => element("th", { scope: "col", class: kinds[at] }, title));
  return element(
    "table",
    {},
    element("caption", { class: "hidden" }, caption),
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...rows.map(line)),
    ...(foot ? [element("tfoot", {}, line(foot))] : []),
  );
}

/** Formats a number with few digits: 0.031, 1.4, 27, 1,204, 3.1 M. */
export function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return scaled(value, 1000, ["", "k", "M", "G", "T"]);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(2)));
}

export function bytes(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value < 1024 ? `${number(value)} B` : scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

function scaled(value, base, units) {
  let at = 0;
  for (; Math.abs(value) >= base && at < units.length - 1; at += 1) value /= base;
  return `${Number(value.toPrecision(3)).toLocaleString("en")} ${units[at]}`.trim();
}

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${number(value * 1e6)} µs`;
  return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

export function clock(date) {
  return date.toLocaleTimeString("en-GB");
}
