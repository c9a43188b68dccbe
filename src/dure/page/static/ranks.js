// Ranks × time: each step's phases per rank, from the whole run down to one step, and who waits for whom.

import { PHASES, straggler } from "./bins.js";
import { drawBins, drawGantt, meetings, MOST_IN_TIME, PARTS } from "./ranks_canvas.js";
import { blank, card, colour, el, fmt, t } from "./ui.js";

const LEAST = 4;
const LAST = 30;
const COLUMNS = [...PHASES, "wait", "span"];

export class RanksView {
  constructor(context) {
    this.context = context;
    this.range = null; // the whole run
    this.follows = false;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "data-view": "ranks" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.stage = el("div", { class: "stage" }, this.canvas, this.tip);
    this.words = el("p", { class: "small muted" });
    this.verdict = el("p", { class: "notice", role: "status", "data-verdict": "" });
    this.table = el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("ranks.who") });
    const legend = PARTS.map((name) => el("li", {}, el("span", { class: "swatch", style: { background: `var(--${name})` } }), t(`phase.${name}`)));
    this.root = el(
      "div",
      { class: "view" },
      card(t("ranks.title"), this.#buttons(), this.words, this.stage, el("ul", { class: "legend" }, legend), el("p", { class: "small muted" }, t("ranks.hint"))),
      card(t("ranks.who"), null, this.verdict, this.table),
    );
    this.root.querySelector(".legend").style.marginTop = "0.6rem";
    this.#listen();
    this.resizer = new ResizeObserver(() => this.#paint());
    this.resizer.observe(this.stage);
  }

  destroy() {
    this.resizer.disconnect();
  }

  async update(run) {
    this.run = run;
    const stamp = `${run.id}:${run.state.steps[1]}:${document.documentElement.lang}:${document.documentElement.dataset.theme}`;
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    if (!this.range || this.follows || !this.bins) await this.#fetch();
    else this.#paint(); // the part of the run that is shown has become a smaller one
  }

  #buttons() {
    const button = (key, action) => el("button", { type: "button", onclick: action }, t(key));
    return el(
      "div",
      { class: "zoom" },
      button("ranks.in", () => this.#zoom(0.5)),
      button("ranks.out", () => this.#zoom(2)),
      button("ranks.last", () => this.#last()),
      button("ranks.all", () => this.#set(null)),
    );
  }

  get #all() {
    return this.run.state.steps;
  }

  get #shown() {
    const [first, end] = this.#all;
    if (this.follows) return [Math.max(first, end - LAST), end];
    return this.range || [first, end];
  }

  #last() {
    this.follows = true;
    this.range = null;
    this.#fetch();
  }

  #set(range) {
    const [first, end] = this.#all;
    this.follows = false;
    if (range) {
      const length = Math.max(LEAST, Math.min(end - first, Math.round(range[1] - range[0])));
      const from = Math.max(first, Math.min(Math.round(range[0]), end - length));
      range = length >= end - first ? null : [from, from + length];
    }
    this.range = range;
    this.#fetch();
  }

  #zoom(factor, at = 0.5) {
    const [from, to] = this.#shown;
    const step = from + (to - from) * at;
    const length = Math.max(LEAST, (to - from) * factor);
    this.#set([step - length * at, step + length * (1 - at)]);
  }

  #move(share) {
    const [from, to] = this.#shown;
    const shift = Math.round((to - from) * share) || Math.sign(share);
    this.#set([from + shift, to + shift]);
  }

  async #fetch() {
    if (this.fetching) {
      this.again = true;
      return;
    }
    this.fetching = true;
    const began = performance.now();
    try {
      const [from, to] = this.#shown;
      if (to > from) {
        const bins = Math.max(50, Math.min(1400, Math.round(this.stage.clientWidth - 70)));
        this.bins = await this.context.source.window(this.run.id, { from, to, bins, columns: COLUMNS, stats: ["mean"] });
        this.#paint();
        this.#tell();
        this.canvas.dataset.drawn = `${from}-${to}`;
        this.canvas.dataset.ms = (performance.now() - began).toFixed(1);
      }
    } catch {
      this.stamp = null; // the page says that its server does not answer; what was drawn stays
    } finally {
      this.fetching = false;
    }
    if (this.again) {
      this.again = false;
      await this.#fetch();
    }
  }

  #paint() {
    const { bins, canvas } = this;
    const width = this.stage.clientWidth;
    if (!bins || !width) return;
    const rows = Math.max(1, bins.ranks.length);
    const rowHeight = Math.max(16, Math.min(64, Math.floor(430 / rows)));
    const height = 30 + rows * rowHeight + 24;
    const ctx = blank(canvas, width, height);
    const colours = Object.fromEntries(["ink", "muted", "line", "card", "sunk", "warn", "accent", "font", ...PARTS].map((name) => [name, colour(name)]));
    const inTime = bins.width === 1 && bins.bins <= MOST_IN_TIME;
    this.shape = { width, height, rowHeight, left: 68, top: 30, right: width - 4, rank: (rank) => t("now.rank", { rank }) };
    if (inTime) drawGantt(ctx, this.shape, bins, colours);
    else drawBins(ctx, this.shape, bins, colours);
    this.#track(ctx, colours);
    const [from, to] = [bins.from, Math.min(bins.to, this.#all[1])];
    const told = { from: fmt.whole(from), to: fmt.whole(to - 1), width: fmt.whole(bins.width), ranks: bins.ranks.length };
    canvas.setAttribute("aria-label", t("ranks.canvas", told));
    this.words.textContent = t(inTime ? "ranks.gantt" : bins.width === 1 ? "ranks.raw" : "ranks.bins", told);
  }

  /** Which part of the run is shown. */
  #track(ctx, colours) {
    const { left, right, height } = this.shape;
    const [first, end] = this.#all;
    const [from, to] = this.#shown;
    const scale = (right - left) / Math.max(1, end - first);
    ctx.fillStyle = colours.sunk;
    ctx.beginPath();
    ctx.roundRect(left, height - 10, right - left, 6, 3);
    ctx.fill();
    ctx.fillStyle = colours.accent;
    ctx.beginPath();
    ctx.roundRect(left + (from - first) * scale, height - 10, Math.max(6, (to - from) * scale), 6, 3);
    ctx.fill();
  }

  #tell() {
    const { bins } = this;
    const late = straggler(bins);
    this.verdict.classList.toggle("good", !late);
    this.verdict.textContent = late
      ? t("ranks.late", { rank: late.rank, often: fmt.percent(late.often), ms: fmt.ms(late.behind_ms * 1000) })
      : t("ranks.nobody");
    this.verdict.dataset.verdict = late ? String(late.rank) : "";
    const head = ["", "phase.step", ...PHASES.map((name) => `phase.${name}`), "phase.wait", "ranks.mix"];
    const rows = bins.ranks.slice(0, 64).map((rank) => {
      const mean = Object.fromEntries(COLUMNS.map((name) => [name, average(bins.get(rank, name, "mean"))]));
      const isLate = late?.rank === rank;
      return el(
        "tr",
        { class: isLate ? "late-row" : "" },
        el("th", { scope: "row" }, t("now.rank", { rank }), isLate && el("span", { class: "small" }, ` · ${t("ranks.late.mark")}`)),
        ...["span", ...PHASES, "wait"].map((name) => el("td", { class: "num" }, fmt.ms(mean[name]))),
        el("td", {}, mix(mean)),
      );
    });
    this.table.replaceChildren(
      el("table", {}, el("caption", { class: "hidden-visually" }, t("ranks.mean")), el("thead", {}, el("tr", {}, head.map((key, at) => (key ? el("th", { scope: "col", class: at && key !== "ranks.mix" ? "num" : "" }, t(key)) : el("td", {}))))), el("tbody", {}, rows)),
    );
  }

  #listen() {
    const { canvas } = this;
    const share = (event) => {
      const { left, right } = this.shape;
      return Math.max(0, Math.min(1, (event.offsetX - left) / (right - left)));
    };
    canvas.addEventListener("wheel", (event) => {
      if (!this.shape) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.#move(event.deltaX / 600);
      else this.#zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, share(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const done = { "+": () => this.#zoom(0.5), "=": () => this.#zoom(0.5), "-": () => this.#zoom(2), ArrowLeft: () => this.#move(-0.2), ArrowRight: () => this.#move(0.2), 0: () => this.#set(null), End: () => this.#last() }[event.key];
      if (!done) return;
      event.preventDefault();
      done();
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.held = { x: event.offsetX, shown: this.#shown };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => {
      this.held = null;
      canvas.classList.remove("drag");
    });
    canvas.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.shape) return;
      if (this.held && Math.abs(event.offsetX - this.held.x) > 3) {
        canvas.classList.add("drag");
        const [from, to] = this.held.shown;
        const shift = ((this.held.x - event.offsetX) / (this.shape.right - this.shape.left)) * (to - from);
        this.#set([from + shift, to + shift]);
      } else this.#hover(event);
    });
  }

  #hover(event) {
    const { bins, shape } = this;
    const row = Math.floor((event.offsetY - shape.top) / shape.rowHeight);
    if (!bins || event.offsetX < shape.left || row < 0 || row >= bins.ranks.length) {
      this.tip.hidden = true;
      return;
    }
    const rank = bins.ranks[row];
    let bin;
    if (bins.width === 1 && bins.bins <= MOST_IN_TIME) {
      const { times, begin, end } = meetings(bins);
      const time = begin + ((event.offsetX - shape.left) / (shape.right - shape.left)) * (end - begin);
      bin = times.findIndex((one, at) => one + (bins.get(rank, "update", "mean")[at] || 0) >= time);
      if (bin < 0) bin = bins.bins - 1;
    } else bin = Math.min(bins.bins - 1, Math.floor(((event.offsetX - shape.left) / (shape.right - shape.left)) * bins.bins));
    const value = (name) => bins.get(rank, name, "mean")[bin];
    const step = bins.step(bin);
    const name = bins.width > 1 ? `${fmt.whole(step)}–${fmt.whole(step + bins.width - 1)}` : fmt.whole(step);
    const lines = [`${t("now.rank", { rank })} · ${t("series.step")} ${name}`, `${t("phase.step")} ${fmt.ms(value("span"))}`];
    for (const phase of [...PHASES, "wait"]) if (value(phase) > 0) lines.push(`${t(`phase.${phase}`)} ${fmt.ms(value(phase))}`);
    this.tip.textContent = lines.join("\n");
    this.tip.hidden = false;
    const x = Math.min(event.offsetX + 14, shape.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(0, x)}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }
}

function average(values) {
  let sum = 0;
  let count = 0;
  for (const value of values) {
    if (Number.isFinite(value)) {
      sum += value;
      count += 1;
    }
  }
  return count ? sum / count : NaN;
}

function mix(mean) {
  const parts = { ...mean, exchange: Math.max(0, mean.exchange - (mean.wait || 0)) };
  const names = PARTS.filter((name) => name !== "other" && parts[name] > 0);
  const total = names.reduce((sum, name) => sum + parts[name], 0) || 1;
  return el("div", { class: "mix", role: "img", "aria-label": names.map((name) => `${t(`phase.${name}`)} ${fmt.percent(parts[name] / total)}`).join(", ") }, names.map((name) => el("span", { style: { width: `${(100 * parts[name]) / total}%`, background: `var(--${name})` } })));
}
