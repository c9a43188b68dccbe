// Fingerprints by rank and step; storage; the exchange; checkpoints.

import { card, el, fmt, t } from "./ui.js";

const SHOWN = 12;

export class ProofView {
  constructor(context) {
    this.context = context;
    this.root = el("div", { class: "view" });
  }

  destroy() {}

  async update(run) {
    const stamp = JSON.stringify([run.items.proof.length, run.items.audit.length, run.state.nodes, run.state.checkpoints, run.state.steps, document.documentElement.lang]);
    if (stamp === this.drawn) return;
    const [first, end] = run.state.steps;
    const query = { from: first, to: Math.max(end, first + 1), bins: 400, columns: ["exchange", "wait"], stats: ["mean"] };
    const found = end > first ? await this.context.source.window(run.id, query) : null;
    this.drawn = stamp;
    this.root.replaceChildren(
      proofs(run),
      ...[audits(run)].filter(Boolean),
      el("div", { class: "two" }, storage(run), exchange(run, found)),
      checkpoints(run),
    );
  }
}

function proofs(run) {
  const { state, items } = run;
  if (state.team.sync === false) return card(t("proof.title"), null, el("p", { class: "muted" }, t("proof.apart")));
  const steps = [...new Set(items.proof.map((one) => one.step))].sort((one, other) => other - one);
  if (!steps.length) return card(t("proof.title"), null, el("p", { class: "muted" }, t("proof.none")));
  const ranks = state.nodes.flatMap((node) => node.ranks.map((one) => one.rank)).slice(0, 16);
  const right = items.proof.every((one) => one.agree);
  const verdict = t(right ? "proof.verdict" : "proof.verdict.bad", { count: fmt.whole(steps.length) });
  const rows = steps.slice(0, SHOWN).map((step) => {
    const of = new Map(items.proof.filter((one) => one.step === step).map((one) => [one.rank, one]));
    const prints = [...of.values()].map((one) => one.fingerprint);
    const common = prints.find((one) => prints.filter((other) => other === one).length * 2 > prints.length);
    return el(
      "tr",
      {},
      el("th", { scope: "row", class: "num" }, fmt.whole(step + 1)),
      ...ranks.map((rank) => {
        const one = of.get(rank);
        if (!one) return el("td", { class: "muted" }, "–");
        const same = one.agree && one.fingerprint === common;
        return el("td", {}, el("span", { class: `mono fp ${same ? "same" : "other"}` }, `${same ? "=" : "≠"} ${one.fingerprint}`));
      }),
    );
  });
  const head = el("tr", {}, el("th", { scope: "col", class: "num" }, t("series.step")), ...ranks.map((rank) => el("th", { scope: "col" }, t("now.rank", { rank }))));
  const sha = items.end.at(-1)?.weights_sha256;
  return card(
    t("proof.title"),
    el("span", { class: `pill ${right ? "good" : "bad"}` }, verdict),
    el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("proof.title") }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))),
    sha && el("p", { class: "small muted mono-line" }, `${t("proof.final")}: `, el("span", { class: "mono" }, sha)),
    el("p", { class: "small muted" }, `${t("proof.recipe")}: `, el("span", { class: "mono" }, (state.team.recipe || "–").slice(0, 16))),
  );
}

// Shards that another rank computed again: how many, and those whose bits were others.
function audits(run) {
  const { job } = run.state;
  const all = run.items.audit;
  if (!all.length && !job.train?.audit) return null;
  const wrong = all.filter((one) => !one.agree).sort((one, other) => other.step - one.step);
  const verdict = t(wrong.length ? "audit.verdict.bad" : "audit.verdict", { count: fmt.whole(all.length), wrong: fmt.whole(wrong.length) });
  const rows = wrong.slice(0, SHOWN).map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "num" }, fmt.whole(one.step + 1)),
      el("td", { class: "num" }, fmt.whole(one.shard)),
      el("td", {}, one.wrong < 0 ? "?" : t("now.rank", { rank: one.wrong })),
      el("td", { class: "mono" }, one.tensor),
      el("td", {}, one.words),
    ),
  );
  const names = [["series.step", "num"], ["audit.shard", "num"], ["audit.rank", ""], ["audit.tensor", ""], ["audit.words", ""]];
  const by = new Map();
  for (const one of all) by.set(one.rank, (by.get(one.rank) ?? 0) + 1);
  const shares = [...by].sort(([one], [other]) => one - other).map(([rank, count]) => `${t("now.rank", { rank })}: ${fmt.whole(count)}`);
  return card(
    t("audit.title"),
    el("span", { class: `pill ${wrong.length ? "bad" : "good"}` }, verdict),
    el("p", { class: "muted" }, t("audit.note", { share: fmt.percent(job.train?.audit ?? 0) })),
    shares.length > 0 && el("p", { class: "small muted" }, shares.join(" · ")),
    rows.length > 0 &&
      el(
        "div",
        { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("audit.title") },
        el("table", {}, el("thead", {}, el("tr", {}, names.map(([key, kind]) => el("th", { scope: "col", class: kind }, t(key))))), el("tbody", {}, rows)),
      ),
  );
}

function storage(run) {
  const ranks = run.state.nodes.flatMap((node) => node.ranks);
  const requests = ranks.reduce((sum, one) => sum + one.requests, 0);
  const bytes = ranks.reduce((sum, one) => sum + one.bytes, 0);
  const most = Math.max(1, ...ranks.map((one) => one.bytes));
  const where = run.items.storage.at(-1)?.location;
  return card(
    t("storage.title"),
    where && el("span", { class: "mono small muted" }, where),
    el("p", { class: "big" }, requests ? t("storage.some", { requests: fmt.whole(requests), bytes: fmt.bytes(bytes) }) : "0"),
    !requests && el("p", { class: "muted" }, t("storage.zero")),
    requests > 0 &&
      el(
        "div",
        { class: "rows" },
        ranks.slice(0, 32).map((one) =>
          el(
            "div",
            { class: "bar-row" },
            el("span", {}, t("now.rank", { rank: one.rank })),
            el("div", { class: "meter" }, el("span", { style: { width: `${(100 * one.bytes) / most}%` } })),
            el("span", { class: "num" }, t("storage.some", { requests: fmt.whole(one.requests), bytes: fmt.bytes(one.bytes) })),
          ),
        ),
      ),
  );
}

function exchange(run, found) {
  const { team, job, nodes } = run.state;
  const wire = job.reduce?.wire ?? "fp32";
  const bytes = (team.parameters ?? 0) * 4;
  const mean = (column) => {
    if (!found) return NaN;
    const values = found.ranks.flatMap((rank) => Array.from(found.get(rank, column, "mean")).filter(Number.isFinite));
    return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : NaN;
  };
  return card(
    t("exchange.title"),
    null,
    el("p", { class: "big" }, fmt.ms(mean("exchange"))),
    el("p", { class: "muted" }, t("exchange.ms", { wait: fmt.ms(mean("wait")) })),
    el("p", {}, t("exchange.bytes", { bytes: fmt.bytes(bytes), parameters: fmt.whole(team.parameters), wire })),
    el("p", { class: "muted small" }, nodes.length > 1 ? t("exchange.nodes", { nodes: nodes.length }) : t("exchange.local")),
  );
}

function checkpoints(run) {
  const { checkpoints: saved } = run.state;
  if (!saved.length) return card(t("saved.title"), null, el("p", { class: "muted" }, t("saved.none")));
  const took = new Map(run.items.checkpoint.map((one) => [one.name, one.seconds]));
  const kinds = { sizes: "good", damaged: "bad", unfinished: "warn" };
  const rows = saved.map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "num" }, fmt.whole(one.step)),
      el("td", { class: "num" }, fmt.bytes(one.bytes)),
      el("td", { class: "num" }, took.has(one.name) ? fmt.ms(took.get(one.name) * 1e6) : "–"),
      el("td", { class: "num" }, (one.saved_at || "–").replace("T", " ").slice(0, 19)),
      el("td", {}, el("span", { class: `pill ${kinds[one.state]}` }, t(`saved.${one.state}`))),
    ),
  );
  const names = [["saved.step", "num"], ["saved.size", "num"], ["saved.took", "num"], ["saved.time", "num"], ["saved.state", ""]];
  return card(
    t("saved.title"),
    el("span", { class: "small muted" }, t("saved.note")),
    el(
      "div",
      { class: "scrolls", tabindex: 0, role: "region", "aria-label": t("saved.title") },
      el("table", {}, el("thead", {}, el("tr", {}, names.map(([key, kind]) => el("th", { scope: "col", class: kind }, t(key))))), el("tbody", {}, rows)),
    ),
  );
}
