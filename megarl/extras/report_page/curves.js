// The curves: an overview, then every metric by group.
const GROUPS = ["reward", "eval", "rollout", "sampling", "actor", "kl", "critic", "sft", "correction", "router", "weights",
  "perf", "time", "memory"];
const TITLES = { kl: "KL", sft: "SFT", eval: "Evaluation", perf: "Speed" };
const OPEN = new Set(["overview", "reward", "eval", "rollout", "actor", "kl", "critic", "sft"]);
const OVERVIEW = [
  ["Reward (mean ± standard deviation)", ["reward/mean"], "reward/std"],
  ["Held-out accuracy", ["eval/accuracy"]],
  ["KL to reference", ["kl/reference"]],
  ["Response length, tokens", ["rollout/response_length_mean"]],
  ["Losses", ["actor/loss", "critic/loss", "sft/loss", "reward/loss", "eval/loss"]],
  ["Entropy, nats per token", ["rollout/entropy"]],
  ["Log-prob gap |rollout − recomputed|", ["rollout/logprob_gap_max", "rollout/logprob_gap_mean"]],
  ["Staleness of trained tokens, updates", ["rollout/staleness", "rollout/staleness_max"]],
  ["Seconds per step", ["time/step_s"]],
];
// A metric of each layer, or of each staleness.
const FAMILY = /^(.*\/staleness_share|.*\/kl_k3_age|.*(?=\/layer))(?:\/(layer))?_0*(\d+)$/;

const metricOf = (line) => line.run.metrics[line.metric];

function linesOf(metrics, spread) {
  const found = [];
  RUNS.forEach((run, r) => metrics.forEach((metric, m) => {
    const isOnly = metrics.length === 1, colour = isOnly ? css(r ? "b" : "a") : css(`c${m % 8}`);
    const label = !DATA.other ? metric : isOnly ? run.name : `${metric} · ${run.name}`;
    found.push({ label, run, metric, spread: r ? undefined : spread, colour, dashed: r > 0 });
  }));
  return found.filter(metricOf);
}

// The metrics of a family of this run in one picture, coloured by their number.
function familyLines(metrics) {
  return metrics.map((metric, i) => {
    const depth = Math.round((100 * i) / Math.max(1, metrics.length - 1));
    const colour = `color-mix(in oklab, var(--c1) ${depth}%, var(--c0))`;
    const [, , kind, number] = FAMILY.exec(metric);
    return { label: `${kind ?? "staleness"} ${number}`, run: DATA.run, metric, colour };
  }).filter(metricOf);
}

const NAMES = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].sort();

// [[group, [[title, lines]]]]: a chart for each metric, one for a family.
function groupsOfMetrics() {
  const groups = new Map(GROUPS.map((name) => [name, []])), families = new Map();
  const add = (map, key, item) => { map.set(key, [...(map.get(key) ?? []), item]); };
  const groupOf = (name) => (name.includes("/") ? name.split("/")[0] : "other");
  for (const name of NAMES) {
    const family = FAMILY.exec(name);
    if (family) add(families, `${family[1]} by ${family[2] ?? "staleness"}`, name);
    else add(groups, groupOf(name), [name, linesOf([name])]);
  }
  for (const [name, metrics] of families) {
    const lines = familyLines(metrics);
    if (lines.length) add(groups, groupOf(name), [name, lines]);
  }
  return [...groups].filter(([, charts]) => charts.length);
}

function isConstant([, lines]) {
  const { min } = metricOf(lines[0]);
  return lines.map(metricOf).every((metric) => metric.min === min && metric.max === min && !metric.lost);
}

// Metrics that have one value in all steps need no picture.
function constants(charts) {
  const node = el("div", { class: "constants" }, ...(charts.length ? ["always:"] : []));
  for (const [title, lines] of charts) {
    const value = el("b", { text: short(metricOf(lines[0]).last, title) });
    node.append(el("span", { class: "constant" }, showText(el("span"), `${title} `), value));
  }
  return node;
}

function showGroup(name, charts, height) {
  const title = TITLES[name] ?? name[0].toUpperCase() + name.slice(1), isOverview = name === "overview";
  const fixed = isOverview ? [] : charts.filter(isConstant);
  const count = el("span", { class: "faint", text: charts.length === 1 ? "1 curve" : `${charts.length} curves` });
  const drawn = charts.filter((chart) => !fixed.includes(chart)).map(([of, lines]) => watch(new Chart(of, lines, height)));
  const node = el("details", { class: isOverview ? "group overview" : "group" },
    showText(el("summary"), title), el("div", { class: "charts" }, ...drawn), constants(fixed));
  node.firstElementChild.append(count);
  node.open = node.isOpen = OPEN.has(name);
  node.firstElementChild.addEventListener("click", () => { node.isOpen = !node.open; });
  byId("groups").append(node);
}

function searchMetrics() {
  const words = byId("metric-search").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const fits = (text) => !words.length || words.some((word) => text.toLowerCase().includes(word));
  for (const group of document.querySelectorAll(".group")) {
    let count = 0;
    for (const node of group.querySelectorAll(".chart")) {
      const { title, lines } = node.chart;
      node.hidden = !fits([title, ...lines.map((line) => line.metric)].join(" "));
      count += !node.hidden;
    }
    for (const item of group.querySelectorAll(".constant")) {
      item.hidden = !fits(item.textContent);
      count += !item.hidden;
    }
    group.hidden = !count;
    group.open = words.length ? true : group.isOpen;
  }
  for (const row of document.querySelectorAll("#metric-table tbody tr")) row.hidden = !fits(row.firstElementChild.textContent);
}

function showMetricTable() {
  const heads = ["first", "last", "best", "smallest", "largest", ...(DATA.other ? [`last of ${DATA.other.name}`, "difference"] : [])];
  const head = el("tr", {}, el("th", { text: "metric" }));
  heads.forEach((text) => head.append(showText(el("th", { class: "number" }), text)));
  const body = el("tbody");
  for (const name of NAMES) {
    const own = DATA.run.metrics[name], other = DATA.other?.metrics[name], row = el("tr", {}, showText(el("td", { class: "name" }), name));
    const value = (metric, key) => (metric ? short(metric[key], name) : "");
    const best = own?.best ? `${short(own.best[1], name)} (step ${own.best[0]})` : "";
    const cells = [value(own, "first"), value(own, "last"), best, value(own, "min"), value(own, "max")];
    if (DATA.other) {
      const both = own && other && own.last !== null && other.last !== null;
      cells.push(value(other, "last"), both ? short(own.last - other.last, name) : "");
    }
    cells.forEach((text) => row.append(el("td", { class: "number", text })));
    if (own?.lost) row.lastElementChild.append(el("span", { class: "no", text: ` ${own.lost} not finite` }));
    body.append(row);
  }
  byId("metric-table").lastElementChild.append(el("table", {}, el("thead", {}, head), body));
}

function showCurves() {
  const overview = OVERVIEW.map(([title, metrics, spread]) => [title, linesOf(metrics, spread)]);
  showGroup("overview", overview.filter(([, lines]) => lines.length), 180);
  for (const [name, charts] of groupsOfMetrics()) showGroup(name, charts, 130);
  const runKey = (run, r) => showText(el("span", {}, swatch(css(r ? "b" : "a"), r > 0)), run.name);
  if (DATA.other) byId("runs").append(...RUNS.map(runKey));
  showMetricTable();
  const smoothing = byId("smoothing"), smooth = () => {
    VIEW.smoothing = Number(smoothing.value);
    byId("smoothing-value").textContent = VIEW.smoothing.toFixed(2);
    redraw();
  };
  smooth();
  smoothing.addEventListener("input", smooth);
  byId("metric-search").addEventListener("input", searchMetrics);
  byId("log-scale").addEventListener("change", (event) => { VIEW.log = event.target.checked; redraw(); });
  byId("reset-zoom").addEventListener("click", () => zoom(-Infinity, Infinity));
  byId("open-all").addEventListener("click", () => {
    for (const group of document.querySelectorAll(".group")) group.open = group.isOpen = true;
  });
  // A canvas keeps its size and its colours.
  for (const name of ["resize", "afterprint"]) addEventListener(name, redraw);
  byId("theme").addEventListener("click", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    for (const chart of CHARTS) if (chart.node.offsetParent) chart.draw(PRINTED_WIDTH);
  });
}
showCurves();
