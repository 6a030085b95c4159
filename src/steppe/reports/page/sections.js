// The sections of the page.

function answer() {
  const [lead, ...more] = list(data.answer).map(text);
  if (!lead) return null;
  return [h("p", { class: "lead" }, lead), ...more.map((sentence) => h("p", {}, sentence))];
}

function results() {
  if (nothingDone) {
    return [h("p", { class: "note" },
      "No finished runs yet. Rerun the report when the first runs are done.")];
  }
  const parts = list(data.tables).flatMap((result) =>
    [h("h3", {}, text(result.dataset)), resultTable(result, text(result.dataset))]);
  const sets = list(data.target_sets).flatMap((result) =>
    [h("h3", {}, text(result.dataset)), resultTable(result, text(result.dataset))]);
  return [
    nothing(`Target accuracy in %, mean ${PLUS_MINUS} standard error over trials. ` +
      `The best of each column is bold. ${DASH}: missing. *: mean over some targets only.`),
    ...(data.across ? [h("h3", {}, "All datasets"), resultTable(data.across, "all datasets")] : []),
    ...parts,
    ...sets,
    ...list(data.matrices).flatMap((matrix) => {
      const title = matrix.dataset === "all" ? "all datasets" : text(matrix.dataset);
      const label = `Optimizers by algorithm: ${title}`;
      return [h("h3", {}, label), matrixTable(matrix, label)];
    }),
  ];
}

// A table with a chart in it. All intervals share one axis, drawn in the last line.
function comparisons() {
  const rows = list(data.comparisons).filter((row) => finite(row.difference));
  if (!rows.length) return [nothing("No two methods share enough finished runs to be compared.")];
  const width = 140;
  // The interval that decides: over seeds if there are enough of them.
  const decides = (row) => (row.decided_over === "trials" && finite(row.seeds_low)
    ? [row.seeds_low, row.seeds_high] : [row.low, row.high]);
  const ends = rows.flatMap((row) => [...decides(row), row.difference]);
  const axis = scale(ends.filter(finite), 8, width - 8, { zero: true, apart: 35 });
  const drawn = (row) => {
    const known = decides(row).every(finite), clear = row.verdict === "significant";
    const [low, high, middle] = [...decides(row), row.difference].map(axis.at);
    return s("svg", { width, height: 36, class: clear ? "clear" : "unclear", "aria-hidden": "true" },
      s("path", { class: "zero", d: `M${axis.at(0)} -60V96` }),
      known ? s("path", { class: "stroke", d: `M${low} 18H${high}m0 -5v10M${low} 13v10` }) : null,
      s("path", { class: clear ? "marks" : "hollow", d: outline(MARKERS[3], middle, 18, 5) }));
  };
  const range = (low, high) =>
    ([low, high].every(finite) ? `${signed(low)} to ${signed(high)}` : DASH);
  const title = (row) => `${text(row.a)} ${MINUS} ${text(row.b)}`;
  const levels = distinct(rows.map((row) => row.level).filter(finite));
  const interval = levels.length === 1 ? `${short(levels[0] * 100)}% CI` : "interval";
  const over = ({ decided_over, seeds, what }) => (decided_over === "trials"
    ? plural(seeds ?? 0, "seed") : text(what).replace(/.* over /, ""));
  const columns = [
    {
      title: "comparison", get: title,
      show: (row) => [h("span", { class: "name", title: title(row) }, title(row))],
    },
    {
      title: "difference", get: ({ difference }) => difference, kind: "plot",
      show: (row) => [drawn(row)],
    },
    { title: "points", get: ({ difference }) => difference, print: signed },
    {
      title: interval, label: `${interval}, and its units`, get: (row) => decides(row)[0],
      show: (row) => [decides(row).every(finite)
        ? `${range(...decides(row))}, ${over(row)}` : DASH],
    },
    { title: "p (Holm)", get: (row) => row.p_adjusted, print: certainty },
    { title: "result", get: (row) => row.verdict, kind: "text" },
  ];
  // Beside an interval over seeds. Where targets decide, theirs is already there.
  if (rows.some((row) => row.decided_over === "trials" && finite(row.targets_low))) {
    columns.push({
      title: "CI, targets", label: `${interval} over targets`, get: (row) => row.targets_low,
      show: (row) => [range(row.targets_low, row.targets_high)],
    });
  }
  const ticks = axis.ticks.map(({ at, label }) => s("text", { x: at, y: 14 }, label));
  const foot = h("tfoot", {}, h("tr", {}, h("td"), h("td", { class: "plot" },
    s("svg", { width, height: 22, "aria-hidden": "true", "text-anchor": "middle" }, ...ticks)),
  h("td", { colspan: columns.length - 2 })));
  return [
    nothing("Paired differences in percentage points. Filled markers are significant after Holm's " +
      "correction; hollow ones are not."),
    table({ label: "comparisons", columns, rows, foot }),
    data.multiplicity ? nothing(text(data.multiplicity.note)) : null,
  ];
}

const SELECTIONS = {
  "train-val": "training-domain validation: the step and hyperparameters with the best " +
    "accuracy on validation images of the source domains",
  "pooled-val": "training-domain validation with all images in one pool: the step and " +
    "hyperparameters with the best accuracy on validation images of the source domains",
  "leave-one-out": "leave-one-domain-out validation: the step and hyperparameters with the best " +
    "mean accuracy on left-out source domains",
  oracle: "oracle: hyperparameters selected at the last step with images of the target, which " +
    "are not available in practice",
};

function provenance() {
  const problems = list(data.problems);
  const facts = [
    ["selection", Object.hasOwn(SELECTIONS, data.selection ?? "")
      ? SELECTIONS[data.selection] : text(data.selection)],
    ...(data.protocol ? [["protocol", text(data.protocol.name)]] : []),
    ["made", text(data.made)],
    ...Object.entries(data.versions ?? {}).map(([name, version]) => [name, text(version)]),
  ];
  return [
    nothing("The command that made this page:"),
    h("pre", { tabindex: "0" }, h("code", {}, text(data.command))),
    h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("h3", {}, `Problems (${problems.length.toLocaleString("en")})`),
    problems.length
      ? h("ul", { class: "problems", tabindex: "0", "aria-label": "problems" },
        ...problems.map((problem) => h("li", {}, text(problem))))
      : nothing("None."),
  ];
}

const SECTIONS = [ // id, heading, function, data
  ["answer", "Answer", answer, null],
  ["comparisons", "Comparisons", comparisons, data.comparisons],
  ["results", "Results", results, null],
  ["figures", "Figures", drawings, null],
  ["cost", "Accuracy against cost", cost, data.cost],
  ["curves", "Learning curves", curves, data.curves],
  ["domains", "Per domain", bars, data.tables],
  ["sensitivity", "Hyperparameter sensitivity", sensitivity, data.sensitivity],
  ["flatness", "Flatness", flatness, data.flatness],
  ["provenance", "Provenance", provenance, null],
];
const rows = list(data.tables).flatMap((result) => list(result.rows));
const nothingDone = !rows.length && !data.across;

function about() {
  const runs = rows.reduce((sum, row) => sum + (finite(row.runs) ? row.runs : 0), 0);
  const made = text(data.made).replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*Z$/, "$1 $2 UTC");
  return [
    plural(list(data.tables).length, "dataset"),
    plural(distinct(rows.map(rowName)).length, "method"),
    plural(runs, "run"), `selection: ${text(data.selection)}`, `made ${made}`,
  ].join(" \u00b7 ");
}

function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = dark() ? "light" : "dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  button.hidden = false;
  name();
}

for (const row of rows) look(rowName(row)); // colors in table order
document.getElementById("about").textContent = about();
themeButton();
for (const [id, title, make, source] of SECTIONS) {
  if (nothingDone && source !== null && !list(source).length) continue; // one note is enough
  const nodes = make();
  if (nodes === null) continue;
  document.getElementById("report").append(
    h("section", { id }, h("h2", {}, title), ...nodes.filter((node) => node !== null)));
  document.getElementById("contents").append(h("a", { href: `#${id}` }, title));
}
for (const { redraw } of charts) redraw();
for (const tell of scrollers) tell();
addEventListener("resize", () => {
  for (const { fit } of charts) fit();
  for (const tell of scrollers) tell();
});
