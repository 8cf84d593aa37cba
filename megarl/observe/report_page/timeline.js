// What each rank did in the last steps, and how the roles divide a step.
const PHASES = { rollout: "c0", update: "c1", values: "c2", logprobs: "c3", score: "c4", advantages: "c6", save: "c6", offload: "c5",
  sync_weights: "c5", serve: "c5", probe: "c4", read: "c4" };
const IDLE = new Set(["wait", "exchange"]);
const ROW = 30, LABEL = 215;

// [colour, opacity] of a phase; those of an evaluation are lighter, waits are grey.
function look(phase) {
  const isEvaluation = phase.startsWith("eval_"), name = phase.replace(/^eval_/, "");
  if (IDLE.has(name)) return ["var(--c7)", 0.35];
  const known = PHASES[name] ?? `c${[...name].reduce((sum, c) => sum + c.charCodeAt(0), 0) % 8}`;
  return [`var(--${known})`, isEvaluation ? 0.55 : 0.95];
}
const phaseOf = (name) => name.slice(name.indexOf("/") + 1);

class Lanes {
  constructor(data) {
    this.data = data;
    this.whole = [data.steps[0][1], data.steps.at(-1)[2]];
    this.view = this.whole;
    this.picture = svg("svg", { tabindex: 0, role: "img", height: data.rows.length * ROW + 24,
      "aria-label": "Phases of each rank over time; the table below has their seconds" });
    byId("lanes").append(this.picture);
    this.buttons();
    this.listen();
    addEventListener("resize", () => this.draw());
    addEventListener("beforeprint", () => this.draw());
    this.draw();
  }

  buttons() {
    const { steps } = this.data, choices = [[1, "last step"], [3, "last 3"], [steps.length, `all ${steps.length}`]];
    for (const [count, text] of choices.filter(([count], i) => i === 2 || count < steps.length)) {
      const button = el("button", { type: "button", text });
      button.addEventListener("click", () => this.show([steps.at(-count)[1], this.whole[1]]));
      byId("windows").append(button, " ");
    }
  }

  show([from, to]) {
    const width = Math.min(this.whole[1] - this.whole[0], Math.max(to - from, 1e-3));
    const start = Math.max(this.whole[0], Math.min(from, this.whole[1] - width));
    this.view = [start, start + width];
    this.draw();
  }

  draw() {
    const width = Math.max(400, this.picture.clientWidth), [from, to] = this.view;
    this.x = (ms) => LABEL + ((ms - from) / (to - from)) * (width - LABEL - 6);
    this.time = (px) => from + ((px - LABEL) / (width - LABEL - 6)) * (to - from);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.data.rows.length * ROW + 24}`);
    this.picture.replaceChildren();
    const bottom = this.data.rows.length * ROW;
    this.data.rows.forEach((row, r) => this.row(row, r, width));
    for (const [step, start, end] of this.data.steps) {
      if (end < from || start > to) continue;
      const left = Math.max(this.x(start), LABEL), right = Math.min(this.x(end), width - 6);
      this.picture.append(svg("line", { class: "cursor", x1: left, x2: left, y1: 0, y2: bottom + 8 }));
      if (right - left > 50) this.picture.append(svg("text", { x: (left + right) / 2, y: bottom + 18, "text-anchor": "middle" }, `step ${step}: ${plain((end - start) / 1e3)} s`));
    }
    this.picture.append((this.overlay = svg("g")));
  }

  row(row, r, width) {
    const label = row.label.length > 36 ? `${row.label.slice(0, 35)}…` : row.label, y = r * ROW;
    const text = svg("text", { class: "lane-label", x: 0, y: y + 19 }, label);
    text.append(svg("title", {}, row.label));
    this.picture.append(text, svg("rect", { x: LABEL, y: y + 3, width: width - LABEL - 6, height: ROW - 6, fill: "var(--grid)" }));
    row.events.forEach(([name, start, length, depth], i) => {
      if (start + length < this.view[0] || start > this.view[1]) return;
      const left = Math.max(this.x(start), LABEL), right = Math.min(this.x(start + length), width - 6);
      if (right - left < 0.25) return;
      const [fill, opacity] = look(phaseOf(this.data.names[name])), inset = 3 + Math.min(depth, 3) * 4;
      this.picture.append(svg("rect", { x: left, y: y + inset, width: right - left, height: ROW - 2 * inset, fill, opacity, "data-row": r, "data-event": i }));
    });
  }

  listen() {
    const at = (event) => event.clientX - this.picture.getBoundingClientRect().left;
    let start = null;
    this.picture.addEventListener("pointerdown", (event) => { start = at(event); });
    this.picture.addEventListener("pointermove", (event) => {
      if (start !== null && Math.abs(at(event) - start) > 5) {
        const x = Math.min(start, at(event));
        this.overlay.replaceChildren(svg("rect", { class: "drag", x, y: 0, width: Math.abs(at(event) - start), height: this.data.rows.length * ROW }));
        return hideTip();
      }
      const { row, event: number } = event.target.dataset;
      if (number === undefined) return hideTip();
      const [name, begin, length] = this.data.rows[row].events[number];
      showTip(tipTable(this.data.names[name], [["seconds", plain(length / 1e3)], ["start, seconds", plain((begin - this.whole[0]) / 1e3)], ["", this.data.rows[row].label]]), event.clientX, event.clientY);
    });
    const end = (event) => {
      if (start !== null && Math.abs(at(event) - start) > 5) this.show([start, at(event)].map(this.time).sort((a, b) => a - b));
      start = null;
    };
    this.picture.addEventListener("pointerup", end);
    this.picture.addEventListener("pointerleave", (event) => { end(event); hideTip(); });
    this.picture.addEventListener("dblclick", () => this.show(this.whole));
    this.picture.addEventListener("keydown", (event) => {
      const [from, to] = this.view, wide = to - from, middle = (from + to) / 2;
      const next = { ArrowLeft: [from - wide / 4, to - wide / 4], ArrowRight: [from + wide / 4, to + wide / 4], 0: this.whole,
        "+": [middle - wide / 4, middle + wide / 4], "-": [middle - wide, middle + wide] }[event.key];
      if (!next) return;
      this.show(next);
      event.preventDefault();
    });
  }
}

function showShares() {
  const { roles, steps, step_s: seconds, idle } = DATA.shares;
  if (!steps) return;
  const whole = idle === null ? "" : `; all ranks are idle ${percent(idle)} of the time`;
  byId("shares-title").textContent = `A step by role: mean of the last ${steps} steps, ${plain(seconds)} s${whole}`;
  byId("shares-note").textContent = "Seconds are those of the slowest rank; idle is the share of time in which the role's ranks do nothing, for any role.";
  for (const [role, { idle: share, phases }] of Object.entries(roles)) {
    const stack = el("div", { class: "stack" }), list = Object.entries(phases).sort((a, b) => b[1] - a[1]);
    for (const [phase, spent] of list) {
      const bar = el("i"), [colour, opacity] = look(phase);
      Object.assign(bar.style, { width: `${(100 * spent) / Math.max(seconds, list.reduce((sum, [, s]) => sum + s, 0))}%`, background: colour, opacity });
      bar.addEventListener("mousemove", (event) => showTip(tipTable(role, list.map(([name, s]) => [name, `${plain(s)} s`, look(name)[0]])), event.clientX, event.clientY));
      bar.addEventListener("mouseleave", hideTip);
      stack.append(bar);
    }
    const text = list.map(([phase, s]) => `${phase} ${plain(s)} s`).join(", ");
    stack.setAttribute("role", "img");
    stack.setAttribute("aria-label", `${role}: ${text}`);
    byId("shares").append(el("div", { class: "share" }, showText(el("b"), role), stack, el("span", { class: "number", text: share === null ? "" : `idle ${percent(share)}` })));
  }
}

function showPhases() {
  const names = new Set(Object.values(DATA.shares.roles).flatMap((role) => Object.keys(role.phases)));
  for (const name of DATA.timeline?.names ?? []) names.add(phaseOf(name));
  for (const name of [...names].sort()) {
    const mark = swatch(look(name)[0]);
    mark.style.opacity = look(name)[1];
    byId("phases").append(showText(el("span", {}, mark), name));
  }
}

function showTimeline() {
  const data = DATA.timeline;
  showPhases();
  showShares();
  if (!data) {
    byId("timeline-note").textContent = "No time line yet: a run writes timeline.json when it ends.";
    return;
  }
  const last = Number(data.steps.at(-1)[0]), old = last < DATA.run.last ? ` It is of an earlier part of the run, which ended at step ${last}.` : "";
  const some = data.rows.length < data.ranks ? ` One rank of each set of roles: ${data.rows.length} of ${data.ranks} ranks.` : "";
  byId("timeline-note").textContent = `The last ${data.steps.length} steps in timeline.json; drag to zoom, double-click to see all. Grey: a rank waits.${some}${old}`;
  new Lanes(data);
}
showTimeline();
