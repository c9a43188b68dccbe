// What every chapter uses: elements, float32 arithmetic, charts, and how an experiment is started and drawn.

export const f32 = Math.fround;
export const add = (a, b) => f32(f32(a) + f32(b));
export const sub = (a, b) => f32(f32(a) - f32(b));
export const mul = (a, b) => f32(f32(a) * f32(b));
export const div = (a, b) => f32(f32(a) / f32(b));
export const COLORS = ["var(--r0)", "var(--r1)", "var(--r2)", "var(--r3)", "var(--r4)", "var(--r5)", "var(--r6)", "var(--r7)"];

// The shortest decimal that is this float32, as torch prints it; with fewer digits asked for, rounded to them.
export function shown(value, most = 9) {
  if (!Number.isFinite(value)) return String(value);
  for (let digits = 1; digits <= most; digits++) {
    const text = Number(value).toPrecision(digits);
    if (f32(Number(text)) === f32(value)) return String(Number(text));
  }
  return String(Number(Number(value).toPrecision(most)));
}
export const hex = (value) => {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0).toString(16).padStart(8, "0");
};
export const binary = (value) => parseInt(hex(value), 16).toString(2).padStart(32, "0");

export const pairwise = (numbers) => {
  let level = numbers.map(f32);
  while (level.length > 1) {
    const next = [];
    for (let i = 0; i < level.length; i += 2) next.push(i + 1 < level.length ? add(level[i], level[i + 1]) : level[i]);
    level = next;
  }
  return level[0];
};
export const leftToRight = (numbers) => numbers.map(f32).reduce((sum, each) => add(sum, each));

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "polyline", "polygon", "defs", "marker", "title"]);
export function el(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") { if (value) made.style.cssText = value; } // not as an attribute: the page's policy has no inline styles
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
export const put = (parent, ...children) => { parent.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false)); return parent; };
export const svg = (width, height, label, ...children) =>
  el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: width > 500 ? "wide" : null }, ...children);
export const dot = (rank) => el("span", { class: "dot", style: `background:${COLORS[rank % 8]}`, "aria-hidden": "true" });

export function slider(label, min, max, step, value, changed, format = String) {
  const output = el("output", {}, format(value));
  const input = el("input", { type: "range", min, max, step, value, oninput: () => { output.textContent = format(Number(input.value)); changed(Number(input.value)); } });
  return el("label", {}, label, input, output);
}
export function choice(label, options, value, changed) {
  const buttons = Object.entries(options).map(([key, text]) => el("button", { type: "button", "aria-pressed": String(key === value), onclick: (event) => {
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget)); // the button stays, and keeps the focus
    changed(key);
  } }, text));
  return el("div", { class: "switch", role: "group", "aria-label": label }, buttons);
}
export const table = (head, rows, sum = []) => el("div", { class: "scroll", tabindex: "0" }, el("table", { class: "nums" },
  head.length ? el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))) : null,
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell)))),
    sum.map((row) => el("tr", { class: "sum" }, row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell)))))));

// Round numbers between two, about so many.
export function rounds(from, to, most = 5) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  return Array.from({ length: Math.floor(to / each + 1e-9) - Math.ceil(from / each - 1e-9) + 1 }, (_, i) => Number(((Math.ceil(from / each - 1e-9) + i) * each).toPrecision(9)));
}
// Lines over steps: series = [{name, color, points: [[x, y]…], dashed}]; `marks` are the places named on the x axis.
export function lines(series, { width = 640, height = 260, label, x = "", y = "", from = null, to = null, marks = null, right = 90, dots = false } = {}) {
  const all = series.flatMap((each) => each.points);
  if (!all.length) return svg(width, height, label);
  const left = 46, top = 34, bottom = 38;
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [from ?? Math.min(...ys), to ?? Math.max(...ys)];
  if (y0 === y1) { y0 -= 0.5; y1 += 0.5; }
  const px = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  // Names at the right end of lines, pushed apart where they would overlap.
  const named = series.filter((each) => each.name).map((each) => ({ each, at: py(each.points.at(-1)[1]) })).sort((a, b) => a.at - b.at);
  named.forEach((n, i) => { if (i && n.at < named[i - 1].at + 15) n.at = named[i - 1].at + 15; });
  return svg(width, height, label,
    rounds(y0, y1).map((v) => el("g", {}, el("line", { class: "axis", x1: left, x2: width - right, y1: py(v), y2: py(v) }),
      el("text", { class: "soft", x: left - 8, y: py(v) + 5, "text-anchor": "end" }, String(v).replace("-", "−")))),
    el("text", { class: "soft", x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, x),
    el("text", { x: 4, y: 18 }, y),
    (marks ?? [x0, x1]).map((v) => el("text", { class: "soft", x: px(v), y: height - 18, "text-anchor": v === x0 && !marks ? "start" : v === x1 && !marks ? "end" : "middle" }, String(v))),
    series.map((each) => el("polyline", { points: each.points.map((p) => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join(" "), fill: "none",
      stroke: each.color, "stroke-width": 2.5, "stroke-dasharray": each.dashed ? "5 5" : null, "stroke-linejoin": "round" })),
    dots ? series.filter((each) => !each.dashed).map((each) => each.points.map((p) => el("circle", { cx: px(p[0]), cy: py(p[1]), r: 5, fill: each.color }))) : null,
    named.map(({ each, at }) => el("text", { x: width - right + 8, y: at + 4, style: `fill:${each.color}` }, each.name)));
}

// "How do we know?": the command, and the lines behind a drawing.
export function know(t, told) {
  const raw = [
    ...Object.values(told.commands ?? {}).map((command) => `$ ${command}`),
    ...(told.lines ?? []).map((line) => `${line.at.toFixed(2)} s  ${line.text}`),
    ...Object.values(told.rows ?? {}).flat().map((row) => JSON.stringify(row)),
    ...Object.entries(told.restarts ?? {}).flatMap(([, rows]) => rows.map((row) => JSON.stringify(row))),
    ...Object.entries(told.results ?? {}).map(([label, result]) => `${label}: ${JSON.stringify(result)}`),
  ];
  return el("details", { class: "know" }, el("summary", {}, t({ ko: "어떻게 아나요?", en: "How do we know?" })), el("pre", { tabindex: "0" }, raw.join("\n")));
}
export const knowArithmetic = (t, text) => el("details", { class: "know" }, el("summary", {}, t({ ko: "어떻게 아나요?", en: "How do we know?" })),
  el("p", {}, t({ ko: "이 쪽에서 32비트 부동소수점(float32)으로 방금 계산했습니다.", en: "Computed on this page just now, in 32-bit floating point (float32)." })), el("pre", { tabindex: "0" }, text));

const CALLS = { accept: "application/json", "content-type": "application/json", "x-dure-lesson": "1" };
async function call(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: CALLS, cache: "no-store" });
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(body.error ?? `HTTP ${reply.status}`);
  return body;
}

// A button that starts real ranks, and draws what they tell; in a lesson without a server, what was recorded.
export function experiment(t, lesson, { name, label, options = () => ({}), draw, extra = () => null }) {
  const status = el("p", { class: "status", role: "status" });
  const refused = el("p", { class: "status bad", role: "status" });
  const picture = el("div");
  const more = el("span");
  const badge = el("span", { class: "badge" });
  const recorded = lesson.recordings?.[name];
  const show = (told, live) => {
    put(badge, live ? t({ ko: "이 컴퓨터에서 방금", en: "just now, on this machine" }) : t({ ko: `녹화: ${told.recorded.date}, ${told.recorded.machine.replace(/(\d+) cores?$/, "코어 $1개")}`, en: `recorded ${told.recorded.date}, ${told.recorded.machine}` }));
    badge.className = `badge ${live ? "live" : "recorded"}`;
    put(picture, draw(told), know(t, told));
  };
  const button = el("button", { class: "act", type: "button", onclick: () => run() }, label);
  async function run() {
    button.disabled = true;
    status.className = "status";
    refused.textContent = "";
    try {
      const { id } = await call("api/experiments", { method: "POST", body: JSON.stringify({ name, arguments: options() }) });
      put(more, extra({ kill: (rank) => call(`api/experiments/${id}/kill`, { method: "POST", body: JSON.stringify({ rank }) }).catch((e) => { refused.textContent = e.message; }) }));
      let lines = [];
      for (;;) {
        const told = await call(`api/experiments/${id}?since=${lines.length}`);
        lines = told.lines = [...lines, ...told.lines];
        const last = lines.at(-1)?.text.replace(/^dure: /, "") ?? "";
        status.textContent = told.state === "running" ? `${told.seconds.toFixed(0)} s · ${last}` : "";
        show(told, true);
        if (told.state !== "running") {
          if (told.state !== "done") { status.className = "status bad"; status.textContent = told.trouble || told.state; }
          break;
        }
        await new Promise((wake) => setTimeout(wake, 700));
      }
    } catch (error) {
      status.className = "status bad";
      status.textContent = error.message;
    }
    put(more);
    button.disabled = false;
  }
  const start = lesson.live ? button : el("span", { class: "note" }, t({ ko: "서버 없이 열린 쪽입니다. 직접 실행하려면: ", en: "This page has no server behind it. To run it yourself: " }), el("code", {}, "dure lesson"));
  if (recorded) show(recorded, false);
  return el("div", {}, el("div", { class: "controls experiment" }, start, more, badge), status, refused, picture);
}
