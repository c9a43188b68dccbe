// Two or more runs over each other, and what differs in what they were told.

import { Lines } from "./charts.js";
import { card, colour, el, fmt, rankColour, t } from "./ui.js";

const MOST = 6;

export class CompareView {
  constructor(context) {
    this.context = context;
    this.chosen = null;
    this.chart = new Lines({ height: 320, label: t("compare.title"), onZoom: (from, to) => this.#range([from, to]), onReset: () => this.#range(null) });
    this.range = null;
    this.choices = el("fieldset", { class: "card" });
    this.tables = el("div", { class: "view" });
    this.root = el("div", { class: "view" }, this.choices, card(t("compare.title"), el("span", { class: "small muted" }, t("now.drag")), this.chart.root), this.tables);
  }

  destroy() {
    this.chart.destroy();
  }

  #range(range) {
    this.range = range;
    this.#draw();
  }

  async update(run) {
    const stamp = `${this.context.runs.map((one) => one.id).join("|")}:${run.state.steps[1]}:${document.documentElement.lang}:${colour("bg")}`;
    if (stamp === this.stamp) return;
    if (!this.chosen) {
      this.chosen = [...new Set([run.id, ...this.context.runs.map((one) => one.id)])].slice(0, 2);
      this.#offer();
    }
    await this.#draw();
    this.stamp = stamp;
  }

  #offer() {
    const runs = this.context.runs;
    const boxes = runs.slice(0, 40).map((one) => {
      const box = el("input", { type: "checkbox", value: one.id, onchange: () => this.#choose(box) });
      box.checked = this.chosen.includes(one.id);
      return el("label", {}, box, el("span", { class: "swatch", style: { background: this.#colour(one.id) } }), one.id);
    });
    this.choices.replaceChildren(
      el("legend", { class: "hidden-visually" }, t("compare.choose")),
      el("header", {}, el("h2", {}, t("compare.choose"))),
      el("div", { class: "choices" }, boxes),
      ...(runs.length < 2 ? [el("p", { class: "muted" }, t("compare.alone"))] : []),
    );
  }

  #colour(id) {
    const at = this.chosen.indexOf(id);
    return at < 0 ? "transparent" : rankColour(at);
  }

  #choose(box) {
    if (box.checked) this.chosen = [...this.chosen, box.value].slice(-MOST);
    else this.chosen = this.chosen.filter((one) => one !== box.value);
    const focused = box.value;
    this.#offer();
    this.choices.querySelectorAll("input").forEach((one) => one.value === focused && one.focus());
    this.#draw();
  }

  async #draw() {
    const { source } = this.context;
    const states = await Promise.all(this.chosen.map((id) => source.state(id, "")));
    const end = Math.max(1, ...states.map((state) => state.steps[1]));
    const [from, to] = this.range || [0, end];
    const bins = Math.min(1000, Math.max(200, this.chart.root.clientWidth));
    const windows = await Promise.all(this.chosen.map((id) => source.window(id, { from, to, bins, columns: ["loss"], ranks: [0], stats: ["mean"] })));
    const width = Math.max(1, ...windows.map((one) => one.width));
    const xs = Array.from({ length: Math.ceil((to - from) / width) }, (_, at) => from + at * width);
    const series = this.chosen.map((id, at) => ({ label: id, color: rankColour(at), width: 2, dash: at ? [8, 3 + 2 * at] : undefined }));
    const data = windows.map((one) => {
      const values = one.ranks.length ? one.get(one.ranks[0], "loss", "mean") : [];
      const out = new Array(xs.length).fill(null);
      for (let at = 0; at < values.length; at += 1) {
        const place = Math.floor((one.step(at) - from) / width);
        if (place >= 0 && place < out.length && Number.isFinite(values[at])) out[place] = values[at];
      }
      return out;
    });
    this.chart.show(series, [xs, ...data]);
    this.tables.replaceChildren(results(states), settings(states));
  }
}

function results(states) {
  const rows = [
    [t("now.loss"), (state) => fmt.number(state.progress.loss)],
    [t("now.heldout"), (state) => Object.entries(state.summary?.metrics ?? {}).map(([name, value]) => `${name} ${fmt.number(value)}`).join(" · ") || "–"],
    [t("now.persecond"), (state) => fmt.number(state.summary?.samples_per_second ?? state.progress.samples_per_second)],
    [t("compare.ranks"), (state) => fmt.whole(state.team.ranks)],
    [t("compare.steps"), (state) => fmt.whole(state.progress.step)],
    [t("proof.recipe"), (state) => (state.team.recipe ?? "–").slice(0, 16), true],
    [t("proof.final"), (state) => (state.summary?.weights_sha256 ?? "–").slice(0, 16), true],
  ];
  const prints = new Set(states.map((state) => state.summary?.weights_sha256));
  const same = states.length > 1 && prints.size === 1 && !prints.has(undefined);
  return card(t("compare.results"), same && el("span", { class: "pill good" }, t("compare.same")), table(states, rows));
}

function settings(states) {
  const flat = states.map((state) => flatten(state.job));
  const keys = [...new Set(flat.flatMap((one) => [...one.keys()]))].sort();
  const differing = keys.filter((key) => new Set(flat.map((one) => one.get(key))).size > 1);
  if (states.length < 2 || !differing.length) return card(t("compare.settings"), null, el("p", { class: "muted" }, t("compare.equal")));
  return card(t("compare.settings"), null, table(states, differing.map((key) => [key, (_, at) => flat[at].get(key) ?? "–", true])));
}

function table(states, rows) {
  return el(
    "div",
    { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("compare.results") },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("compare.setting")), states.map((state) => el("th", { scope: "col" }, state.id)))),
      el("tbody", {}, rows.map(([name, value, mono]) => el("tr", {}, el("th", { scope: "row" }, name), states.map((state, at) => el("td", { class: mono ? "mono" : "num-start" }, value(state, at)))))),
    ),
  );
}

function flatten(value, prefix = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${name}` : name, found);
  } else found.set(prefix, JSON.stringify(value));
  return found;
}
