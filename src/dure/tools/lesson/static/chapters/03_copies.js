import { COLORS, choice, dot, el, experiment, put, shown, svg, table } from "../kit.js";

function picture(t, told) {
  const rows = Object.values(told.rows).flat();
  const ranks = [...new Set(rows.map((row) => row.rank))].sort((a, b) => a - b);
  const of = (rank, at) => rows.find((row) => row.rank === rank && row.at === at);
  const broadcast = rows.some((row) => row.at === "broadcast");
  const last = (rank) => of(rank, broadcast ? "broadcast" : "made");
  const prints = new Set(ranks.map((rank) => last(rank)?.fingerprint));
  const same = ranks.length > 0 && prints.size === 1 && !prints.has(undefined);
  return [
    svg(640, 190, t({ ko: "랭크마다 하나씩 있는 모델", en: "One model per rank" }), ranks.map((rank) => {
      const x = 24 + rank * (600 / Math.max(ranks.length, 4)), width = 600 / Math.max(ranks.length, 4) - 18;
      return el("g", {}, el("rect", { class: "frame", x, y: 18, width, height: 150, rx: 12 }),
        el("rect", { x, y: 18, width, height: 8, rx: 4, fill: COLORS[rank % 8] }),
        el("text", { x: x + width / 2, y: 52, "text-anchor": "middle" }, `rank ${rank}`),
        (last(rank)?.weights ?? []).map((w, i) => el("text", { class: "mono", x: x + width / 2, y: 84 + i * 24, "text-anchor": "middle" }, shown(w, 5))));
    })),
    table(["", ...(broadcast ? [t({ ko: "만든 직후", en: "as made" })] : []), t({ ko: "학습을 시작할 때", en: "when training starts" })],
      ranks.map((rank) => [[dot(rank), `rank ${rank}`], ...(broadcast ? [of(rank, "made")?.fingerprint ?? ""] : []), last(rank)?.fingerprint ?? ""])),
    el("p", { role: "status" }, same ? t({ ko: `지문이 ${ranks.length}개 모두 같습니다: 비트 하나까지 같은 복사본입니다.`, en: `All ${ranks.length} fingerprints are equal: copies, to the last bit.` }) : ""),
  ];
}

function build(t, lesson) {
  let how = "seed";
  return [
    el("p", {}, t({ ko: "여럿이 함께 학습하려면 먼저 모두가 똑같은 모델을 가져야 합니다. 프로세스 하나를 랭크라고 부릅니다. GPU가 네 대면 랭크도 넷, 모델의 복사본도 넷입니다.", en: "To train together, everybody first needs the same model. One process is called a rank. With four GPUs there are four ranks, and four copies of the model." })),
    el("p", {}, t({ ko: "방법은 두 가지입니다. 모두가 같은 시드(42)로 직접 만들거나, 제각각 만든 뒤 랭크 0의 것을 모두에게 보냅니다(broadcast). 지문은 가중치의 모든 비트를 섞어 만든 64비트 숫자입니다. 비트가 하나만 달라도 지문이 달라집니다.", en: "There are two ways. Each makes it from the same seed (42); or each makes its own, and rank 0's is sent to all (broadcast). A fingerprint is a 64-bit number mixed from all bits of the weights: one different bit gives another one." })),
    el("figure", { class: "figure" }, el("div", { class: "controls" }, choice(t({ ko: "어떻게", en: "how" }), { seed: t({ ko: "같은 시드로", en: "from one seed" }), broadcast: t({ ko: "broadcast로", en: "by broadcast" }) }, how, (v) => { how = v; })),
      experiment(t, lesson, { name: "copies", label: t({ ko: "랭크 4개로 해 보기", en: "Do it on 4 ranks" }), options: () => ({ how, ranks: 4 }), draw: (told) => picture(t, told) })),
  ];
}

export const copies = {
  title: { ko: "모두 같은 복사본", en: "Copies of one model" },
  build,
  question: (t) => ({ text: t({ ko: "랭크가 8개인 두 노드에서 rank 0의 가중치 3개(float32, 각 4바이트)를 나머지 모두에게 보내면, 받는 쪽을 모두 합쳐 몇 바이트를 받을까요?", en: "On two nodes with 8 ranks in all, rank 0 sends its 3 weights (float32, 4 bytes each) to all others. How many bytes do the receivers get altogether?" }),
    answer: () => { const value = (8 - 1) * 3 * 4; return { value, why: `7 × 3 × 4 = ${value}` }; } }),
};
