// One chart: lines over steps, drawn by uPlot when it comes into view. All charts share steps, smoothing and cursor.
const VIEW = { from: -Infinity, to: Infinity, smoothing: 0, log: false };
const RUNS = DATA.other ? [DATA.run, DATA.other] : [DATA.run];
const ENDS = { first: Math.min(...RUNS.map((run) => run.first)), last: Math.max(...RUNS.map((run) => run.last)) };
const CHARTS = new Set();
const WHOLE_STEPS = range(9).flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));
const PRINTED_WIDTH = 330; // pixels: two charts beside each other on a page

// The steps of a curve's points; a point that stands for several steps is drawn in their middle.
for (const run of RUNS) {
  for (const grid of run.grids) grid.steps = grid.from.map((from, i) => (from + grid.to[i]) / 2);
}

// Exponential moving average without the bias of its start; null where the value is.
function smoothed(values, factor) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

// A colour of the style sheet as a canvas takes it, in the theme of now.
function concrete(colour, percent = 100) {
  const probe = document.body.appendChild(el("i"));
  probe.style.color = `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Ends of the vertical axis, which starts at zero if that costs little room.
function withRoom(low, high) {
  if (low >= 0 && low < 0.5 * high) low = 0;
  const room = 0.06 * (high - low) || Math.abs(low) / 2 || 0.5;
  return [low === 0 ? 0 : low - room, high + room];
}

class Chart {
  // lines: [{label, run, metric, colour, dashed, spread}]; spread: name of the metric that is the deviation from it.
  constructor(title, lines, height) {
    Object.assign(this, { title, lines, height, seen: false, plot: null });
    for (const line of lines) {
      line.data = line.run.metrics[line.metric];
      line.grid = line.run.grids[line.data.grid];
    }
    this.picture = el("div", { class: "picture", role: "img" });
    this.picture.style.height = `${height}px`;
    this.picture.addEventListener("pointerleave", hideTip);
    this.node = el("figure", { class: "chart" }, this.caption(), ...this.keys(), this.picture);
  }

  hasOneMetric() { return this.lines.every((line) => line.metric === this.lines[0].metric); }

  caption() {
    const large = el("button", { type: "button", title: "Large", text: "⤢" });
    large.addEventListener("click", () => showLarge(this));
    const values = this.hasOneMetric() ? this.lines.map((line) => short(line.data.last, line.metric)) : [];
    const name = showText(el("b", { title: this.title }), this.title);
    return el("figcaption", {}, name, el("span", { text: values.join(" | ") }), large);
  }

  keys() {
    if (this.hasOneMetric()) return [];
    const shown = this.lines.length > 8 ? [this.lines[0], this.lines.at(-1)] : this.lines;
    const key = (line) => showText(el("span", {}, swatch(line.colour, line.dashed)), line.label);
    return [el("div", { class: "keys" }, ...shown.map(key))];
  }

  isLog() { return VIEW.log && this.lines.every((line) => line.data.max > 0); }

  isDrawn(value) { return value !== null && value !== undefined && !(this.isLog() && value <= 0); }

  // Smallest and largest value in view; the wrong way round if there is none.
  limits() {
    let low = Infinity, high = -Infinity;
    for (const { data, grid } of this.lines) {
      for (const i of range(data.y.length)) {
        if (grid.to[i] < VIEW.from || grid.from[i] > VIEW.to) continue;
        const values = [data.y[i], data.low?.[i], data.high?.[i]].filter((value) => this.isDrawn(value));
        low = Math.min(low, ...values);
        high = Math.max(high, ...values);
      }
    }
    return [low, high];
  }

  draw(width = this.picture.clientWidth) {
    const [low, high] = this.limits(), { first, last } = this.lines[0].data;
    this.clear();
    const ends = [first, last].map((value) => short(value, this.title));
    this.picture.setAttribute("aria-label", `${this.title}: from ${ends[0]} to ${ends[1]}`);
    if (low > high) return this.picture.append("no finite value in these steps");
    if (low === high && this.lines.length > 1) return this.picture.append(`exactly ${plain(low)} at every step`);
    const from = Math.max(VIEW.from, ENDS.first), to = Math.min(VIEW.to, ENDS.last), alone = from === to ? 0.5 : 0;
    const y = this.isLog() ? uPlot.rangeLog(low, high, 10, false) : withRoom(low, high);
    const { data, series, bands } = this.content();
    const scales = {
      x: { time: false, range: () => [from - alone, to + alone] },
      y: { distr: this.isLog() ? 3 : 1, range: () => y },
    };
    this.plot = new uPlot({
      width, height: this.height, scales, series, bands, axes: this.axes(), legend: { show: false }, cursor: this.cursor(),
      hooks: { setSelect: [(plot) => this.zoomTo(plot.select)] },
    }, data, this.picture);
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
    this.picture.replaceChildren();
  }

  // uPlot's columns: of each line its band, its own values if it is smoothed, and the line; the first line comes last,
  // above the others. Tables of different steps are joined.
  content() {
    const tables = [], series = [{}], bands = [];
    this.columns = new Map(); // line -> its column
    for (const line of [...this.lines].reverse()) {
      const table = [line.grid.steps], { low, high } = this.band(line);
      const add = (values, style) => {
        table.push(values.map((value) => (this.isDrawn(value) ? value : null)));
        return series.push({ points: { show: false }, ...style }) - 1;
      };
      if (low) bands.push({ series: [add(high, {}), add(low, {})], fill: concrete(line.colour, 16) });
      if (VIEW.smoothing) add(line.data.y, { stroke: concrete(line.colour, 30), width: 1 });
      const style = { stroke: concrete(line.colour), width: 1.6, dash: line.dashed ? [5, 3] : [] };
      if (!VIEW.smoothing) style.points = { size: 5, fill: style.stroke };
      this.columns.set(line, add(VIEW.smoothing ? smoothed(line.data.y, VIEW.smoothing) : line.data.y, style));
      tables.push(table);
    }
    return { data: uPlot.join(tables), series, bands };
  }

  // Smallest to largest value of the steps that a point stands for, or mean ± standard deviation.
  band(line) {
    const spread = line.run.metrics[line.spread];
    if (spread?.grid !== line.data.grid) return line.data;
    const edge = (sign) => line.data.y.map((mean, i) => {
      return mean === null || spread.y[i] === null ? null : mean + sign * spread.y[i];
    });
    return { low: edge(-1), high: edge(1) };
  }

  axes() {
    const text = { stroke: concrete(css("faint")), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const linear = this.title.endsWith("_bytes") ? byteTicks : tickTexts;
    const logarithmic = (values) => values.map((value) => (value === null ? "" : plain(value)));
    const label = this.isLog() ? logarithmic : linear;
    const width = (texts) => 14 + 6.5 * Math.max(...texts.map((one) => one.length)); // of 11 pixels' letters
    return [
      { ...text, size: 22, gap: 4, space: Math.max(60, width([ENDS.last.toLocaleString("en-US")])), incrs: WHOLE_STEPS, grid: { show: false },
        values: (plot, steps) => steps.map((step) => step.toLocaleString("en-US")) },
      { ...text, size: (plot, texts) => Math.max(64, width(texts ?? [""])), gap: 6, space: 25, grid: { stroke: concrete(css("grid")), width: 1 },
        values: (plot, values) => label(values) },
    ];
  }

  cursor() {
    const isLine = (plot, column) => [...this.columns.values()].includes(column);
    return {
      y: false, drag: { x: true, y: false, setScale: false, dist: 5 },
      points: { size: (plot, column) => (isLine(plot, column) ? 7 : 0) },
      sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: {
        mousemove: (plot, target, move) => (event) => { move(event); this.read(event.clientX, event.clientY); },
        dblclick: () => () => zoom(-Infinity, Infinity),
      },
    };
  }

  // -- reading values, zoom --

  zoomTo({ left, width }) {
    const ends = [left, left + width].map((x) => this.plot.posToVal(x, "x"));
    queueMicrotask(() => zoom(...ends)); // uPlot's handler goes on after this hook
  }

  // Shows the values at the cursor in the box beside (x, y).
  read(x, y) {
    const rows = [];
    let title = null;
    for (const line of this.lines) {
      const { data, grid } = line, column = this.columns.get(line);
      const i = grid.steps.indexOf(this.plot.data[0][this.plot.cursor.idxs[column]]);
      if (i < 0) continue;
      title ??= grid.from[i] === grid.to[i] ? `step ${grid.from[i]}` : `steps ${grid.from[i]}–${grid.to[i]}`;
      const limits = data.low ? ` (${short(data.low[i])} to ${short(data.high[i])})` : "";
      rows.push([line.label, (data.low ? short(data.y[i]) : exact(data.y[i])) + limits, line.colour, line.dashed]);
    }
    const most = rows.length > 12 ? [...rows.slice(0, 11), [`… ${rows.length - 11} more`, ""]] : rows;
    if (title) showTip(tipTable(title, most), x, y); else hideTip();
  }
}

// -- which charts are drawn ------------------------------------------------------------------------------------------

const onScreen = new IntersectionObserver((entries) => {
  for (const { target: { chart }, isIntersecting } of entries) {
    chart.seen = isIntersecting;
    if (isIntersecting) chart.draw();
  }
}, { rootMargin: "200px" });

function watch(chart) {
  chart.node.chart = chart;
  CHARTS.add(chart);
  onScreen.observe(chart.node);
  return chart.node;
}

const redraw = () => { for (const chart of CHARTS) if (chart.seen) chart.draw(); };

function zoom(from, to) {
  const whole = !(from > ENDS.first || to < ENDS.last), button = byId("reset-zoom");
  VIEW.from = whole ? -Infinity : from;
  VIEW.to = whole ? Infinity : to;
  button.hidden = whole;
  const [first, last] = [Math.ceil(Math.max(from, ENDS.first)), Math.floor(Math.min(to, ENDS.last))];
  button.textContent = `Steps ${first}–${last}: show all`;
  redraw();
}

function showLarge(chart) {
  const dialog = byId("large"), large = new Chart(chart.title, chart.lines, Math.max(260, Math.min(620, innerHeight - 200)));
  dialog.lastElementChild.replaceChildren(watch(large));
  dialog.showModal();
  dialog.append(byId("tip")); // a modal dialog is above all that is not inside it
  dialog.addEventListener("close", () => {
    CHARTS.delete(large);
    onScreen.unobserve(large.node);
    large.clear();
    document.body.append(byId("tip"));
    hideTip();
  }, { once: true });
}
