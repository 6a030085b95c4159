const data = JSON.parse(document.getElementById("data").textContent);

// Text, numbers, elements. Whatever comes from the data becomes a text node or the value of a
// harmless attribute, never markup.

const DASH = "\u2013", MINUS = "\u2212", PLUS_MINUS = "\u00b1";
const SVG = "http://www.w3.org/2000/svg";
const list = (value) => (Array.isArray(value) ? value.filter((item) => item !== null) : []);
const distinct = (values) => [...new Set(values)];
// Beyond this the sums of a scale overflow.
const finite = (value) => typeof value === "number" && Math.abs(value) < 1e300;
const minus = (written) => written.replace(/^-(?=[0.]*$)/, "").replace("-", MINUS);

// As Python rounds: an exact tie goes to the even digit, where toFixed would go up (66.25).
function fixed(value, digits = 1) {
  if (!finite(value)) return DASH;
  const near = Math.abs(value).toFixed(digits), rest = Math.abs(value).toFixed(100).split(".")[1];
  const up = /^50*$/.test((rest ?? "").slice(digits)) && "13579".includes(near.at(-1));
  const even = up ? (Number(near) - 10 ** -digits).toFixed(digits) : near;
  return minus((value < 0 ? "-" : "") + even);
}
const signed = (value) => (Number(fixed(value)) > 0 ? "+" : "") + fixed(value);
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

const extent = (values) => values.reduce(
  ([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

function short(value, digits = 4) {
  if (!finite(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
    return minus(value.toExponential(Math.min(digits, 3) - 1).replace(/\.?0*e\+?/, "e"));
  }
  return minus(String(Number(value.toPrecision(digits))));
}

function text(value) {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "number") return short(value, 6);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function clip(written, pixels) {
  const letters = Array.from(written), room = Math.max(2, Math.floor(pixels / 6.6));
  return letters.length <= room ? written : letters.slice(0, room - 1).join("") + "\u2026";
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// A method has one look in every figure: a colour, a marker and a dash, so that colour is never
// the only difference.

const COLOURS = 7;
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const star = (points, inner) => Array.from({ length: 2 * points }, (_, i) => {
  const angle = (Math.PI * i) / points, radius = i % 2 ? inner : 1.35;
  return [radius * Math.sin(angle), -radius * Math.cos(angle)];
});
const MARKERS = [
  Array.from({ length: 16 }, (_, i) => [Math.sin(i * Math.PI / 8), Math.cos(i * Math.PI / 8)]),
  [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]],
  [[0, -1.2], [1.15, 0.85], [-1.15, 0.85]],
  [[0, -1.35], [1.1, 0], [0, 1.35], [-1.1, 0]],
  [[0, 1.2], [1.15, -0.85], [-1.15, -0.85]],
  star(4, 0.5),
  star(5, 0.6),
  star(3, 0.4),
];
const order = new Map();

function look(name) {
  if (!order.has(name)) order.set(name, order.size);
  const index = order.get(name), colour = index % COLOURS, round = Math.floor(index / COLOURS);
  return {
    index,
    colour: `c${colour}`,
    dash: DASHES[round % DASHES.length],
    marker: MARKERS[(colour + round) % MARKERS.length],
  };
}

const outline = (shape, x, y, r) =>
  `M${shape.map(([a, b]) => `${(x + r * a).toFixed(1)} ${(y + r * b).toFixed(1)}`).join("L")}Z`;

function swatch(name) {
  const { colour, dash, marker } = look(name);
  return s("svg", { class: `swatch ${colour}`, width: 24, height: 12, "aria-hidden": "true" },
    s("path", { class: "stroke", d: "M0 6H24", "stroke-dasharray": dash }),
    s("path", { class: "marks", d: outline(marker, 12, 6, 4) }));
}

// As Python names the rows: the usual ones are left out.
function rowName(row) {
  const parts = [[row.algorithm, "ERM"], [row.optimizer, null], [row.averaging, "none"]];
  const named = parts.filter(([part, usual]) => part && part !== usual).map(([part]) => part);
  return named.join(" ") || text(row.algorithm);
}

const nothing = (message) => h("p", { class: "quiet" }, message);
const nameCell = (name) => [h("span", { class: "method" },
  swatch(name), h("span", { class: "name", title: name }, name))];
