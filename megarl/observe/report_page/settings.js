// The settings as a table with search, and their differences from the other run's.
function settingRow([section, name, value, other, changed]) {
  const text = (content) => (content === null ? el("td", { class: "value faint", text: "–" }) : showText(el("td", { class: "value" }), content));
  const row = el("tr", { class: changed ? "changed" : "" }, showText(el("td", { class: "section" }), section), showText(el("td", { class: "name" }), name), text(value));
  if (DATA.other) row.append(text(other));
  row.words = [section, name, value, DATA.other ? other : ""].join(" ").toLowerCase();
  return row;
}

function searchSettings(rows) {
  const words = byId("setting-search").value.toLowerCase().split(/[\s,]+/).filter(Boolean), only = byId("changed-only").checked;
  let count = 0;
  for (const row of rows) {
    row.hidden = !(words.every((word) => row.words.includes(word)) && (!only || row.className));
    count += !row.hidden;
  }
  const none = only && !rows.some((row) => row.className) ? ": the runs have the same settings" : "";
  byId("setting-count").textContent = `${count} of ${rows.length}${none}`;
}

function showSettings() {
  if (!DATA.settings.length) {
    byId("setting-table").append(el("p", { class: "faint", text: "The run has no settings.yaml." }));
  }
  const rows = DATA.settings.map(settingRow), head = el("tr", {}, el("th"), el("th", { text: "name" }));
  for (const run of DATA.other ? [DATA.run, DATA.other] : [DATA.run]) head.append(showText(el("th"), DATA.other ? run.name : "value"));
  byId("setting-table").append(el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
  byId("changed-label").hidden = !DATA.other;
  byId("changed-only").checked = Boolean(DATA.other);
  byId("setting-search").addEventListener("input", () => searchSettings(rows));
  byId("changed-only").addEventListener("change", () => searchSettings(rows));
  searchSettings(rows);
}
showSettings();
