// Tables. A column has a `title` and `get` (the value to sort by). Optional: `print` (formats that
// value), `show` (text or nodes instead), `best` ("high" or "low"), `partial` (whether the value is
// a mean over some targets only), `label` (the title spelled out), `kind` and `hint`.

function table({ label, caption, columns, rows, foot = null }) {
  const body = h("tbody"), lines = rows.map((row) => ({ row, node: h("tr") }));
  const heads = columns.map((column, at) => {
    const button = h("button", { type: "button", click: () => sort(at) },
      h("span", { class: "long", title: column.label ?? column.title }, column.title));
    return h("th", { scope: "col", class: column.kind ?? null, "aria-sort": "none" }, button);
  });
  columns.forEach((column, at) => {
    const { get, print = text, show = (row) => [print(get(row))], partial = () => false } = column;
    // Means over different targets do not compete.
    const values = rows.filter((row) => !partial(row)).map(get).filter(finite);
    const [low, high] = extent(values);
    const contest = column.best && values.length > 1;
    const winner = contest ? print(column.best === "high" ? high : low) : null;
    for (const { row, node } of lines) {
      // Values that print the same tie, so that two cells of 86.7 are either both bold or neither.
      const wins = finite(get(row)) && !partial(row) && print(get(row)) === winner;
      const cell = at === 0
        ? h("th", { scope: "row" }, ...show(row))
        : h("td", { class: wins ? "best" : column.kind ?? null }, ...show(row));
      if (column.kind === "text") cell.title = cell.textContent;
      else if (column.hint) cell.title = column.hint(row);
      if (finite(get(row)) && partial(row)) {
        cell.append("*");
        cell.title = [cell.title, "some targets are missing"].filter(Boolean).join("; ");
      }
      if (wins) cell.append(h("span", { class: "hidden-text" }, " (best)"));
      node.append(cell);
    }
  });
  body.append(...lines.map((line) => line.node));

  function sort(at) {
    const { get } = columns[at], now = heads[at].getAttribute("aria-sort");
    const numbers = rows.some((row) => finite(get(row)));
    const first = numbers ? "descending" : "ascending";
    const other = numbers ? "ascending" : "descending";
    const direction = now === first ? other : first, sign = direction === "ascending" ? 1 : -1;
    const missing = (value) => !(numbers ? finite(value) : value);
    lines.sort((one, two) => {
      const a = get(one.row), b = get(two.row);
      if (missing(a) || missing(b)) return missing(a) - missing(b); // last, either way
      return sign * (numbers ? a - b : text(a).localeCompare(text(b), "en", { numeric: true }));
    });
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === at ? direction : "none"));
    body.append(...lines.map((line) => line.node));
  }

  function narrow(event) {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const { row, node } of lines) {
      const named = [row.algorithm, row.optimizer, row.averaging, row.name, row.a, row.b];
      const known = named.map(text).join(" ").toLowerCase();
      node.hidden = !words.every((word) => known.includes(word));
    }
  }

  const search = rows.length <= 10 ? null : h("div", { class: "controls" },
    h("label", {}, "filter", h("input", { type: "search", input: narrow })));
  return h("div", {}, search, scrolling(label,
    h("table", {}, caption ? h("caption", {}, caption) : null,
      h("thead", {}, h("tr", {}, ...heads)), body, foot)));
}

// Wide content scrolls on its own and shows a hint.
const scrollers = [];
function scrolling(label, content) {
  const inner = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    content);
  const outer = h("div", {}, inner, h("p", { class: "hint" }, "scroll sideways for more \u2192"));
  const tell = () => {
    const rest = inner.scrollWidth - inner.clientWidth;
    outer.classList.toggle("wide", rest > 1);
    outer.classList.toggle("ended", inner.scrollLeft >= rest - 1);
  };
  inner.addEventListener("scroll", tell);
  scrollers.push(tell);
  new ResizeObserver(tell).observe(inner);
  return outer;
}

const withError = (mean, err, n) =>
  measured(mean, err, n).map((part) => part.textContent ?? part).join("");

function measured(mean, err, n) {
  // A single run has no standard error.
  if (!finite(mean) || !finite(err) || n === 0 || n === 1) return [fixed(mean)];
  return [fixed(mean), h("span", { class: "err" }, ` ${PLUS_MINUS} ${fixed(err)}`)];
}

// The columns that Python declares for a table, if some row has a value for them. A list is sorted
// by its largest number.
function declared(name, rows) {
  const known = (value) => (Array.isArray(value) ? value.length : (value ?? null) !== null);
  const one = (value) => (finite(value) && !Number.isInteger(value) ? short(value) : text(value));
  const several = (values) =>
    distinct(values).map((value) => (finite(value) ? value.toLocaleString("en") : text(value)));
  const written = (value) => (Array.isArray(value) ? several(value).join(", ") : one(value));
  return list((data.columns ?? {})[name]).map((column) => {
    const { key, digits } = column;
    const of = (row) => (finite(row[key]) ? column.scale * row[key] : row[key]);
    const print = finite(digits) ? (value) => above(value, digits) : written;
    const shown = (row) => [known(row[key]) ? print(of(row)) : DASH];
    return {
      key, digits, of, print, title: column.heading, label: column.meaning || column.heading,
      best: column.better || null, kind: column.word && key !== "name" ? "text" : null,
      get: (row) => (Array.isArray(row[key]) ? extent(row[key].filter(finite))[1] : of(row)),
      show: key === "name" ? (row) => nameCell(text(row.name)) : shown,
    };
  }).filter(({ key }) => rows.some((row) => known(row[key])));
}

// Columns for means over trials, from `row.cells`.
const cellColumns = (names, labels) => list(names).map((name, at) => {
  const cell = (row) => (row.cells ?? {})[name] ?? {};
  return {
    title: text(list(labels)[at] ?? name),
    get: (row) => cell(row).mean,
    print: fixed,
    show: (row) => measured(cell(row).mean, cell(row).err, cell(row).n),
    hint: (row) => plural(cell(row).n ?? 0, "trial"),
    best: "high",
    partial: (row) => cell(row).partial === true,
  };
});

function resultTable(result, label) {
  const rows = list(result.rows), cells = cellColumns(result.columns, result.labels);
  if (!rows.length) return nothing("No finished runs yet.");
  const columns = [
    { title: "method", get: rowName, show: (row) => nameCell(rowName(row)) },
    ...cells,
    {
      title: "Avg.", get: (row) => row.avg ?? row.avg_partial, print: fixed, best: "high",
      partial: (row) => !finite(row.avg) || cells.some(({ partial }) => partial(row)),
    },
    ...declared("methods", rows),
  ];
  return table({ label, columns, rows });
}

function matrixTable(matrix, label) {
  const optimizers = list(matrix.optimizers);
  const rows = list(matrix.methods).map((method, at) => ({
    ...method,
    cells: Object.fromEntries(optimizers.map((name, i) => [name, (matrix.cells ?? [])[at]?.[i]])),
  }));
  const name = ({ algorithm, averaging }) =>
    text(algorithm) + (averaging && averaging !== "none" ? ` + ${text(averaging)}` : "");
  const columns = [{ title: "algorithm", get: name }, ...cellColumns(optimizers)];
  return table({ label, columns, rows });
}
