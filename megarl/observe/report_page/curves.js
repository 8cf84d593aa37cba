// The curves: an overview, then every metric by group.
const GROUPS = ["reward", "eval", "rollout", "sampling", "actor", "kl", "critic", "sft", "correction", "router", "weights", "perf",
  "time", "memory"];
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
  ["Seconds per step", ["time/step_s"]],
];
const LAYER = /^(.*)\/layer_0*(\d+)$/;

function linesOf(metrics, spread) {
  const found = [];
  RUNS.forEach((run, r) => metrics.forEach((metric, m) => {
    const single = metrics.length === 1, label = [single && RUNS.length > 1 ? "" : metric, RUNS.length > 1 ? run.name : ""];
    const colour = single ? css(r ? "b" : "a") : css(`c${m % 8}`);
    found.push({ label: label.filter(Boolean).join(" · "), run, metric, spread: r ? undefined : spread, colour, dashed: r > 0 });
  }));
  return found.filter((line) => line.run.metrics[line.metric]);
}

function layerLines(metrics) {
  const depth = (i) => `color-mix(in oklab, var(--c1) ${Math.round((100 * i) / Math.max(1, metrics.length - 1))}%, var(--c0))`;
  const lines = metrics.map((metric, i) => ({ label: `layer ${LAYER.exec(metric)[2]}`, run: DATA.run, metric, colour: depth(i) }));
  return lines.filter((line) => DATA.run.metrics[line.metric]);
}

const NAMES = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].sort();

function groupsOfMetrics() {
  const groups = new Map(GROUPS.map((name) => [name, []])), layers = new Map();
  for (const name of NAMES) {
    const [group] = name.split("/"), layer = LAYER.exec(name);
    if (layer) {
      if (!layers.has(layer[1])) layers.set(layer[1], []);
      layers.get(layer[1]).push(name);
      continue;
    }
    const key = name.includes("/") ? group : "other";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push([name, linesOf([name])]);
  }
  for (const [name, metrics] of layers) {
    const lines = layerLines(metrics), group = name.split("/")[0];
    if (lines.length) (groups.get(group) ?? groups.set(group, []).get(group)).push([`${name} by layer`, lines]);
  }
  return [...groups].filter(([, charts]) => charts.length);
}

// Metrics that have one value in all steps need no picture.
function showConstants(charts) {
  const node = el("div", { class: "constants" }, ...(charts.length ? ["always:"] : []));
  for (const [title, lines] of charts) {
    const item = showText(el("span", { class: "constant" }), `${title} `);
    item.append(el("b", { text: short(lines[0].run.metrics[lines[0].metric].last, title) }));
    node.append(item);
  }
  return node;
}

function showGroup(name, charts, height) {
  const grid = el("div", { class: "charts" });
  const node = el("details", { class: `group ${name === "overview" ? "overview" : ""}` }, el("summary", {}), grid);
  const count = showText(el("span", { class: "faint" }), charts.length === 1 ? "1 curve" : `${charts.length} curves`);
  showText(node.firstElementChild, TITLES[name] ?? name[0].toUpperCase() + name.slice(1)).append(count);
  node.open = OPEN.has(name);
  node.isOpen = node.open;
  const same = (one, other) => one.min === one.max && one.min === other.max && !one.lost;
  const isConstant = ([, lines]) => name !== "overview" && lines.every((line) => same(line.run.metrics[line.metric], lines[0].run.metrics[lines[0].metric]));
  for (const [title, lines] of charts.filter((chart) => !isConstant(chart))) grid.append(watch(new Chart(title, lines, height)));
  node.append(showConstants(charts.filter(isConstant)));
  byId("groups").append(node);
}

function searchMetrics() {
  const words = byId("metric-search").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const fits = (text) => !words.length || words.some((word) => text.toLowerCase().includes(word));
  for (const group of document.querySelectorAll(".group")) {
    let count = 0;
    for (const node of group.querySelectorAll(".chart")) {
      node.hidden = !fits([node.chart.title, ...node.chart.lines.map((line) => line.metric)].join(" "));
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
  for (const [name, charts] of groupsOfMetrics()) showGroup(name, charts, 120);
  if (DATA.other) RUNS.forEach((run, r) => byId("runs").append(showText(el("span", {}, swatch(css(r ? "b" : "a"), r > 0)), run.name)));
  showMetricTable();
  byId("metric-search").addEventListener("input", searchMetrics);
  const smoothing = byId("smoothing"), label = () => { byId("smoothing-value").textContent = Number(smoothing.value).toFixed(2); };
  smoothing.addEventListener("input", () => { VIEW.smoothing = Number(smoothing.value); label(); redraw(); });
  byId("log-scale").addEventListener("change", (event) => { VIEW.log = event.target.checked; redraw(); });
  byId("reset-zoom").addEventListener("click", () => zoom(-Infinity, Infinity));
  byId("open-all").addEventListener("click", () => {
    for (const group of document.querySelectorAll(".group")) group.open = group.isOpen = true;
  });
  for (const group of document.querySelectorAll(".group")) {
    group.firstElementChild.addEventListener("click", () => { group.isOpen = !group.open; });
  }
  label();
  addEventListener("resize", redraw);
  addEventListener("beforeprint", () => { for (const chart of CHARTS) if (chart.node.offsetParent) { chart.seen = true; chart.draw(); } });
}
showCurves();
