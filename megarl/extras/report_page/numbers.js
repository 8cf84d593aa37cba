// Numbers as text. Nothing here needs a page.
const range = (n) => Array.from({ length: n }, (_, i) => i);

function short(value, name = "") {
  if (value === null || value === undefined) return "not finite";
  if (name.endsWith("_bytes")) return bytes(value);
  const unit = name.endsWith("_s") && !name.endsWith("per_s") ? " s" : "";
  return plain(value) + unit;
}

function plain(value, digits = 4) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const byteUnit = (value) => (value ? Math.max(0, Math.min(4, Math.floor(Math.log2(Math.abs(value)) / 10))) : 0);

function bytes(value) {
  const power = byteUnit(value);
  return `${Number((value / 1024 ** power).toPrecision(4))} ${BYTE_UNITS[power]}`;
}

const exact = (value) => (value === null || value === undefined ? "not finite" : String(value));

// Texts of the ticks of a linear axis (null: none): with the digits that their distance needs, so no two are the same.
// As tick_texts of report_figure.py.
function tickTexts(values) {
  const shown = values.filter((value) => value !== null), size = Math.max(...shown.map(Math.abs));
  const gaps = shown.slice(1).map((value, i) => Math.abs(value - shown[i])), error = gaps.length ? Math.min(...gaps) / 100 : size / 1e4;
  const isPower = size < 1e-3 || size >= 1e7;
  const rounded = (value, digits) => (isPower ? value.toExponential(digits) : value.toFixed(digits));
  const digits = range(16).find((count) => shown.every((value) => Math.abs(Number(rounded(value, count)) - value) <= error)) ?? 16;
  const separated = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map((value) => {
    if (value === null) return "";
    if (Math.abs(value) <= error) return "0";
    return isPower ? value.toExponential(digits).replace("e+", "e") : value.toLocaleString("en-US", separated);
  });
}

function byteTicks(values) {
  const power = byteUnit(Math.max(...values.map(Math.abs))), texts = tickTexts(values.map((value) => value / 1024 ** power));
  return texts.map((text) => text && `${text} ${BYTE_UNITS[power]}`);
}
