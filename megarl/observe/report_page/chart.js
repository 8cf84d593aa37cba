// One chart: lines over steps, drawn as SVG when it comes into view.
const VIEW = { from: -Infinity, to: Infinity, smoothing: 0, log: false }; // what all charts share
const RUNS = DATA.other ? [DATA.run, DATA.other] : [DATA.run];
const ENDS = { first: Math.min(...RUNS.map((run) => run.first)), last: Math.max(...RUNS.map((run) => run.last)) };
const CHARTS = new Set();
const MARGIN = { left: 52, right: 8, top: 6, bottom: 20 };
const middle = (grid, i) => (grid.from[i] + grid.to[i]) / 2;

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

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

class Chart {
  // lines: [{label, run, metric, colour, dashed, spread}]; spread: name of the metric that is the deviation from it.
  constructor(title, lines, height = 130) {
    this.title = title; this.height = height; this.cursor = null; this.seen = false;
    this.lines = lines.filter((line) => line.run.metrics[line.metric]);
    this.lines.forEach((line) => { line.data = line.run.metrics[line.metric]; line.grid = line.run.grids[line.data.grid]; });
    this.picture = svg("svg", { tabindex: 0, role: "img", height });
    this.node = el("figure", { class: "chart" }, this.caption(), ...this.keys(), this.picture);
    this.listen();
  }

  caption() {
    const name = el("b", { title: this.title });
    const large = el("button", { type: "button", tabindex: -1, title: "Large (Enter)", "aria-label": "Large", text: "⤢" });
    large.addEventListener("click", () => showLarge(this));
    const isOne = this.lines.every((line) => line.metric === this.lines[0].metric);
    const value = el("span", { text: isOne ? this.lines.map((line) => short(line.data.last, line.metric)).join(" | ") : "" });
    return el("figcaption", {}, showText(name, this.title), value, large);
  }

  keys() {
    if (this.lines.every((line) => line.metric === this.lines[0].metric)) return [];
    const shown = this.lines.length > 8 ? [this.lines[0], this.lines.at(-1)] : this.lines;
    return [el("div", { class: "keys" }, ...shown.map((line) => showText(el("span", {}, swatch(line.colour, line.dashed)), line.label)))];
  }

  // Values of a line in view: indices, and what is drawn of them.
  visible(line) {
    const inside = range(line.data.y.length).filter((i) => line.grid.to[i] >= VIEW.from && line.grid.from[i] <= VIEW.to);
    const values = VIEW.smoothing ? smoothed(line.data.y, VIEW.smoothing) : line.data.y;
    return { inside, values };
  }

  limits() {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const line of this.lines) {
      for (const i of this.visible(line).inside) {
        first = Math.min(first, line.grid.from[i]); last = Math.max(last, line.grid.to[i]);
        for (const value of [line.data.y[i], line.data.low?.[i], line.data.high?.[i]]) {
          if (value === null || value === undefined || (this.isLog() && value <= 0)) continue;
          low = Math.min(low, value); high = Math.max(high, value);
        }
      }
    }
    if (low > high) return null;
    if (first === last) { first -= 0.5; last += 0.5; }
    return { low, high, first, last };
  }

  isLog() { return VIEW.log && this.lines.every((line) => line.data.max > 0); }

  // Scales of the axes; the vertical one starts at zero if that costs little room.
  scales(box) {
    const width = Math.max(160, this.picture.clientWidth || 360), height = this.height;
    let { low, high } = box;
    const log = this.isLog(), to = log ? Math.log10 : (v) => v;
    if (!log && low >= 0 && low < 0.5 * high) low = 0;
    if (low === high) { const pad = log ? low / 2 : Math.abs(low) / 2 || 0.5; low -= pad; high += pad; }
    const bottom = to(low), top = to(high), room = (top - bottom) * 0.06;
    const floor = low === 0 && !log ? 0 : bottom - room, ceiling = top + room;
    const inner = { x: width - MARGIN.left - MARGIN.right, y: height - MARGIN.top - MARGIN.bottom };
    return {
      width, height, log, floor, ceiling, ...box, inner,
      x: (step) => MARGIN.left + ((step - box.first) / (box.last - box.first)) * inner.x,
      y: (value) => MARGIN.top + (1 - (to(value) - floor) / (ceiling - floor)) * inner.y,
      step: (px) => box.first + ((px - MARGIN.left) / inner.x) * (box.last - box.first),
    };
  }

  draw() {
    this.picture.replaceChildren();
    const box = this.limits(), name = this.title;
    const { first, last } = this.lines[0].data;
    this.picture.setAttribute("aria-label", `${name}: from ${short(first, name)} to ${short(last, name)}`);
    if (!box) return this.say("no finite value in these steps");
    if (box.low === box.high && this.lines.length > 1) {
      return this.say(`exactly ${plain(box.low)} at every step`);
    }
    const s = (this.at = this.scales(box));
    this.picture.setAttribute("viewBox", `0 0 ${s.width} ${s.height}`);
    this.axes(s);
    for (const line of [...this.lines].reverse()) this.line(line, s); // the first one above the others
    this.picture.append((this.overlay = svg("g")));
  }

  say(text) {
    const width = this.picture.clientWidth || 360;
    this.at = null;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picture.append(svg("text", { class: "note", x: width / 2, y: this.height / 2, "text-anchor": "middle" }, text));
  }

  axes(s) {
    const values = s.log ? this.powers(s) : ticks(s.floor, s.ceiling, s.height > 200 ? 6 : s.height > 150 ? 4 : 3);
    for (const value of values) {
      const y = s.y(value);
      this.picture.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: s.width - MARGIN.right, y1: y, y2: y }));
      const text = this.title.endsWith("_bytes") ? bytes(value) : plain(value);
      this.picture.append(svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, text));
    }
    for (const step of ticks(s.first, s.last, s.width > 700 ? 8 : 4).filter(Number.isInteger)) {
      const anchor = s.x(step) > s.width - 24 ? "end" : s.x(step) < MARGIN.left + 8 ? "start" : "middle";
      this.picture.append(svg("text", { x: s.x(step), y: s.height - 5, "text-anchor": anchor }, step.toLocaleString("en-US")));
    }
  }

  powers(s) {
    const low = Math.ceil(s.floor - 1e-9), high = Math.floor(s.ceiling + 1e-9), stride = Math.ceil((high - low + 1) / 5);
    const found = range(Math.max(0, high - low + 1)).filter((i) => i % stride === 0).map((i) => 10 ** (low + i));
    return found.length > 1 ? found : ticks(10 ** s.floor, 10 ** s.ceiling, 3).filter((value) => value > 0);
  }

  line(line, s) {
    const { inside, values } = this.visible(line), raw = line.data.y;
    const drawn = (value) => value !== null && value !== undefined && !(s.log && value <= 0);
    const path = (list) => {
      let text = "", pen = false;
      for (const i of inside) {
        const fine = drawn(list[i]);
        if (fine) text += `${pen ? "L" : "M"}${s.x(middle(line.grid, i)).toFixed(1)} ${s.y(list[i]).toFixed(1)}`;
        pen = fine;
      }
      return text;
    };
    const style = { stroke: line.colour, class: "line", ...(line.dashed ? { "stroke-dasharray": "5 3" } : {}) };
    this.band(line, s, inside, drawn);
    if (VIEW.smoothing) this.picture.append(svg("path", { ...style, class: "line raw", d: path(raw) }));
    this.picture.append(svg("path", { ...style, d: path(values) }));
    if (inside.length > 1 && s.x(line.grid.from[inside.at(-1)]) - s.x(line.grid.from[inside[0]]) < 9 * inside.length) return;
    for (const i of inside.filter((i) => drawn(raw[i]))) {
      this.picture.append(svg("circle", { cx: s.x(middle(line.grid, i)), cy: s.y(raw[i]), r: 2.4, fill: line.colour }));
    }
  }

  // Smallest to largest value of the steps that a point stands for, or mean ± standard deviation.
  band(line, s, inside, drawn) {
    let { low, high } = line.data;
    const spread = line.spread && line.run.metrics[line.spread];
    if (spread && spread.grid === line.data.grid) {
      low = line.data.y.map((value, i) => value - spread.y[i]);
      high = line.data.y.map((value, i) => value + spread.y[i]);
    }
    const points = low ? inside.filter((i) => drawn(low[i]) && drawn(high[i]) && drawn(line.data.y[i])) : [];
    if (!points.length) return;
    const edge = (list) => (i) => `${s.x(middle(line.grid, i)).toFixed(1)} ${this.clamped(s, list[i]).toFixed(1)}`;
    const d = `M${points.map(edge(low)).join("L")}L${points.reverse().map(edge(high)).join("L")}Z`;
    this.picture.append(svg("path", { class: "band", fill: line.colour, d }));
  }

  clamped(s, value) { return Math.max(MARGIN.top, Math.min(s.height - MARGIN.bottom, s.y(value))); }

  // -- reading values, zoom --

  listen() {
    const at = (event) => event.clientX - this.picture.getBoundingClientRect().left;
    let start = null;
    this.picture.addEventListener("pointerdown", (event) => { if (event.button === 0) start = at(event); });
    this.picture.addEventListener("pointermove", (event) => {
      if (!this.at) return;
      if (start !== null && Math.abs(at(event) - start) > 5) return this.drag(start, at(event));
      this.read(this.at.step(at(event)), event.clientX, event.clientY);
    });
    const end = (event) => {
      if (start !== null && this.at && Math.abs(at(event) - start) > 5) {
        zoom(...[start, at(event)].sort((a, b) => a - b).map(this.at.step));
      }
      start = null;
    };
    this.picture.addEventListener("pointerup", end);
    this.picture.addEventListener("pointerleave", (event) => { end(event); this.overlay?.replaceChildren(); hideTip(); });
    this.picture.addEventListener("dblclick", () => zoom(-Infinity, Infinity));
    this.picture.addEventListener("blur", () => { this.overlay?.replaceChildren(); hideTip(); });
    this.picture.addEventListener("keydown", (event) => this.key(event));
  }

  drag(one, other) {
    const box = { x: Math.min(one, other), width: Math.abs(one - other), y: MARGIN.top, height: this.at.inner.y };
    this.overlay.replaceChildren(svg("rect", { class: "drag", ...box }));
    hideTip();
  }

  read(step, x, y) {
    const rows = [];
    this.overlay.replaceChildren();
    let shown = null;
    for (const line of this.lines) {
      const i = nearest(line.grid, step);
      if (line.grid.to[i] < VIEW.from || line.grid.from[i] > VIEW.to) continue;
      shown ??= line.grid.from[i] === line.grid.to[i] ? `step ${line.grid.from[i]}` : `steps ${line.grid.from[i]}–${line.grid.to[i]}`;
      const value = line.data.y[i], px = this.at.x(middle(line.grid, i));
      const limits = line.data.low ? ` (${plain(line.data.low[i] ?? 0)} to ${plain(line.data.high[i] ?? 0)})` : "";
      rows.push([line.label, (line.data.low ? short(value) : exact(value)) + limits, line.colour, line.dashed]);
      if (rows.length === 1) this.overlay.append(svg("line", { class: "cursor", x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
      if (value !== null && !(this.at.log && value <= 0)) this.overlay.append(svg("circle", { cx: px, cy: this.at.y(value), r: 3.5, fill: line.colour }));
      this.cursor = this.cursor ?? i;
    }
    const most = rows.length > 12 ? [...rows.slice(0, 11), [`… ${rows.length - 11} more`, ""]] : rows;
    if (shown) showTip(tipTable(shown, most), x, y);
  }

  key(event) {
    if (!this.at || event.ctrlKey || event.metaKey || event.altKey) return;
    const grid = this.lines[0].grid, last = grid.from.length - 1, box = this.picture.getBoundingClientRect();
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (move !== undefined) {
      this.cursor = Math.max(0, Math.min(last, this.cursor === null ? last : this.cursor + move));
      const step = middle(grid, this.cursor);
      this.read(step, box.left + this.at.x(step), box.top + 20);
    } else if (event.key === "+" || event.key === "-") {
      const around = middle(grid, this.cursor ?? Math.floor(last / 2)), half = (this.at.last - this.at.first) / 2;
      const wide = event.key === "+" ? half / 2 : half * 2;
      zoom(around - wide, around + wide);
    } else if (event.key === "0") zoom(-Infinity, Infinity);
    else if (event.key === "Enter") showLarge(this);
    else return;
    event.preventDefault();
  }
}

function nearest(grid, step) {
  let low = 0, high = grid.from.length - 1;
  while (high - low > 1) {
    const half = (low + high) >> 1;
    if (middle(grid, half) <= step) low = half; else high = half;
  }
  return Math.abs(middle(grid, low) - step) <= Math.abs(middle(grid, high) - step) ? low : high;
}

// -- which charts are drawn ------------------------------------------------------------------------------------------

const onScreen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.seen = entry.isIntersecting;
    if (chart.seen) chart.draw();
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
  const whole = !(from > ENDS.first || to < ENDS.last);
  VIEW.from = whole ? -Infinity : from;
  VIEW.to = whole ? Infinity : to;
  const button = byId("reset-zoom");
  button.hidden = whole;
  button.textContent = `Steps ${Math.ceil(Math.max(VIEW.from, ENDS.first))}–${Math.floor(Math.min(VIEW.to, ENDS.last))}: show all`;
  redraw();
}

function showLarge(chart) {
  const dialog = byId("large"), large = new Chart(chart.title, chart.lines, Math.max(260, Math.min(620, innerHeight - 200)));
  dialog.lastElementChild.replaceChildren(watch(large));
  dialog.showModal();
  dialog.append(byId("tip")); // a modal dialog is above all that is not inside it
  large.picture.focus();
  dialog.addEventListener("close", () => {
    CHARTS.delete(large);
    onScreen.unobserve(large.node);
    document.body.append(byId("tip"));
    hideTip();
  }, { once: true });
}
