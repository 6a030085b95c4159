// Scales and frames.

const wide = (values) => {
  const [low, high] = extent(values);
  return low > 0 && high / low >= 30;
};

// Options: `log`, `zero` (include it), `categories` (instead of values), `whole` (ticks at
// integers), `apart` (pixels between ticks).
function scale(values, from, to, { log, zero, categories, whole, apart = 75 }) {
  if (categories) {
    const step = (to - from) / Math.max(1, categories.length);
    const at = (value) => from + step * (categories.indexOf(value) + 0.5);
    return { at, step, ticks: categories.map((value) => ({ at: at(value), label: value })) };
  }
  const read = log ? Math.log10 : (value) => value;
  let [low, high] = extent(values.map(read));
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (high < low || (zero && high === low)) [low, high] = [0, 1];
  const thin = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const pad = thin ? Math.abs(low) / 10 || 1 : (high - low) * 0.05;
  if (!(zero && low === 0)) low -= pad;
  if (!(zero && high === 0)) high += pad;
  const at = (value) => from + ((read(value) - low) / (high - low)) * (to - from);
  const wanted = Math.max(2, Math.floor(Math.abs(to - from) / apart));
  const marks = log ? decades(low, high, wanted) : rounds(low, high, wanted, whole ? 1 : 0);
  return { at, ticks: marks.map((value) => ({ at: at(value), label: short(value, 6) })) };
}

function rounds(low, high, wanted, least) {
  const rough = Math.max(least, (high - low) / wanted), size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((factor) => factor * size >= rough * 0.999);
  const first = Math.ceil(low / step), count = Math.min(50, Math.floor(high / step) - first + 1);
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * step);
}

function decades(low, high, wanted) {
  const every = Math.ceil((high - low) / wanted), marks = [];
  for (let power = Math.floor(low); power <= high; power += every) {
    for (const factor of high - low < wanted / 3 ? [1, 2, 5] : [1]) {
      if (Math.log10(factor) + power >= low && Math.log10(factor) + power <= high) {
        marks.push(factor * 10 ** power);
      }
    }
  }
  return marks;
}

function frame(width, { label, x, y, height = Math.min(340, 180 + width / 4) }) {
  const box = { left: 50, right: width - 12, top: 22, bottom: height - 42, width };
  const sx = scale(x.values, box.left, box.right, x);
  const sy = scale(y.values, box.bottom, box.top, { ...y, apart: 45 });
  const room = (sx.step ?? 75) - 6;
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "group",
    "aria-label": `${label}. Left and right arrow keys step through the values.`,
  });
  svg.append(
    s("path", {
      class: "grid", d: sy.ticks.map((t) => `M${box.left} ${t.at}H${box.right}`).join(""),
    }),
    s("path", { class: "axis", d: `M${box.left} ${box.top}V${box.bottom}H${box.right}` }),
    s("g", { class: "y-ticks", "text-anchor": "end" }, ...sy.ticks.map((t) =>
      s("text", { x: box.left - 6, y: t.at + 4 }, clip(t.label, 50)))),
    s("g", { class: "x-ticks", "text-anchor": "middle" }, ...sx.ticks.map((t) =>
      s("text", { x: t.at, y: box.bottom + 16 }, clip(t.label, room)))),
    s("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" },
      clip(x.title + (x.log ? " (log scale)" : ""), width - 60)),
    s("text", { x: 4, y: 12 }, clip(y.title + (y.log ? " (log scale)" : ""), width - 8)));
  if (!y.values.length) {
    const [cx, cy] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    svg.append(s("text", { x: cx, y: cy, "text-anchor": "middle" }, "nothing to show"));
  }
  return { svg, box, x: sx.at, y: sy.at, step: sx.step };
}

// A chart is redrawn when its width changes.

const charts = [];

function chart(draw) {
  const host = h("div", { class: "chart" });
  let width = 0;
  const redraw = () => {
    hideTip();
    width = host.clientWidth;
    if (width) host.replaceChildren(draw(Math.max(240, width)));
  };
  charts.push({ redraw, fit: () => host.clientWidth !== width && redraw() });
  return { host, redraw };
}

// The tooltip.

const tip = document.getElementById("tip");
const hideTip = () => { tip.hidden = true; };

function showTip(svg, x, y, title, entries, rest = null) {
  tip.replaceChildren(h("b", {}, title), ...entries.map(({ name, value, near }) =>
    h("div", { class: near ? "entry near" : "entry" },
      order.has(name) ? swatch(name) : null, h("span", {}, name), value)),
    rest ? h("div", { class: "quiet" }, rest) : "");
  tip.hidden = false;
  const place = svg.getBoundingClientRect(), zoom = place.width / svg.viewBox.baseVal.width;
  const left = place.left + x * zoom, top = place.top + y * zoom;
  const size = tip.getBoundingClientRect(), view = document.documentElement;
  const beside = left + 14 + size.width > view.clientWidth ? left - 14 - size.width : left + 14;
  const fit = (at, length, room) => Math.max(4, Math.min(at, room - length - 4));
  const inside = fit(top - size.height / 2, size.height, view.clientHeight);
  tip.style.left = `${scrollX + fit(beside, size.width, view.clientWidth)}px`;
  tip.style.top = `${scrollY + inside}px`;
}

// Pointer and keyboard move between stops, [{ x, ... }] sorted by x. `pick` returns the index of the
// stop at a position (-1: none), and `show` draws the stop into a separate layer.
function hovering(svg, stops, pick, show) {
  const layer = s("g", { class: "hover" });
  svg.append(layer);
  let current = -1;
  const go = (index, y = null) => {
    current = index;
    layer.replaceChildren();
    if (index < 0) hideTip();
    else show(stops[index], layer, y);
  };
  const point = (event) => {
    const place = svg.getBoundingClientRect(), zoom = svg.viewBox.baseVal.width / place.width;
    const x = (event.clientX - place.left) * zoom, y = (event.clientY - place.top) * zoom;
    go(pick(x, y), y);
  };
  const keys = {
    ArrowRight: () => Math.min(stops.length - 1, current + 1),
    ArrowLeft: () => Math.max(0, current - 1),
    Home: () => 0,
    End: () => stops.length - 1,
    Escape: () => -1,
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => go(-1));
  svg.addEventListener("blur", () => go(-1));
  svg.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || !stops.length) return;
    event.preventDefault();
    go(keys[event.key]());
  });
}

function nearest(stops, distance, limit) {
  let best = -1, least = limit;
  stops.forEach((stop, i) => {
    const away = distance(stop);
    if (away < least) [best, least] = [i, away];
  });
  return best;
}

// Stops that are single points: draw a ring around the current one and show its values.
function hoverPoints(svg, points) {
  const stops = points.sort((a, b) => a.x - b.x);
  const pick = (x, y) => nearest(stops, (stop) => Math.hypot(stop.x - x, stop.y - y), 28);
  hovering(svg, stops, pick, (stop, layer) => {
    layer.append(s("circle", { class: "ring", cx: stop.x, cy: stop.y, r: 8 }));
    showTip(svg, stop.x, stop.y, stop.title, stop.entries);
  });
}

// Stops that are values of x: draw a vertical line and show the value of every series.
const ENTRIES = 12;
function hoverLines(svg, { box, x, y }, series, heading, write) {
  const at = new Map();
  for (const { name, points } of series) {
    for (const [px, py] of points) {
      if (!at.has(px)) at.set(px, []);
      at.get(px).push({ name, value: py, y: y(py) });
    }
  }
  const stops = [...at].sort((a, b) => a[0] - b[0])
    .map(([value, entries]) => ({ value, x: x(value), entries }));
  const pick = (px) => nearest(stops, (stop) => Math.abs(stop.x - px), Infinity);
  hovering(svg, stops, pick, (stop, layer, pointer) => {
    // With many series, show those closest to the pointer.
    const away = (entry) => (pointer === null ? entry.y : Math.abs(entry.y - pointer));
    const near = [...stop.entries].sort((a, b) => away(a) - away(b)).slice(0, ENTRIES);
    const closest = pointer === null ? null : near[0];
    const more = stop.entries.length - near.length;
    layer.append(s("path", { class: "cross", d: `M${stop.x} ${box.top}V${box.bottom}` }));
    for (const entry of near) {
      layer.append(s("path", {
        class: `marks${look(entry.name).hollow} ${look(entry.name).colour}`,
        d: outline(look(entry.name).marker, stop.x, entry.y, 5),
      }));
    }
    const entries = near.sort((a, b) => a.y - b.y)
      .map((entry) => ({ name: entry.name, value: write(entry.value), near: entry === closest }));
    showTip(svg, stop.x, pointer ?? box.top + 60, heading(stop.value), entries,
      more ? `and ${plural(more, "more line")}` : null);
  });
}

// Legends and controls.

const CROWD = 8;

// Buttons that show and hide series. `update` takes [name, value] pairs; if there are many, only
// those with the highest values are visible at first.
function legend(changed) {
  const element = h("div", { class: "legend", role: "group", "aria-label": "series" });
  const hidden = new Set();
  let known = "";
  const highlight = (name) => {
    for (const group of element.closest("figure").querySelectorAll(".series")) {
      const dimmed = name !== null && group.dataset.series !== String(look(name).index);
      group.classList.toggle("dim", dimmed);
    }
  };
  function update(entries) {
    const names = distinct(entries.map(([name]) => name));
    if (JSON.stringify(names) === known) { // keep the reader's choice
      changed();
      return;
    }
    known = JSON.stringify(names);
    const top = new Map(names.map((name) => [name, -1e9]));
    for (const [name, value] of entries) {
      if (finite(value)) top.set(name, Math.max(value, top.get(name)));
    }
    const ranked = [...names].sort((a, b) => top.get(b) - top.get(a));
    const buttons = new Map(names.map((name) => [name, h("button", {
      type: "button", title: name,
      click: () => only(names.filter((n) => (n === name) === hidden.has(n))),
      pointerenter: () => hidden.has(name) || highlight(name),
      pointerleave: () => highlight(null),
    }, swatch(name), h("span", {}, name))]));
    const only = (shown) => {
      hidden.clear();
      for (const name of names) if (!shown.includes(name)) hidden.add(name);
      for (const [name, button] of buttons) button.setAttribute("aria-pressed", !hidden.has(name));
      changed();
    };
    const tool = (title, shown) =>
      h("button", { type: "button", class: "tool", click: () => only(shown) }, title);
    const tools = names.length < 4 ? [] : [tool("all", names), tool("none", [])];
    if (names.length > CROWD) tools.push(tool(`best ${CROWD}`, ranked.slice(0, CROWD)));
    element.replaceChildren(...tools, ...buttons.values());
    only(ranked.slice(0, CROWD));
  }
  return { element, update, shown: (name) => !hidden.has(name) };
}

// A menu of options [{ label, ... }], hidden if there is only one.
function choice(title, changed) {
  const menu = h("select", { change: changed }), element = h("label", {}, title, menu);
  let options = [];
  return {
    element,
    get value() { return options[Math.max(0, menu.selectedIndex)]; },
    set(given) {
      const before = this.value?.label;
      options = given;
      menu.replaceChildren(...options.map(({ label }) => h("option", {}, label)));
      menu.selectedIndex = Math.max(0, options.findIndex(({ label }) => label === before));
      element.hidden = options.length < 2;
      return this;
    },
  };
}

const figure = (caption, controls, names, drawn) => h("figure", {},
  h("div", { class: "controls" }, ...controls.map((control) => control.element)),
  names ? names.element : null, drawn.host, h("figcaption", {}, caption));

const group = (name, ...children) =>
  s("g", { class: `series ${look(name).colour}`, "data-series": look(name).index }, ...children);

const whiskers = (bars) => s("path", {
  class: "stroke",
  d: bars.map(([x, low, high]) =>
    `M${x} ${low}V${high}M${x - 3} ${low}h6M${x - 3} ${high}h6`).join(""),
});

function lines({ svg, x, y }, series, every) {
  for (const { name, points } of series) {
    const { dash, marker, hollow } = look(name), spots = points.map(([a, b]) => [x(a), y(b)]);
    const path = spots.map(([a, b], i) =>
      `${i === 0 || points[i].gap ? "M" : "L"}${a.toFixed(1)} ${b.toFixed(1)}`);
    const marked = spots.filter((_, i) => i % every === 0 || i === spots.length - 1);
    svg.append(group(name,
      s("path", { class: "stroke", d: path.join(""), "stroke-dasharray": dash }),
      s("path", {
        class: `marks${hollow}`, d: marked.map(([a, b]) => outline(marker, a, b, 3.5)).join(""),
      })));
  }
}

// The points of a series without the missing ones. `gap`: no line leads to this point.
function pointsOf(xs, ys) {
  const points = [];
  let gap = true;
  (xs ?? []).forEach((x, i) => { // not list(), which would shift the indices
    const here = finite(x) && finite((ys ?? [])[i]);
    if (here) points.push(Object.assign([x, ys[i]], { gap }));
    gap = !here;
  });
  return points;
}

// Names next to their points, if there is room.
function labels(points, box) {
  const taken = points.map(({ x, y }) => [x - 7, y - 7, x + 7, y + 7]), nodes = [];
  for (const { x, y, name } of points) {
    const shown = clip(name, 110), length = Array.from(shown).length * 6.8;
    const places = [
      [x + 10, y + 4], [x - 10 - length, y + 4], [x - length / 2, y - 11], [x - length / 2, y + 20],
    ].slice(0, points.length > 12 ? 1 : 4); // among many points, only the unambiguous position
    const found = places.map(([left, base]) => [left, base - 10, left + length, base + 3]).find(
      (a) => a[0] >= box.left && a[2] <= box.width && a[1] >= box.top && a[3] <= box.bottom &&
        taken.every((b) => a[2] < b[0] || b[2] < a[0] || a[3] < b[1] || b[3] < a[1]));
    if (!found) continue;
    taken.push(found);
    nodes.push(s("text", { class: "label", x: found[0], y: found[3] - 3 }, shown));
  }
  return nodes;
}
