// The smallest parts that the page, the report and the lesson share: elements, language, theme, numbers.

const SVG = "http://www.w3.org/2000/svg";
const listeners = new Set();
const prefs = { lang: "en", theme: "light" };
let words = { en: {}, ko: {} };

function kept(name) {
  try {
    return localStorage.getItem(`dure-${name}`);
  } catch {
    return null; // a report from file:// may have no storage
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`dure-${name}`, value);
  } catch {
    // then it is forgotten
  }
}

/** Take the words of a page, and the language and theme that the reader chose, or the browser says. */
export function startPrefs(table, wanted) {
  words = table;
  prefs.lang = kept("lang") || wanted || (navigator.language.startsWith("ko") ? "ko" : "en");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  prefs.theme = kept("theme") || (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => {
    if (!kept("theme")) setTheme(dark.matches ? "dark" : "light", false);
  });
  apply();
}

function apply() {
  document.documentElement.lang = prefs.lang;
  document.documentElement.dataset.theme = prefs.theme;
}

export function setLang(lang) {
  prefs.lang = lang;
  keep("lang", lang);
  apply();
  for (const listener of listeners) listener();
}

export function setTheme(theme, remember = true) {
  prefs.theme = theme;
  if (remember) keep("theme", theme);
  apply();
  for (const listener of listeners) listener();
}

export function onPrefs(listener) {
  listeners.add(listener);
}

export function lang() {
  return prefs.lang;
}

export function theme() {
  return prefs.theme;
}

/** A sentence in the reader's language; {name} in it stands for a value. */
export function t(key, values = {}) {
  const text = words[prefs.lang][key] ?? words.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** Make an element. Text is always text: nothing that a run says can become markup. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Put new children into an element when what they are made of has changed; what has not is not drawn again. */
export function redraw(node, told, make) {
  const key = JSON.stringify([told, prefs.lang, prefs.theme]);
  if (key === node.drawnFrom) return;
  node.drawnFrom = key;
  node.replaceChildren(...[make()].flat());
}

/** Give a canvas its size, if it has another, and an empty picture in units of CSS pixels. */
export function blank(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

/** A colour of the theme, for a canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const RANKS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#b8a800"];

/** A colour per rank, told apart with every kind of colour vision for the first eight. */
export function rankColour(rank) {
  return RANKS[rank % RANKS.length];
}

export const fmt = {
  whole: (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString(prefs.lang)),
  number(value, digits = 4) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(2);
    return value.toLocaleString(prefs.lang, { maximumSignificantDigits: digits });
  },
  percent: (value) => `${(100 * value).toLocaleString(prefs.lang, { maximumFractionDigits: 1 })}\u00a0%`,
  bytes(value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) {
      value /= 1000;
      at += 1;
    }
    return `${value.toLocaleString(prefs.lang, { maximumFractionDigits: value < 10 && at ? 1 : 0 })}\u00a0${units[at]}`;
  },
  ms(micros) {
    if (micros === null || micros === undefined || Number.isNaN(micros)) return "–";
    const ms = micros / 1000;
    if (ms >= 10000) return `${(ms / 1000).toLocaleString(prefs.lang, { maximumFractionDigits: 1 })}\u00a0s`;
    return `${ms.toLocaleString(prefs.lang, { maximumFractionDigits: ms < 10 ? 2 : ms < 100 ? 1 : 0 })}\u00a0ms`;
  },
  duration(seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
    const ko = prefs.lang === "ko";
    const parts = [
      [Math.floor(seconds / 86400), ko ? "일" : "d"],
      [Math.floor(seconds / 3600) % 24, ko ? "시간" : "h"],
      [Math.floor(seconds / 60) % 60, ko ? "분" : "min"],
      [Math.floor(seconds) % 60, ko ? "초" : "s"],
    ];
    const from = parts.findIndex(([value]) => value > 0);
    if (from < 0) return ko ? "1초 미만" : "< 1 s";
    return parts
      .slice(from, from + 2)
      .filter(([value], at) => at === 0 || value)
      .map(([value, unit]) => `${value}${ko ? "" : " "}${unit}`)
      .join(" ");
  },
};

/** A card with a heading; `side` is what stands at its right. */
export function card(title, side, ...children) {
  return el("section", { class: "card" }, el("header", {}, el("h2", {}, title), side), ...children);
}

/** Buttons for language and theme, in the language that they lead to. */
export function prefButtons() {
  const ko = prefs.lang === "ko";
  const dark = prefs.theme === "dark";
  return [
    el(
      "button",
      { type: "button", lang: ko ? "en" : "ko", "data-switch": "lang", onclick: () => setLang(ko ? "en" : "ko") },
      ko ? "English" : "한국어",
    ),
    el(
      "button",
      {
        type: "button",
        "data-switch": "theme",
        "aria-label": t(dark ? "theme.light" : "theme.dark"),
        title: t(dark ? "theme.light" : "theme.dark"),
        onclick: () => setTheme(dark ? "light" : "dark"),
      },
      dark ? "☀" : "☾",
    ),
  ];
}
