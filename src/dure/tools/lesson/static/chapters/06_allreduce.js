import { COLORS, add, choice, div, dot, el, f32, knowArithmetic, mul, pairwise, put, shown, svg, table } from "../kit.js";

const DOCUMENTS = {
  gradients: { numbers: [[0.8, 0.2, 0.5], [0.6, 0.4, 0.3], [0.7, 0.3, 0.4], [0.5, 0.1, 0.6]], before: null },
  cats: { numbers: [[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]], before: [0.5, 0.3, 0.2] },
};
const RANKS = 4, BYTES = 25 * 1024 * 1024;

// Each way as a list of steps; a step is a list of transfers {from, to, share} and what it does in words.
export function waysOf(ranks) {
  const others = Array.from({ length: ranks - 1 }, (_, i) => i + 1);
  const levels = Array.from({ length: Math.log2(ranks) }, (_, i) => 2 ** i);
  const ring = (what) => Array.from({ length: ranks - 1 }, () => ({ what, moves: Array.from({ length: ranks }, (_, rank) => ({ from: rank, to: (rank + 1) % ranks, share: 1 / ranks })) }));
  return {
    tree: [...levels.map((gap) => ({ what: "add", moves: others.filter((r) => r % (2 * gap) === gap).map((r) => ({ from: r, to: r - gap, share: 1 })) })),
      ...[...levels].reverse().map((gap) => ({ what: "copy", moves: others.filter((r) => r % (2 * gap) === gap).map((r) => ({ from: r - gap, to: r, share: 1 })) }))],
    ring: [...ring("add"), ...ring("copy")],
    ours: [{ what: "slices", moves: Array.from({ length: ranks }, (_, to) => Array.from({ length: ranks }, (_, from) => from).filter((from) => from !== to).map((from) => ({ from, to, share: 1 / ranks }))).flat() },
      { what: "gather", moves: Array.from({ length: ranks }, (_, to) => Array.from({ length: ranks }, (_, from) => from).filter((from) => from !== to).map((from) => ({ from, to, share: 1 / ranks }))).flat() }],
  };
}
const WHAT = {
  add: { ko: "받아서 더하기", en: "receive and add" }, copy: { ko: "결과 돌려주기", en: "hand the result on" },
  slices: { ko: "각자 자기 조각을, 모두의 것에서 정해진 순서로 더하기", en: "each adds its own slice of everybody's, in a fixed order" },
  gather: { ko: "더한 조각을 서로 가져가기", en: "each copies the other slices" },
};

function ways(t) {
  const all = waysOf(RANKS);
  let way = "ours", at = 0;
  const picture = el("div"), words = el("p", { role: "status" }), totals = el("div");
  const place = (rank) => [[150, 60], [490, 60], [490, 220], [150, 220]][rank];
  function draw() {
    const steps = all[way], now = at > 0 ? steps[at - 1] : null;
    put(picture, svg(640, 280, t({ ko: "랭크 넷과 지금 오가는 조각", en: "Four ranks, and what moves between them now" }),
      el("defs", {}, el("marker", { id: "arrow", markerWidth: 9, markerHeight: 9, refX: 7, refY: 4, orient: "auto" }, el("path", { d: "M0,0 L8,4 L0,8 z", fill: "var(--soft)" }))),
      (now?.moves ?? []).map(({ from, to, share }) => { const [ax, ay] = place(from), [bx, by] = place(to), long = Math.hypot(bx - ax, by - ay), nx = -(by - ay) / long * 7, ny = (bx - ax) / long * 7;
        return el("line", { x1: ax + (bx - ax) * 46 / long + nx, y1: ay + (by - ay) * 46 / long + ny, x2: bx - (bx - ax) * 50 / long + nx, y2: by - (by - ay) * 50 / long + ny, stroke: COLORS[from], "stroke-width": share === 1 ? 5 : 2.5, "marker-end": "url(#arrow)" }); }),
      Array.from({ length: RANKS }, (_, rank) => { const [x, y] = place(rank); return el("g", {}, el("circle", { cx: x, cy: y, r: 40, class: "frame" }), el("circle", { cx: x, cy: y, r: 40, fill: "none", stroke: COLORS[rank], "stroke-width": 4 }), el("text", { x, y: y + 5, "text-anchor": "middle" }, `rank ${rank}`)); })));
    words.textContent = now ? `${at}/${steps.length} · ${t(WHAT[now.what])}` : t({ ko: `${steps.length}단계입니다. 한 단계씩 눌러 보세요.`, en: `${steps.length} steps. Go through them one by one.` });
    put(totals, table(["", t({ ko: "단계", en: "steps" }), t({ ko: "오간 횟수", en: "transfers" }), t({ ko: "가장 바쁜 랭크가 보낸 것", en: "sent by the busiest rank" }), t({ ko: "25 MiB라면", en: "for 25 MiB" })],
      Object.entries(all).map(([key, list]) => { const sent = Array.from({ length: RANKS }, (_, rank) => list.flatMap((step) => step.moves).filter((m) => m.from === rank).reduce((sum, m) => sum + m.share, 0)); const most = Math.max(...sent);
        return [t({ tree: { ko: "나무(한곳에 모으기)", en: "tree (collect in one place)" }, ring: { ko: "고리(ring)", en: "ring" }, ours: { ko: "두레: 조각마다 주인", en: "dure: an owner per slice" } }[key]), String(list.length), String(list.flatMap((step) => step.moves).length), `${shown(most, 4)} × S`, `${(most * BYTES / 2 ** 20).toFixed(1)} MiB`]; })));
  }
  draw();
  return el("figure", { class: "figure" }, el("div", { class: "controls" }, choice(t({ ko: "방법", en: "way" }), { tree: t({ ko: "나무", en: "tree" }), ring: t({ ko: "고리", en: "ring" }), ours: "dure" }, way, (v) => { way = v; at = 0; draw(); }),
    el("button", { class: "act", type: "button", onclick: () => { at = at >= all[way].length ? 0 : at + 1; draw(); } }, t({ ko: "다음 단계", en: "Next step" }))), picture, words, totals,
    el("figcaption", {}, t({ ko: "S는 gradient 전체의 크기입니다. 한 노드 안에서 dure는 메시지를 보내지 않고 공유 메모리에서 서로의 조각을 직접 읽습니다. 더하는 순서는 어느 방법에서도 정할 수 있지만, dure는 언제나 같은 나무의 순서로 더합니다(다음 장).", en: "S is the size of all gradients. Within a node dure sends no messages: ranks read each other's slices in shared memory. dure always adds in the order of one fixed tree (next chapter)." })));
}

const namesOf = (t, kind) => kind === "cats" ? [t({ ko: "귀", en: "ear" }), t({ ko: "수염", en: "whiskers" }), t({ ko: "눈", en: "eyes" })] : [1, 2, 3].map((n) => t({ ko: `파라미터 ${n}번`, en: `parameter ${n}` }));

function build(t) {
  let kind = "gradients", numbers = DOCUMENTS[kind].numbers.map((row) => row.map(f32));
  const result = el("div"), cells = el("div");
  const mean = (column) => mul(pairwise(numbers.map((row) => row[column])), div(1, RANKS));
  function drawResult() {
    const before = DOCUMENTS[kind].before;
    put(result, table(["", ...namesOf(t, kind)], [[t({ ko: "합", en: "sum" }), ...[0, 1, 2].map((c) => shown(pairwise(numbers.map((row) => row[c])), 7))]],
      [[t({ ko: "평균: 모든 랭크가 받는 값", en: "mean: what every rank gets" }), ...[0, 1, 2].map((c) => shown(mean(c), 7))],
        ...(before ? [[t({ ko: "가중치: 전 → 후", en: "weight: before → after" }), ...before.map((w, c) => `${shown(f32(w))} → ${shown(add(w, mean(c)), 7)}`)]] : [])]),
      knowArithmetic(t, [0, 1, 2].map((c) => `((${numbers.map((row) => shown(row[c])).join(" + ")})) × 1/4 = ${shown(mean(c), 9)}`).join("\n")));
  }
  function drawCells() {
    put(cells, table(["", ...namesOf(t, kind)], numbers.map((row, rank) => [[dot(rank), `rank ${rank}`], ...row.map((value, c) => el("input", { class: "cell", value: shown(value, 6), inputmode: "decimal", "aria-label": `rank ${rank}, ${c + 1}`, oninput: (event) => { const given = Number(event.target.value); if (Number.isFinite(given)) { numbers[rank][c] = f32(given); drawResult(); } } }))])));
    drawResult();
  }
  drawCells();
  return [
    el("p", {}, t({ ko: "각 랭크는 자기 사진으로 gradient를 계산했습니다. 이제 모두의 것을 더해 평균을 내고, 그 평균을 모두가 나눠 가집니다. 이것이 all-reduce입니다. 숫자를 직접 바꿔 보세요.", en: "Each rank has computed gradients from its own photos. Now all are added, the mean is taken, and everybody gets it: that is all-reduce. Change the numbers yourself." })),
    el("figure", { class: "figure" }, el("div", { class: "controls" }, choice(t({ ko: "예", en: "example" }), { gradients: t({ ko: "0.8, 0.6, 0.7, 0.5", en: "0.8, 0.6, 0.7, 0.5" }), cats: t({ ko: "고양이 모델", en: "the cat model" }) }, kind, (v) => { kind = v; numbers = DOCUMENTS[kind].numbers.map((row) => row.map(f32)); drawCells(); })), cells, result),
    el("p", {}, t({ ko: "모두가 같은 평균을 같은 가중치에 더하므로, 다음 스텝도 모두 같은 모델에서 시작합니다. 그런데 평균은 어떻게 모두에게 도착할까요? 세 가지 방법을 한 단계씩 따라가 봅시다.", en: "All add the same mean to the same weights, so the next step starts from one model again. But how does the mean get to everybody? Follow three ways, step by step." })),
    ways(t),
  ];
}

export const allreduce = {
  title: { ko: "All-reduce를 손으로", en: "All-reduce by hand" },
  build,
  question: (t) => ({ text: t({ ko: "랭크가 8개일 때 고리(ring) 방법은 모두 몇 번 오가야 할까요? (한 랭크가 이웃에게 한 번 보내면 1회)", en: "With 8 ranks, how many transfers does the ring need? (one rank sending once to its neighbour is one)" }),
    answer: () => { const value = waysOf(8).ring.flatMap((step) => step.moves).length; return { value, why: `2 × (8 - 1) × 8 = ${value}` }; } }),
};
