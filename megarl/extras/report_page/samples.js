// Samples: prompts and responses of some steps, and the tokens of some responses one by one.
// name: [label, text of a value in the row of a token]. `value(row, i)` gives null where the run has none.
// An observation is not the policy's: it has no numbers.
const field = (name) => (row, i) => (row.observed?.[i] ? null : row[name]?.[i] ?? null);
const difference = (one, other) => (row, i) => (row.observed?.[i] || row[one]?.[i] == null || row[other]?.[i] == null ? null : row[one][i] - row[other][i]);
const QUANTITIES = {
  advantage: { label: "advantage", value: field("advantages") },
  rollout: { label: "log-prob, rollout (log μ)", value: field("rollout_logprobs") },
  old: { label: "log-prob, recomputed (log π_old)", value: field("logprobs") },
  ratio: { label: "ratio π_old / μ", value: difference("logprobs", "rollout_logprobs"), show: (v) => exact(Number(Math.exp(v).toPrecision(7))) },
  kl: { label: "log π_old − log π_ref", value: difference("logprobs", "reference_logprobs") },
  reference: { label: "log-prob, reference", value: field("reference_logprobs") },
  value: { label: "value", value: field("values") },
  return: { label: "return", value: field("returns") },
  entropy: { label: "entropy, nats", value: field("entropy") },
};
const FILTERS = {
  all: ["all", () => true],
  right: ["correct", (row) => row.correct === true],
  wrong: ["not correct", (row) => row.correct === false],
  cut: ["truncated", (row) => row.finished === false],
  tokens: ["token by token", (row) => Boolean(row.tokens)],
};
const ORDERS = {
  sequence: ["by number", (row) => row.sequence ?? 0],
  best: ["highest reward first", (row) => -(row.reward ?? -Infinity)],
  worst: ["lowest reward first", (row) => row.reward ?? Infinity],
  long: ["longest first", (row) => -(row.length ?? 0)],
};
const shownValue = (quantity, value) => (quantity.show ? quantity.show(value) : plain(value, 5));

function presentQuantities() {
  const rows = DATA.samples.steps.flatMap((step) => step.rows).filter((row) => row.tokens);
  return Object.entries(QUANTITIES).filter(([, q]) => rows.some((row) => range(row.tokens.length).some((i) => q.value(row, i) !== null)));
}

// The value that has full colour: 98 of 100 tokens of the step are below.
function scaleOf(rows, quantity) {
  const sizes = rows.filter((row) => row.tokens).flatMap((row) => row.tokens.map((_, i) => Math.abs(quantity.value(row, i) ?? 0)));
  sizes.sort((a, b) => a - b);
  return sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || sizes.at(-1) || 0;
}

function paint(value, scale) {
  if (value === null || !scale) return "transparent";
  const strength = (0.6 * Math.min(1, Math.abs(value) / scale)).toFixed(3);
  return `rgba(var(--${value < 0 ? "minus" : "plus"}), ${strength})`;
}

const SPACES = { "\n": "↵\n", "\t": "→\t", "\r": "␍" };

function tokenSpan(row, i, quantity, scale) {
  const span = el("span", { "data-token": i, class: row.observed?.[i] ? "observed" : "" });
  const text = row.tokens[i].replace(/[\n\t\r]/g, (character) => SPACES[character]);
  showText(span, text || "∅");
  if (quantity) span.style.background = paint(quantity.value(row, i), scale);
  return span;
}

function tokenTip(row, i) {
  const id = row.token_ids?.[i], rows = [["token", `${i + 1} of ${row.length ?? row.tokens.length}`]];
  if (id !== undefined) rows.push(["id", String(id)]);
  if (row.observed?.[i]) rows.push(["observation", "not the policy's"]);
  for (const quantity of Object.values(QUANTITIES)) {
    const value = quantity.value(row, i);
    if (value !== null) rows.push([quantity.label, quantity.show ? quantity.show(value) : exact(value)]);
  }
  return tipTable(JSON.stringify(row.tokens[i]), rows);
}

function tokenText(row, quantity, scale) {
  const node = el("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": "Response token by token; ← → read each" });
  row.tokens.forEach((_, i) => node.append(tokenSpan(row, i, quantity, scale)));
  if (row.length > row.tokens.length) node.append(el("span", { class: "faint", text: ` … ${row.length - row.tokens.length} more tokens` }));
  let at = -1;
  const show = (i, x, y) => { showTip(tokenTip(row, i), x, y); };
  const focus = (i) => {
    node.children[at]?.classList.remove("on");
    at = Math.max(0, Math.min(row.tokens.length - 1, i));
    node.children[at].classList.add("on");
    const box = node.children[at].getBoundingClientRect();
    show(at, box.right, box.bottom);
  };
  node.addEventListener("mousemove", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) show(Number(span.dataset.token), event.clientX, event.clientY); else hideTip();
  });
  node.addEventListener("mouseleave", hideTip);
  node.addEventListener("blur", () => { node.children[at]?.classList.remove("on"); hideTip(); });
  node.addEventListener("keydown", (event) => {
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: row.tokens.length - 1 }[event.key];
    if (target === undefined) return;
    focus(target);
    event.preventDefault();
  });
  return node;
}

function sampleHead(row) {
  const head = el("header"), add = (label, text, kind = "") => {
    head.append(el("span", {}, `${label} `, showText(el("b", { class: kind }), text)));
  };
  if (row.sequence != null) add("", `#${row.sequence}`);
  if (row.reward != null) add("reward", plain(row.reward));
  for (const [name, value] of Object.entries(row.reward_parts ?? {})) {
    if (Object.keys(row.reward_parts).length > 1 || value !== row.reward) add(name, value === null ? "not finite" : plain(value));
  }
  if (row.advantage != null) add("advantage", plain(row.advantage));
  if (row.correct != null) add("", row.correct ? "✓ correct" : "✗ not correct", row.correct ? "yes" : "no");
  if (row.finished === false) add("", "truncated", "no");
  else if (row.finished) head.append(el("span", { text: "finished" }));
  if (row.turns?.length > 1) head.append(el("span", { text: `${row.turns.length} turns` }));
  if (row.length != null) head.append(el("span", { text: `${row.length} tokens` }));
  if (row.extracted != null && row.extracted !== row.response) add("extracted", row.extracted);
  if (row.kept === false) add("", "dropped by the group filter", "no");
  return head;
}

const plainText = (text) => showText(el("div", { class: "text" }), text ?? "");

// Small images of those that a text names.
function thumbnails(text) {
  const names = [...(text?.matchAll(/\[image \d+×\d+ sha:([0-9a-f]{8})\]/g) ?? [])].map(([, name]) => name);
  const known = names.filter((name) => DATA.samples.images?.[name]);
  return known.map((name) => el("img", { src: DATA.samples.images[name], alt: name, class: "thumbnail" }));
}

// The turns of an episode one below the other, each with what the environment answered.
function turnTexts(row) {
  const node = el("div", { class: "turns" });
  for (const turn of row.turns) {
    const text = plainText(turn.text);
    if (turn.reward) text.append(el("b", { class: "reward", text: ` reward ${plain(turn.reward)}` }));
    node.append(text);
    if (!turn.observation) continue;
    node.append(showText(el("div", { class: "text observed" }), turn.observation), ...thumbnails(turn.observation));
  }
  return node;
}

// What the judge wrote, each text with its number.
function judgementTexts(row) {
  return (row.judgements ?? []).map((judgement) => {
    const text = showText(el("div", { class: "text observed" }), judgement.text);
    text.append(el("b", { class: "reward", text: judgement.number === null ? " no number" : ` judged ${plain(judgement.number)}` }));
    return text;
  });
}

function responseCard(row, quantity, scale) {
  const whole = row.turns?.length ? turnTexts(row) : plainText(row.response);
  return el("article", {}, sampleHead(row), row.tokens ? tokenText(row, quantity, scale) : whole, ...judgementTexts(row));
}

// A prompt and the responses to it that follow each other in the chosen order.
function promptCards(rows, quantity, scale) {
  const cards = [];
  let prompt = null;
  for (const row of rows) {
    if (!cards.length || row.prompt !== prompt) {
      prompt = row.prompt;
      const asked = el("div", {}, plainText(prompt), ...thumbnails(prompt));
      if (row.answer != null) asked.append(el("div", { class: "faint" }, "answer ", showText(el("b"), row.answer)));
      cards.push(el("div", { class: "sample" }, asked, el("div", { class: "responses" })));
    }
    cards.at(-1).lastElementChild.append(responseCard(row, quantity, scale));
  }
  return cards;
}

function showScale(quantity, scale, rows) {
  const node = byId("scale");
  node.replaceChildren();
  if (!quantity || !rows.some((row) => row.tokens)) return;
  const bar = el("span", { class: "gradient" });
  bar.style.background = "linear-gradient(90deg, rgba(var(--minus), .6), transparent, rgba(var(--plus), .6))";
  const ends = [-scale, scale].map((value) => shownValue(quantity, value));
  node.append(el("span", { text: quantity.label }), el("span", {}, `${ends[0]} `, bar, ` ${ends[1]}`));
  node.append(el("span", { class: "screen", text: "Point at a token for its numbers; or Tab to a response, then ← →." }));
}

function fill(select, options) {
  for (const [value, label] of options) select.append(showText(el("option", { value }), label));
}

function showStep() {
  const step = DATA.samples.steps[byId("sample-step").selectedIndex];
  const quantity = QUANTITIES[byId("quantity").value], scale = quantity ? scaleOf(step.rows, quantity) : 0;
  const [, fits] = FILTERS[byId("sample-filter").value], [, key] = ORDERS[byId("sample-order").value];
  const rows = step.rows.filter(fits).sort((a, b) => key(a) - key(b));
  byId("sample-list").replaceChildren(...promptCards(rows, quantity, scale));
  if (!rows.length) byId("sample-list").append(el("p", { class: "faint", text: "no such sample in this step" }));
  const kept = step.rows.length < step.total ? `${step.rows.length} of ${step.total} recorded responses of the step` : `${step.total} recorded responses of the step`;
  const steps = `${DATA.samples.steps.length} of ${DATA.samples.recorded} steps with samples are in this page`;
  byId("sample-note").textContent = `${kept}; ${steps}.`;
  showScale(quantity, scale, step.rows);
  byId("step-before").disabled = byId("sample-step").selectedIndex === 0;
  byId("step-after").disabled = byId("sample-step").selectedIndex === DATA.samples.steps.length - 1;
}

function showSamples() {
  const { steps } = DATA.samples;
  if (!steps.length) {
    byId("sample-tools").replaceChildren(el("h2", { text: "Samples" }), el("span", { class: "faint", text: "none recorded" }));
    return;
  }
  fill(byId("sample-step"), steps.map((step, i) => [i, `${step.step}${step.notes.length ? ` (${step.notes.join(", ")})` : ""}`]));
  const present = presentQuantities();
  fill(byId("quantity"), [...present.map(([name, q]) => [name, q.label]), ["none", "none"]]);
  fill(byId("sample-filter"), Object.entries(FILTERS).map(([name, [label]]) => [name, label]));
  fill(byId("sample-order"), Object.entries(ORDERS).map(([name, [label]]) => [name, label]));
  byId("sample-step").selectedIndex = steps.length - 1;
  for (const name of ["sample-step", "quantity", "sample-filter", "sample-order"]) byId(name).addEventListener("change", showStep);
  for (const [name, move] of [["step-before", -1], ["step-after", 1]]) {
    byId(name).addEventListener("click", () => { byId("sample-step").selectedIndex += move; showStep(); });
  }
  showStep();
}
showSamples();
