// The settings as a table with search, and their differences from the other run's.
function settingRow([section, name, value, other, changed, byUser]) {
  const text = (content) => (content === null ? el("td", { class: "value faint", text: "–" }) : showText(el("td", { class: "value" }), content));
  const row = el("tr", { class: [changed && "changed", byUser && "user"].filter(Boolean).join(" ") }, showText(el("td", { class: "section" }), section), showText(el("td", { class: "name" }), name), text(value));
  if (DATA.other) row.append(text(other));
  row.changed = changed;
  row.words = [section, name, value, DATA.other ? other : ""].join(" ").toLowerCase();
  return row;
}

function searchSettings(rows) {
  const words = byId("setting-search").value.toLowerCase().split(/[\s,]+/).filter(Boolean), only = byId("changed-only").checked;
  let count = 0;
  for (const row of rows) {
    row.hidden = !(words.every((word) => row.words.includes(word)) && (!only || row.changed));
    count += !row.hidden;
  }
  const none = only && !rows.some((row) => row.changed) ? ": the runs have the same settings" : "";
  byId("setting-count").textContent = `${count} of ${rows.length}${none}`;
}

// The clipboard needs a secure page, which one opened from a disk may not be: then the text is selected for Ctrl-C.
async function copyCommand() {
  const button = byId("copy-command");
  try {
    await navigator.clipboard.writeText(DATA.command);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("command-line"));
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

function showCommand() {
  byId("command").hidden = !DATA.command;
  if (!DATA.command) return;
  showText(byId("command-line"), DATA.command);
  const ranks = DATA.settings.find(([section, name]) => section === "run" && name === "world_size");
  if (ranks && ranks[2] !== null) showText(byId("command-ranks"), `on ${ranks[2]} rank${ranks[2] === "1" ? "" : "s"}`);
  byId("copy-command").addEventListener("click", copyCommand);
}

function showSettings() {
  showCommand();
  if (!DATA.settings.length) {
    byId("setting-table").append(el("p", { class: "faint", text: "The run has no settings.yaml." }));
  }
  const rows = DATA.settings.map(settingRow), head = el("tr", {}, el("th"), el("th", { text: "name" }));
  for (const run of DATA.other ? [DATA.run, DATA.other] : [DATA.run]) head.append(showText(el("th"), DATA.other ? run.name : "value"));
  byId("setting-table").append(el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
  byId("user-note").hidden = !DATA.settings.some((row) => row[5]);
  byId("changed-label").hidden = !DATA.other;
  byId("changed-only").checked = Boolean(DATA.other);
  byId("setting-search").addEventListener("input", () => searchSettings(rows));
  byId("changed-only").addEventListener("change", () => searchSettings(rows));
  searchSettings(rows);
}
showSettings();
