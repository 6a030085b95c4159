// The figures. Each function returns the nodes of its section, or null to omit it.

const ACCURACY = "target accuracy (%)", VALIDATION = "validation accuracy (%)";
const spread = (one) => (finite(one.err) ? one.err : 0);
const reach = (one, mean) => [mean - spread(one), mean + spread(one)];
// All x (0) or y (1) values of the series.
const along = (series, at) => series.flatMap(({ points }) => points.map((point) => point[at]));
// Options for the distinct values of a key: { label, items }.
const grouped = (items, key) => distinct(items.map((item) => text(item[key]))).map((label) =>
  ({ label, items: items.filter((item) => text(item[key]) === label) }));

function cost() {
  const all = list(data.cost);
  const measures = declared("costs", all).filter(({ digits }) => finite(digits));
  if (!measures.length) return [nothing("No timed runs yet.")];

  const drawn = chart((width) => {
    const { of, label } = measure.value;
    const rows = dataset.value.items.filter((row) => finite(of(row)) && finite(row.accuracy));
    const plot = frame(width, {
      label: "accuracy against cost",
      x: { title: label, values: rows.map(of), log: wide(rows.map(of)) },
      y: { title: ACCURACY, values: rows.flatMap((row) => reach(row, row.accuracy)) },
    });
    const points = rows.map((row) => ({
      row, x: plot.x(of(row)), y: plot.y(row.accuracy), name: text(row.name), title: text(row.name),
      entries: [
        {
          name: "accuracy",
          value: withError(row.accuracy, row.err, row.trials) + (row.partial === true ? "*" : ""),
        },
        ...measures.map((m) => ({ name: m.label, value: m.print(m.of(row)) })),
      ],
    }));
    let top = -Infinity, front = "";
    for (const { row, x, y } of [...points].sort((a, b) => a.x - b.x || a.y - b.y)) {
      if (row.partial === true || row.accuracy <= top) continue;
      front += `${front ? "H" : `M${x} ${plot.box.bottom}L`}${x}${front ? "V" : " "}${y}`;
      top = row.accuracy;
    }
    plot.svg.append(s("path", { class: "front", d: front && `${front}H${plot.box.right}` }));
    for (const { row, x, y, name } of points) {
      plot.svg.append(group(name, whiskers([[x, ...reach(row, row.accuracy).map(plot.y)]]),
        s("path", { class: `marks${look(name).hollow}`, d: outline(look(name).marker, x, y, 6) })));
    }
    plot.svg.append(...labels(points, plot.box));
    hoverPoints(plot.svg, points);
    return plot.svg;
  });
  const host = h("div"), columns = [
    ...declared("costs", all).filter(({ key }) => key === "name"),
    {
      title: "accuracy", get: (row) => row.accuracy, print: fixed, best: "high",
      show: (row) => measured(row.accuracy, row.err, row.trials), partial: (row) => row.partial === true,
    },
    ...measures,
  ];
  const refresh = () => {
    host.replaceChildren(table({ label: "cost", columns, rows: dataset.value.items }));
    drawn.redraw();
  };
  const dataset = choice("dataset", refresh).set(grouped(all, "dataset"));
  const measure = choice("cost", drawn.redraw).set(measures);
  refresh();
  const caption = "Up and to the left is better. Whiskers: standard error over trials. The stepped " +
    "line is the Pareto front: the best mean accuracy at that cost or less.";
  return [figure(caption, [dataset, measure], null, drawn), host];
}

function drawings() {
  const all = Object.entries(data.figures ?? {});
  if (!all.length) return null;
  return all.map(([title, svg]) => h("figure", {},
    h("img", { alt: title, src: `data:image/svg+xml;base64,${svg}` }),
    h("figcaption", {}, title)));
}

function curves() {
  const all = list(data.curves).filter((entry) => list(entry.series).length);
  const has = (key) => all.some((entry) =>
    list(entry.series).some((one) => list(one[key]).some(finite)));
  const kinds = [
    { key: "test", label: ACCURACY, write: (value) => fixed(value) },
    { key: "val", label: VALIDATION, write: (value) => fixed(value) },
    { key: "loss", label: "training loss", write: (value) => short(value) },
  ].filter(({ key }) => has(key));
  if (!kinds.length) return [nothing("No learning curves yet.")];

  const drawn = chart((width) => {
    const { key, label, write } = kind.value;
    const shown = list(place.value.series).filter((one) => names.shown(text(one.name)))
      .map((one) => ({ name: text(one.name), points: pointsOf(one.steps, one[key]) }));
    const last = extent(along(shown, 0))[1];
    const series = shown.map(({ name, points }) =>
      ({ name, points: points.filter((point) => point[0] >= part.value.from * last) }));
    const ys = along(series, 1);
    const plot = frame(width, {
      label: `learning curves, ${label}`,
      x: { title: "step", values: along(series, 0) },
      y: { title: label, values: ys, log: key === "loss" && wide(ys) },
    });
    const longest = series.reduce((n, { points }) => Math.max(n, points.length), 1);
    lines(plot, series, Math.ceil(longest / 8));
    hoverLines(plot.svg, plot, series, (step) => `step ${step.toLocaleString("en")}`, write);
    return plot.svg;
  });
  const names = legend(drawn.redraw);
  const refresh = () => names.update(list(place.value.series).flatMap((one) =>
    [null, ...list(one.val)].map((value) => [text(one.name), value])));
  const place = choice("target", refresh).set(all.map((entry) =>
    ({ label: `${text(entry.dataset)} / ${text(entry.label ?? entry.target)}`, series: entry.series })));
  const kind = choice("show", drawn.redraw).set(kinds);
  const part = choice("steps", drawn.redraw).set(
    [{ label: "all", from: -Infinity }, { label: "second half", from: 0.5 }]);
  refresh();
  const caption = "Means over trials of the selected runs. Hover for values; click a name to show " +
    "or hide its line.";
  return [figure(caption, [place, kind, part], names, drawn)];
}

function bars() {
  const all = list(data.tables).filter((result) => list(result.rows).length);
  if (!all.length) return [nothing("No results per domain yet.")];
  const targets = ({ columns, labels }) =>
    list(columns).map((name, at) => ({ name, label: text(list(labels)[at] ?? name) }));
  const valuesOf = (result) => targets(result).flatMap(({ name, label }) =>
    list(result.rows).map((row) =>
      ({ ...(row.cells ?? {})[name], name: rowName(row), target: label })));

  const drawn = chart((width) => {
    const { zero } = axis.value, categories = targets(dataset.value).map(({ label }) => label);
    const values = valuesOf(dataset.value).filter((v) => finite(v.mean) && names.shown(v.name));
    const plot = frame(width, {
      label: "accuracy per target domain",
      x: { title: "target", values: [], categories: distinct(categories) },
      y: { title: ACCURACY, zero, values: values.flatMap((value) => reach(value, value.mean)) },
    });
    const shown = distinct(values.map(({ name }) => name)), points = [];
    const room = Math.min(28, (0.84 * plot.step) / Math.max(1, shown.length));
    const half = Math.max(0.5, room / 2 - 1), size = Math.min(4.5, Math.max(2, room / 2));
    shown.forEach((name, i) => {
      const shift = room * (i + 0.5 - shown.length / 2);
      const own = values.filter((value) => value.name === name).map((value) => ({
        x: plot.x(value.target) + shift, y: plot.y(value.mean), value, title: value.target,
        entries: [{ name, value: withError(value.mean, value.err, value.n) }],
      }));
      const bar = ({ x, y }) => `M${x - half} ${plot.y(0)}V${y}h${2 * half}V${plot.y(0)}`;
      points.push(...own);
      plot.svg.append(group(name,
        zero ? s("path", { class: "bar", d: own.map(bar).join("") }) : null,
        whiskers(own.map(({ x, value }) => [x, ...reach(value, value.mean).map(plot.y)])),
        s("path", {
          class: `marks${look(name).hollow}`,
          d: own.map(({ x, y }) => outline(look(name).marker, x, y, size)).join(""),
        })));
    });
    hoverPoints(plot.svg, points);
    return plot.svg;
  });
  const names = legend(drawn.redraw);
  const refresh = () =>
    names.update(valuesOf(dataset.value).map((value) => [value.name, value.mean]));
  const dataset = choice("dataset", refresh).set(
    all.map((result) => ({ ...result, label: text(result.dataset) })));
  const axis = choice("axis", drawn.redraw).set(
    [{ label: "bars from zero", zero: true }, { label: "points, enlarged", zero: false }]);
  refresh();
  const caption = "Mean over trials for each target; whiskers: standard error over trials.";
  return [figure(caption, [dataset, axis], names, drawn)];
}

function sensitivity() {
  const all = list(data.sensitivity).flatMap((entry) => list(entry.points).map((point) => ({
    ...point, target: point.label ?? point.target, name: text(entry.name), dataset: text(entry.dataset), hparams: point.hparams ?? {},
  })));
  if (!all.length) return [nothing("No hyperparameter draws yet.")];

  const drawn = chart((width) => {
    const { key, categories } = parameter.value ?? {}, { of, label } = measure.value;
    const read = ({ hparams }) => (categories ? text(hparams[key]) : hparams[key]);
    const shown = target.value.items.filter((point) =>
      names.shown(point.name) && finite(of(point)) && key in point.hparams &&
      (categories || finite(read(point))));
    const xs = categories ? [] : shown.map(read);
    const plot = frame(width, {
      label: `accuracy against ${key}`,
      x: { title: text(key), values: xs, log: wide(xs), categories },
      y: { title: label, values: shown.map(of) },
    });
    // Side by side, so that points do not overlap.
    const shift = (i) => (categories ? (((i % 9) - 4) * plot.step) / 20 : 0);
    const points = shown.map((point, i) => ({
      name: point.name, x: plot.x(read(point)) + shift(i), y: plot.y(of(point)),
      title: `${point.name}, ${text(point.target)}`,
      entries: [
        { name: ACCURACY, value: fixed(point.accuracy) },
        { name: VALIDATION, value: fixed(point.validation) },
        { name: text(point.choice), value: `trial ${text(point.trial)}` },
        ...Object.entries(point.hparams).slice(0, 14).map(([name, value]) =>
          ({ name, value: clip(text(value), 140), near: name === key })),
      ],
    }));
    for (const { label: name, items } of grouped(points, "name")) {
      const { marker, hollow } = look(name);
      plot.svg.append(group(name, s("path", {
        class: `cloud${hollow}`, d: items.map(({ x, y }) => outline(marker, x, y, 3.5)).join(""),
      })));
    }
    hoverPoints(plot.svg, points);
    return plot.svg;
  });
  const names = legend(drawn.redraw);
  const refresh = () => {
    const points = dataset.value.items;
    target.set([{ label: "all", items: points }, ...grouped(points, "target")]);
    const options = distinct(points.flatMap(({ hparams }) => Object.keys(hparams))).map((key) => {
      const values = points.map(({ hparams }) => hparams[key]).filter((v) => v !== undefined);
      const written = distinct(values.map(text)).sort();
      const numbers = values.every((value) => value === null || typeof value === "number");
      return { label: key, key, categories: numbers ? null : written, varies: written.length > 1 };
    });
    // The learning rate comes first because it matters most.
    const varied = options.filter(({ varies }) => varies)
      .sort((a, b) => (b.key === "lr") - (a.key === "lr"));
    parameter.set(varied.length ? varied : options);
    names.update(points.map(({ name, validation }) => [name, validation]));
  };
  const dataset = choice("dataset", refresh).set(grouped(all, "dataset"));
  const parameter = choice("against", drawn.redraw), target = choice("target", drawn.redraw);
  const measure = choice("show", drawn.redraw).set([
    { label: ACCURACY, of: (point) => point.accuracy },
    { label: VALIDATION, of: (point) => point.validation },
  ]);
  refresh();
  const thinned = list(data.sensitivity).filter(({ every }) => every > 1).map(({ name, every }) =>
    ` Of ${text(name)}, one run in ${every} is drawn.`);
  const caption = "One mark per run of the search. Hover for its hyperparameters." +
    distinct(thinned).join("");
  return [figure(caption, [dataset, parameter, target, measure], names, drawn)];
}

function flatness() {
  const all = list(data.flatness).map((row) => ({ ...row, on: text(row.measured ?? "train") }));
  if (!all.length) return null;

  const drawn = chart((width) => {
    const series = on.value.items.filter((row) => names.shown(text(row.name))).map((row) => {
      const values = list(row.spectrum).filter(finite).sort((a, b) => b - a);
      return { name: text(row.name), points: pointsOf(values.map((_, i) => i + 1), values) };
    });
    const ys = along(series, 1);
    const plot = frame(width, {
      label: "spectrum of the Hessian",
      x: { title: "rank", whole: true, values: along(series, 0) },
      y: { title: "eigenvalue", values: ys, log: wide(ys) },
    });
    lines(plot, series, 1);
    hoverLines(plot.svg, plot, series, (rank) => `eigenvalue ${rank}`, short);
    return plot.svg;
  });
  const names = legend(drawn.redraw), host = h("div");
  const refresh = () => {
    const { items } = on.value;
    host.replaceChildren(...flatnessTable(items));
    names.update(items.map((row) => [text(row.name), -row.lambda_max]));
  };
  // Measurements on the training domains come first.
  const first = ({ label }) => (label === "train" ? 0 : 1);
  const on = choice("measured on", refresh).set(
    grouped(all, "on").sort((a, b) => first(a) - first(b)));
  refresh();
  const caption = "Eigenvalues of the Hessian, largest first; one line per run.";
  const spectra = all.some((row) => list(row.spectrum).some(finite));
  return [
    nothing("Curvature of the loss at the trained weights; smaller is flatter." +
      (all.some((row) => finite(row.trace_err))
        ? ` ${PLUS_MINUS} is the standard error of the trace estimate.` : "")),
    // Without spectra the menu still switches tables.
    spectra ? figure(caption, [on], names, drawn) : h("div", { class: "controls" }, on.element),
    host,
  ];
}

function flatnessTable(rows) {
  const alike = (of) => distinct(rows.map((row) => JSON.stringify(of(row) ?? null))).length === 1;
  // Values from different images, domains, weights or radii do not compete.
  const comparable = alike((row) => row.conditions);
  const near = comparable && alike((row) => [row.rho, row.alpha]);
  const contest = (key) => (["zeroth", "first", "fad"].includes(key) ? near : comparable);
  const needed = {
    measured: rows.some((row) => row.on !== "train"), dataset: !alike((row) => row.dataset),
  };
  const columns = declared("flatness", rows).filter(({ key }) => needed[key] ?? true)
    .map((column) => ({ ...column, best: contest(column.key) ? column.best : null }));
  const trace = columns.find(({ key }) => key === "trace");
  if (trace) {
    trace.show = (row) => [short(row.trace), finite(row.trace) && finite(row.trace_err)
      ? h("span", { class: "err" }, ` ${PLUS_MINUS} ${short(row.trace_err, 2)}`) : ""];
  }
  return [
    ...(comparable ? [] : [nothing("Measured under different conditions (images, domains, " +
      "precision): compare with care.")]),
    table({ label: "flatness", columns, rows }),
  ];
}
