// Tables. A column has a title, `get` (the value that it is sorted by), and perhaps `print` (that
// value as text), `show` (text or nodes instead), `best` ("high" or "low"), `partial` (whether
// the value is a mean that lacks something), a kind and a hint.

function table({ label, caption, columns, rows, foot = null }) {
  const body = h("tbody"), lines = rows.map((row) => ({ row, node: h("tr") }));
  const heads = columns.map((column, at) => {
    const button = h("button", { type: "button", click: () => sort(at) },
      h("span", { class: "long", title: column.title }, column.title));
    return h("th", { scope: "col", class: column.kind ?? null, "aria-sort": "none" }, button);
  });
  columns.forEach((column, at) => {
    const { get, print = text, show = (row) => [print(get(row))], partial = () => false } = column;
    // Means of different targets are no contest.
    const values = rows.filter((row) => !partial(row)).map(get).filter(finite);
    const [low, high] = extent(values);
    const contest = column.best && values.length > 1;
    const winner = contest ? print(column.best === "high" ? high : low) : null;
    for (const { row, node } of lines) {
      // Equal as printed is equal: nobody should wonder why one 86.7 is bold and another is not.
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
  return h("div", {}, search,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      h("table", {}, caption ? h("caption", {}, caption) : null,
        h("thead", {}, h("tr", {}, ...heads)), body, foot)));
}

// One run has no error to speak of.
const hasError = (err, n) => finite(err) && n !== 0 && n !== 1;
const withError = (mean, err) =>
  measured(mean, err).map((part) => part.textContent ?? part).join("");

function measured(mean, err, n) {
  if (!finite(mean) || !hasError(err, n)) return [fixed(mean)];
  return [fixed(mean), h("span", { class: "err" }, ` ${PLUS_MINUS} ${fixed(err)}`)];
}

// The columns that Python declares for a table, those that some row has a value for. A list is
// sorted by its largest number.
function declared(name, rows) {
  const written = (value) => (Array.isArray(value)
    ? distinct(value).map((one) => (finite(one) ? one.toLocaleString("en") : text(one))).join(", ")
    : text(value));
  const known = (value) => (Array.isArray(value) ? value.length : (value ?? null) !== null);
  return list((data.columns ?? {})[name]).map(({ key, title, label, digits, scale, better, word }) => {
    const of = (row) => (finite(row[key]) ? scale * row[key] : row[key]);
    const print = finite(digits) ? (value) => fixed(value, digits) : written;
    return {
      key, title, label, digits, of, print, best: better || null, kind: word ? "text" : null,
      get: (row) => (Array.isArray(row[key]) ? extent(row[key].filter(finite))[1] : of(row)),
      show: (row) => [known(row[key]) ? print(of(row)) : DASH],
    };
  }).filter(({ key }) => rows.some((row) => known(row[key])));
}

function resultTable(result, label) {
  const rows = list(result.rows);
  if (!rows.length) return nothing("No finished runs yet.");
  const cell = (row, column) => (row.cells ?? {})[column] ?? {};
  const columns = [
    { title: "method", get: rowName, show: (row) => nameCell(rowName(row)) },
    ...list(result.columns).map((column) => ({
      title: text(column),
      get: (row) => cell(row, column).mean,
      print: fixed,
      show: (row) => measured(cell(row, column).mean, cell(row, column).err, cell(row, column).n),
      hint: (row) => plural(cell(row, column).n ?? 0, "trial"),
      best: "high",
      partial: (row) => cell(row, column).partial === true,
    })),
    {
      title: "Avg.", get: (row) => row.avg, print: fixed, best: "high",
      partial: (row) => list(result.columns).some((column) => cell(row, column).partial === true),
    },
    ...declared("methods", rows),
  ];
  return table({ label, columns, rows });
}

function matrixTable(matrix, label) {
  const rows = list(matrix.methods).map((method, at) =>
    ({ ...method, values: (matrix.cells ?? [])[at] ?? [] }));
  const columns = list(matrix.optimizers).map((optimizer, at) => {
    const cell = (row) => row.values[at] ?? {};
    return {
      title: text(optimizer),
      get: (row) => cell(row).mean,
      print: fixed,
      show: (row) => measured(cell(row).mean, cell(row).err, cell(row).n),
      hint: (row) => plural(cell(row).n ?? 0, "trial"),
      best: "high",
      partial: (row) => cell(row).partial === true,
    };
  });
  const name = ({ algorithm, averaging }) =>
    text(algorithm) + (averaging && averaging !== "none" ? ` + ${text(averaging)}` : "");
  return table({ label, columns: [{ title: "algorithm", get: name }, ...columns], rows });
}
