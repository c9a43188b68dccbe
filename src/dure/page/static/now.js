// What the run is at now: the team, progress, loss, speed, and what happened, on one axis of steps.

import { Lines } from "./charts.js";
import { drawTeam } from "./team.js";
import { card, colour, el, fmt, redraw, t } from "./ui.js";

export class NowView {
  constructor(context) {
    this.context = context;
    const zoom = { onZoom: (from, to) => this.#range([from, to]), onReset: () => this.#range(null) };
    this.loss = new Lines({ height: 270, label: t("now.loss.chart"), ...zoom });
    this.speed = new Lines({ height: 170, label: t("now.speed.chart"), ...zoom });
    this.range = null;
    this.team = el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("now.team") });
    this.teamLine = el("span", { class: "small muted" });
    this.tiles = el("div", { class: "tiles" });
    this.late = el("p", { class: "notice", role: "status" });
    this.marks = el("ul", { class: "marks" });
    this.noMarks = el("p", { class: "muted small" }, t("now.marks.none"));
    const team = card(t("now.team"), this.teamLine, this.team);
    team.classList.add("team");
    this.root = el(
      "div",
      { class: "view" },
      this.late,
      this.tiles,
      el("div", { class: "wide-narrow" }, team, card(t("now.marks"), null, el("div", { class: "marks-box", tabindex: 0, role: "region", "aria-label": t("now.marks") }, this.marks), this.noMarks)),
      card(t("now.loss.chart"), el("span", { class: "small muted" }, t("now.drag")), this.loss.root),
      card(t("now.speed.chart"), null, this.speed.root),
    );
  }

  destroy() {
    this.loss.destroy();
    this.speed.destroy();
  }

  #range(range) {
    this.range = range;
    this.drawn = null;
    this.#draw();
  }

  async update(run) {
    this.run = run;
    const { state } = run;
    const late = state.straggler ? t("now.late", { rank: state.straggler.rank, ms: fmt.ms(state.straggler.behind_ms * 1000) }) : "";
    if (late !== this.late.textContent) this.late.textContent = late; // a live region: told once
    const team = JSON.stringify([state.nodes.map((node) => [node.node, node.host, node.ranks.map((one) => [one.rank, one.shards.length, one.requests, Math.round(one.memory / 1e7)])]), state.straggler?.rank]);
    if (team !== this.drawnTeam) {
      this.drawnTeam = team;
      this.team.replaceChildren(drawTeam(state));
      const { ranks, shards, threads, device } = state.team;
      this.teamLine.textContent = ranks ? t("now.team.line", { ranks, shards, threads, device, nodes: state.nodes.length }) : "";
    }
    const memory = state.nodes.flatMap((node) => node.ranks).map((one) => one.memory);
    const { length: proofs } = run.items.proof;
    redraw(this.tiles, [state.condition, state.progress, memory, proofs, run.items.eval.length, state.team.sync], () => tiles(run));
    const happened = marks(run);
    redraw(this.marks, happened, () => {
      this.noMarks.hidden = happened.length > 0;
      return happened.slice(-60).reverse().map(markRow);
    });
    await this.#draw();
  }

  async #draw() {
    const { run } = this;
    const [first, end] = this.range || run.state.steps;
    const stamp = `${run.state.id}:${first}:${end}:${colour("bg")}:${document.documentElement.lang}`;
    if (stamp === this.drawn || end <= first) return;
    const bins = Math.min(1200, Math.max(200, this.loss.root.clientWidth));
    const own = run.state.team.sync === false ? undefined : [0];
    const query = { from: first, to: end, bins, columns: ["loss", "samples", "span"], ranks: own, stats: ["min", "max", "mean"] };
    const found = await this.context.source.window(run.id, query);
    this.drawn = stamp;
    if (found.ranks.length === 0) return;
    this.#drawLoss(found, run);
    const rank = found.ranks[0];
    const xs = steps(found);
    const span = found.get(rank, "span", "mean");
    const samples = found.get(rank, "samples", "mean");
    const speed = Array.from(xs, (_, at) => plain((samples[at] / span[at]) * 1e6));
    this.speed.show([{ label: t("series.speed"), color: colour("accent") }], [xs, speed], vertical(run));
  }

  #drawLoss(found, run) {
    const xs = steps(found);
    const series = [];
    const data = [xs];
    const palette = [colour("compute"), colour("data"), colour("update"), colour("save")];
    found.ranks.forEach((rank, at) => {
      const color = palette[at % palette.length];
      const name = found.ranks.length > 1 ? `${t("series.loss")} ${t("now.rank", { rank })}` : t("series.loss");
      series.push({ label: name, color, width: 2 });
      data.push(Array.from(found.get(rank, "loss", "mean"), plain));
      if (found.width > 1 && found.ranks.length === 1) {
        const soft = `color-mix(in srgb, ${color} 22%, transparent)`;
        series.push({ label: "max", color: "transparent", width: 0, band: soft }, { label: "min", color: "transparent", width: 0 });
        data.push(Array.from(found.get(rank, "loss", "max"), plain), Array.from(found.get(rank, "loss", "min"), plain));
      }
    });
    const evals = run.items.eval.filter((one) => one.rank === 0 && one.step >= found.from && one.step <= found.to);
    const names = [...new Set(evals.flatMap((one) => Object.keys(one.metrics)))].slice(0, 3);
    names.forEach((name, at) => {
      const values = new Array(xs.length).fill(null);
      for (const one of evals) values[Math.min(xs.length - 1, Math.floor((one.step - found.from) / found.width))] = one.metrics[name] ?? null;
      series.push({
        label: t("series.eval", { name }),
        color: [colour("data"), colour("update"), colour("save")][at],
        points: true,
        spanGaps: true,
        dash: [6, 5],
        scale: name === "loss" ? "y" : "metric",
      });
      data.push(values);
    });
    this.loss.show(series, data, vertical(run));
  }
}

function steps(found) {
  return Array.from({ length: found.bins }, (_, at) => found.step(at));
}

function plain(value) {
  return Number.isFinite(value) ? value : null;
}

function tile(label, value, note, kind = "", extra = null) {
  const long = typeof value === "string" && value.length > 9 ? " word" : "";
  return el(
    "div",
    { class: `tile ${kind}` },
    el("span", { class: "label" }, label),
    el("span", { class: `value${long}` }, value),
    note && el("span", { class: "note" }, note),
    extra,
  );
}

function tiles(run) {
  const { state } = run;
  const { step = 0, steps: all = 0, epoch = -1, loss, lr, samples_per_second: speed, step_seconds: each, seconds_left: left } = state.progress;
  const share = all ? Math.min(1, step / all) : 0;
  const meter = el("div", { class: "meter", role: "progressbar", "aria-label": t("now.progress"), "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100 }, el("span", { style: { width: `${share * 100}%` } }));
  const judged = run.items.eval.filter((one) => one.rank === 0).at(-1);
  const memory = state.nodes.flatMap((node) => node.ranks).map((one) => one.memory || 0);
  const largest = Math.max(0, ...memory);
  const total = memory.reduce((sum, one) => sum + one, 0);
  const over = state.condition === "finished" || step >= all;
  return [
    tile(t("now.progress"), fmt.percent(share), `${t("now.step", { step: fmt.whole(step), steps: fmt.whole(all) })} · ${t("now.epoch", { epoch: epoch + 1 })}`, "", meter),
    tile(t("now.loss"), fmt.number(loss), lr === null || lr === undefined ? "" : t("now.lr", { lr: fmt.number(lr, 3) })),
    ...heldOut(judged),
    tile(t("now.speed"), speed ? fmt.number(speed, 4) : "–", `${t("now.persecond")}${each ? ` · ${t("now.perstep", { ms: fmt.ms(each * 1e6) })}` : ""}`),
    tile(t("now.left"), over ? t("now.done") : fmt.duration(left), over ? "" : t("now.at")),
    ...(largest ? [tile(t("now.memory"), fmt.bytes(largest), t("now.memory.note", { total: fmt.bytes(total) }))] : []),
    proofTile(run),
  ];
}

function heldOut(judged) {
  if (!judged) return [];
  const named = Object.entries(judged.metrics).sort(([one]) => (one === "loss" ? 1 : -1));
  const [name, value] = named[0];
  const rest = named.slice(1).map(([other, told]) => `${other} ${fmt.number(told)}`);
  const told = name === "accuracy" ? fmt.percent(value) : fmt.number(value);
  return [tile(`${t("now.heldout")}: ${name}`, told, [...rest, t("now.after", { step: fmt.whole(judged.step + 1) })].join(" · "))];
}

function proofTile(run) {
  if (run.state.team.sync === false) return tile(t("now.same"), t("now.apart"), "");
  const last = run.items.proof.at(-1);
  if (!last) return tile(t("now.same"), t("now.unproved"), "");
  const wrong = run.items.proof.some((one) => !one.agree);
  return tile(t("now.same"), t(wrong ? "now.differ" : "now.proved"), t("now.proved.note", { step: fmt.whole(last.step + 1) }), wrong ? "bad" : "good");
}

/** What happened, in the order of steps: {step, kind, text}. */
export function marks(run) {
  const { state, items } = run;
  const seen = new Set();
  const found = [];
  const add = (step, kind, text) => {
    const key = `${step}:${text}`;
    if (!seen.has(key)) found.push({ step, kind, text });
    seen.add(key);
  };
  for (const one of state.restarts) add(one.step, "fault", t("mark.restart", one));
  for (const one of items.team) if (one.session > 0) add(one.start, "back", t("mark.resume", one));
  for (const one of state.errors) add(state.progress.step, "fault", t("mark.error", one));
  for (const one of items.proof) if (!one.agree) add(one.step, "fault", t("mark.differ"));
  for (const one of items.checkpoint) {
    if (one.name === null) add(one.step, "fault", t("mark.unsaved", { trouble: one.trouble ?? "" }));
    else add(one.step, "saved", t("mark.saved", { size: fmt.bytes(one.bytes), seconds: fmt.ms(one.seconds * 1e6) }));
  }
  for (const one of items.note) add(one.after + 1, "note", one.text);
  return found.sort((one, other) => one.step - other.step);
}

const SIGNS = { fault: "✕", back: "↻", saved: "▣", note: "·" };

function markRow(mark) {
  return el(
    "li",
    {},
    el("span", { class: `sign ${mark.kind}`, "aria-hidden": "true" }, SIGNS[mark.kind]),
    el("span", { class: "muted num" }, `${t("series.step")} ${fmt.whole(mark.step)}`),
    el("span", {}, mark.text),
  );
}

function vertical(run) {
  const colours = { fault: colour("bad"), back: colour("good"), saved: colour("save") };
  return marks(run)
    .filter((mark) => mark.kind in colours)
    .slice(-200)
    .map((mark) => ({ step: mark.step, color: colours[mark.kind], solid: mark.kind === "fault" }));
}
