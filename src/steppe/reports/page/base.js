const data = JSON.parse(document.getElementById("data").textContent);

// Text, numbers, elements. Data only ever becomes a text node or the value of a harmless attribute,
// never markup.

const DASH = "\u2013", MINUS = "\u2212", PLUS_MINUS = "\u00b1";
const SVG = "http://www.w3.org/2000/svg";
const list = (value) => (Array.isArray(value) ? value.filter((item) => item !== null) : []);
const distinct = (values) => [...new Set(values)];
// Larger values overflow in the sums of a scale.
const finite = (value) => typeof value === "number" && Math.abs(value) < 1e300;
const minus = (written) => written.replace(/^-(?=[0.]*$)/, "").replace("-", MINUS);

// Round like Python: an exact tie goes to the even digit, while toFixed rounds it up (66.25).
function fixed(value, digits = 1) {
  if (!finite(value)) return DASH;
  const near = Math.abs(value).toFixed(digits), rest = Math.abs(value).toFixed(100).split(".")[1];
  const up = /^50*$/.test((rest ?? "").slice(digits)) && "13579".includes(near.at(-1));
  const even = up ? (Number(near) - 10 ** -digits).toFixed(digits) : near;
  return minus((value < 0 ? "-" : "") + even);
}
// As `cells.number_text`: the decimals do not hide that a value is positive.
function above(value, digits) {
  const least = Number(`1e-${digits}`);
  return value > 0 && value < least ? `< ${fixed(least, digits)}` : fixed(value, digits);
}
// A p value as `cells.p_text` writes it, with enough digits to show its side of 0.05.
function certainty(value) {
  if (!finite(value)) return DASH;
  if (value < 0.001) return "< 0.001";
  const places = -1 - Math.floor(Math.log10(value));
  for (let digits = 2; digits < 18; digits++) {
    const rounded = Number(fixed(value, Math.max(0, digits + places)));
    if (rounded !== 0.05) return String(rounded);
  }
  return "0.05";
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

// A method has the same color, marker and dash in every figure, so that methods never differ in
// color alone. Markers are filled at first, then hollow. `palette.py` defines which names have a fixed
// look, and the number of colors.
const { known: KNOWN, colours: COLOURS } = data.palette;
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const turned = (shape, turns) => shape.map(([x, y]) => {
  const [sin, cos] = [Math.sin(2 * Math.PI * turns), Math.cos(2 * Math.PI * turns)];
  return [x * cos - y * sin, x * sin + y * cos];
});
const around = (points, radius = 1.1) => Array.from({ length: points }, (_, i) =>
  [radius * Math.sin((2 * Math.PI * i) / points), -radius * Math.cos((2 * Math.PI * i) / points)]);
const star = (points, inner) => around(2 * points, 1.35).map(([x, y], i) =>
  (i % 2 ? [x * inner / 1.35, y * inner / 1.35] : [x, y]));
const PLUS = [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4],
  [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]];
const TRIANGLE = [[0, -1.2], [1.15, 0.85], [-1.15, 0.85]];
const MARKERS = [ // in the order of `palette.py`
  turned(PLUS, 1 / 8), around(16, 1), [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]],
  [[0, -1.35], [1.1, 0], [0, 1.35], [-1.1, 0]], TRIANGLE, turned(TRIANGLE, 1 / 2), PLUS,
  turned(TRIANGLE, 3 / 4), turned(TRIANGLE, 1 / 4), around(5), around(6), star(5, 0.6),
  [[0, -1.35], [0.7, 0], [0, 1.35], [-0.7, 0]], turned(around(8), 1 / 16),
  turned(around(6), 1 / 12),
];
const order = new Map();
let free = KNOWN.length;

function look(name) {
  if (!order.has(name)) order.set(name, KNOWN.includes(name) ? KNOWN.indexOf(name) : free++);
  const index = order.get(name), round = Math.floor(index / MARKERS.length);
  return {
    index,
    colour: `c${index % COLOURS}`,
    dash: DASHES[round % DASHES.length],
    marker: MARKERS[index % MARKERS.length],
    hollow: round % 2 ? " open" : "",
  };
}

const outline = (shape, x, y, r) =>
  `M${shape.map(([a, b]) => `${(x + r * a).toFixed(1)} ${(y + r * b).toFixed(1)}`).join("L")}Z`;

function swatch(name) {
  const { colour, dash, marker, hollow } = look(name);
  return s("svg", { class: `swatch ${colour}`, width: 24, height: 12, "aria-hidden": "true" },
    s("path", { class: "stroke", d: "M0 6H24", "stroke-dasharray": dash }),
    s("path", { class: `marks${hollow}`, d: outline(marker, 12, 6, 4) }));
}

// Row names as in Python, without the default algorithm and averaging.
function rowName(row) {
  const parts = [[row.algorithm, "ERM"], [row.optimizer, null], [row.averaging, "none"]];
  const named = parts.filter(([part, usual]) => part && part !== usual).map(([part]) => part);
  return named.join(" ") || text(row.algorithm);
}

const nothing = (message) => h("p", { class: "quiet" }, message);
const nameCell = (name) => [h("span", { class: "method" },
  swatch(name), h("span", { class: "name", title: name }, name))];
