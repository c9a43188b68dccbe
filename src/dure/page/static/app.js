// The page: which run, which view, and asking for what is new about once a second.

import { CompareView } from "./compare.js";
import { NowView } from "./now.js";
import { ProofView } from "./proof.js";
import { RanksView } from "./ranks.js";
import { SamplesView } from "./samples.js";
import { SavedSource, ServerSource } from "./source.js";
import { el, fmt, onPrefs, prefButtons, startPrefs, svg, t } from "./ui.js";
import { WORDS } from "./words.js";

const VIEWS = { now: NowView, ranks: RanksView, samples: SamplesView, proof: ProofView, compare: CompareView };
const LOOK_MS = 1000;
const IDLE_MS = 5000;
/** A look that took long, as on a busy machine, is followed by so many times as long without one. */
const REST = 15;
const KINDS = ["team", "proof", "audit", "eval", "storage", "weights", "checkpoint", "memory", "note", "end"];

class App {
  constructor(root, source) {
    this.root = root;
    this.context = { source, runs: [] };
    this.lost = false;
    onPrefs(() => this.build());
    addEventListener("hashchange", () => this.build());
    document.addEventListener("visibilitychange", () => !document.hidden && this.look());
  }

  async start() {
    const { runs, first } = await this.context.source.runs();
    this.context.runs = runs;
    this.choose(first);
    await this.look();
  }

  choose(id) {
    this.run = { id, state: null, until: "", items: {} };
    for (const kind of KINDS) this.run.items[kind] = [];
    this.build();
  }

  get tab() {
    const name = location.hash.slice(1);
    return name in VIEWS ? name : "now";
  }

  build() {
    this.view?.destroy();
    this.view = new VIEWS[this.tab](this.context);
    this.pill = el("span", { class: "pill", role: "status" });
    this.notices = el("div", { class: "view", "aria-live": "polite" });
    this.footer = el("footer", {});
    const focused = document.activeElement?.getAttribute("data-tab");
    const switched = document.activeElement?.getAttribute("data-switch");
    this.root.replaceChildren(
      el("a", { class: "hidden-visually", href: `#${this.tab}`, onclick: () => this.main.focus() }, t("app.skip")),
      el("header", { class: "top" }, this.#bar(), this.#tabs()),
      (this.main = el("main", { id: "view", tabindex: -1, role: "tabpanel", "aria-labelledby": `tab-${this.tab}` }, this.notices, this.view.root)),
      this.footer,
    );
    const tabs = this.root.querySelector(".tabs");
    const chosen = tabs.querySelector("[aria-selected=true]");
    tabs.scrollLeft = chosen.offsetLeft - (tabs.clientWidth - chosen.offsetWidth) / 2; // on a phone, not all are seen
    if (focused) this.root.querySelector(`[data-tab="${this.tab}"]`).focus();
    if (switched) this.root.querySelector(`[data-switch="${switched}"]`).focus();
    this.refresh();
  }

  #bar() {
    const { runs } = this.context;
    const choice = el("select", { "aria-label": t("app.runs"), onchange: () => this.choose(choice.value) || this.look() }, runs.map((one) => el("option", { value: one.id }, one.id)));
    choice.value = this.run.id;
    return el(
      "div",
      { class: "bar" },
      el("h1", { class: "brand" }, mark(), el("span", { class: "name" }, "dure")),
      el("div", { class: "run-name" }, choice, this.pill),
      el("span", { class: "spacer" }),
      el("div", { class: "tools" }, prefButtons()),
    );
  }

  #tabs() {
    const names = Object.keys(VIEWS);
    const bar = el("div", { class: "tabs", role: "tablist", "aria-label": t("app.tabs") });
    names.forEach((name, at) => {
      const chosen = name === this.tab;
      const go = (to) => {
        location.hash = names[(to + names.length) % names.length];
      };
      bar.append(
        el(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "data-tab": name,
            "aria-selected": String(chosen),
            "aria-controls": "view",
            tabindex: chosen ? 0 : -1,
            onclick: () => go(at),
            onkeydown: (event) => {
              const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
              if (to === undefined) return;
              event.preventDefault();
              go(to);
            },
          },
          t(`tab.${name}`),
        ),
      );
    });
    return bar;
  }

  /** Ask for what is new, and again a little later. */
  async look() {
    clearTimeout(this.timer);
    const { source } = this.context;
    const { run } = this;
    const began = performance.now();
    try {
      const state = await source.state(run.id, run.until);
      if (run !== this.run) return;
      if (state.fresh) for (const kind of KINDS) run.items[kind] = [];
      for (const item of state.items) run.items[item.kind]?.push(item);
      run.state = state;
      run.until = state.until;
      this.lost = false;
    } catch (error) {
      this.lost = true;
      console.debug("dure: no answer", String(error)); // shown as a notice
    }
    await this.refresh();
    if (run !== this.run) return; // the reader chose another, which is looked at since
    const goesOn = run.state?.condition === "running" || run.state?.reading;
    const wait = goesOn ? Math.min(IDLE_MS, Math.max(LOOK_MS, REST * (performance.now() - began))) : IDLE_MS;
    clearTimeout(this.timer);
    if (!source.saved && !document.hidden) this.timer = setTimeout(() => this.look(), wait);
  }

  async refresh() {
    const { state } = this.run;
    if (!state) return;
    const kinds = { running: "live", finished: "good", stopped: "warn", failed: "bad", gone: "bad", empty: "" };
    const condition = t(`is.${state.condition}`);
    if (condition !== this.pill.textContent) {
      this.pill.textContent = condition; // a live region: told once
      this.pill.className = `pill ${kinds[state.condition]}`;
    }
    document.title = `${state.name} · dure`;
    this.#tellNotices(state);
    this.#tellFooter();
    if (!state.team.ranks) return;
    try {
      await this.view.update(this.run);
      this.main.setAttribute("data-drawn-ms", performance.now().toFixed(0));
    } catch (error) {
      this.lost = true;
      console.debug("dure: no answer", String(error));
    }
  }

  #tellNotices(state) {
    const { source } = this.context;
    const told = [];
    if (this.lost) told.push(["bad", t("app.lost")]);
    if (state.condition === "gone") told.push(["bad", t("app.gone")]);
    if (!state.team.ranks && state.condition !== "gone") told.push(["", t("app.empty")]);
    if (state.reading) told.push(["good", t("app.reading", { steps: fmt.whole(state.steps[1]) })]);
    if (state.skipped) told.push(["", t("app.skipped", { count: fmt.whole(state.skipped) })]);
    if (source.saved && source.finest(this.run.id) > 1) told.push(["", t("app.coarse", { width: fmt.whole(source.finest(this.run.id)) })]);
    const key = JSON.stringify(told);
    if (key === this.notices.dataset.key) return;
    this.notices.dataset.key = key;
    this.notices.hidden = told.length === 0;
    this.notices.replaceChildren(...told.map(([kind, text]) => el("p", { class: `notice ${kind}` }, text)));
  }

  #tellFooter() {
    if (this.footer.childElementCount) return;
    const { source } = this.context;
    if (source.saved) {
      this.footer.append(el("span", {}, t("app.saved", { made: source.made })));
      return;
    }
    const link = (name, words) => el("a", { href: source.export(this.run.id, name, {}), download: "" }, words);
    this.footer.append(
      el("span", {}, `${t("app.exports")}:`),
      link("steps.csv", "CSV"),
      link("trace.json", "Chrome / Perfetto"),
      link("tensorboard", "TensorBoard"),
      el("a", { href: `/metrics?${new URLSearchParams({ run: this.run.id })}` }, "Prometheus"),
    );
    this.footer.classList.add("exports");
  }
}

function mark() {
  const lines = "M7 9v4.5a4.5 4.5 0 0 0 9 0V9M16 13.5a4.5 4.5 0 0 0 9 0V9M11.5 18v1.5a4.5 4.5 0 0 0 9 0V18M16 24v2";
  return svg(
    "svg",
    { viewBox: "0 0 32 32", "aria-hidden": "true" },
    svg("rect", { width: 32, height: 32, rx: 8, fill: "#17625e" }),
    svg("path", { d: lines, fill: "none", stroke: "#fffefb", "stroke-width": 2.2, "stroke-linecap": "round" }),
  );
}

const saved = document.getElementById("saved");
const source = saved ? new SavedSource(saved.textContent) : new ServerSource();
startPrefs(WORDS, source.lang);
const app = new App(document.getElementById("app"), source);
app.start();
