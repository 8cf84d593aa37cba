"use strict";
// What all parts of the page share. Every text is written by textContent: texts come from models and data files.
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const css = (name) => `var(--${name})`;

function swatch(colour, dashed = false) {
  const node = el("span", { class: "swatch" });
  if (dashed) node.style.border = `2px dashed ${colour}`; else node.style.background = colour;
  return node;
}

// -- texts that may hold anything -----------------------------------------------------------------------------------

// Control characters, marks that turn the direction of text or have no width, and halves of a surrogate pair.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\u{e0001}|[\u{e0020}-\u{e007f}]/gu;

function showText(node, text) {
  let position = 0;
  for (const match of text.matchAll(HIDDEN)) {
    node.append(text.slice(position, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    node.append(el("span", { class: "control", text: `U+${code}` }));
    position = match.index + match[0].length;
  }
  node.append(text.slice(position));
  return node;
}

// -- the box beside the pointer or the focused element ---------------------------------------------------------------

function showTip(content, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(content);
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.height - 6))}px`;
}

const hideTip = () => byId("tip").replaceChildren();

function tipTable(title, rows) {
  const table = el("table");
  for (const [label, value, colour, dashed] of rows) {
    const name = el("td", {}, ...(colour ? [swatch(colour, dashed)] : []));
    table.append(el("tr", {}, showText(name, label), showText(el("td", { class: "number" }), value)));
  }
  return el("div", {}, showText(el("b"), title), table);
}

// -- head of the page ------------------------------------------------------------------------------------------------

function showHead() {
  showText(byId("name"), DATA.name);
  byId("timeline").textContent = DATA.timeline
    ? `Time line of all ranks: ${DATA.timeline} in the run's folder, to be opened in Perfetto (ui.perfetto.dev).`
    : "No time line yet: a run writes timeline.json, for Perfetto, when it ends.";
  if (DATA.other) showText(byId("name").appendChild(el("span")), ` against ${DATA.other.name}`);
  for (const [label, value, note] of DATA.facts) {
    const box = byId("facts").appendChild(el("div", { class: note.length > 26 ? "wide" : "" }));
    box.append(showText(el("dt"), label), showText(el("dd"), value));
    box.append(showText(el("dd", { class: "note" }), note));
  }
  const themes = ["auto", "light", "dark"], button = byId("theme");
  let theme = 0;
  const apply = () => {
    document.documentElement.dataset.theme = themes[theme];
    button.textContent = `Theme: ${themes[theme]}`;
  };
  button.addEventListener("click", () => { theme = (theme + 1) % 3; apply(); });
  apply();
  addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; }); // paper is white
  addEventListener("afterprint", apply);
}
showHead();
