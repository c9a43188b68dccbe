import { COLORS, choice, dot, el, experiment, knowArithmetic, put, slider, svg, table } from "../kit.js";

const PHOTOS = 400;
// The rule of the split, as the documents draw it; what the ranks really took is asked below.
export function takers(kind, ranks, photos = PHOTOS) {
  if (kind === "interleaved") return Array.from({ length: photos }, (_, i) => i % ranks);
  const sizes = Array.from({ length: ranks }, (_, r) => Math.floor(photos / ranks) + (r < photos % ranks ? 1 : 0));
  return sizes.flatMap((size, rank) => Array(size).fill(rank));
}
const grid = (t, taken) => svg(640, taken.length > 100 ? 262 : 74, t({ ko: `사진 ${taken.length}장, 맡은 랭크의 색`, en: `${taken.length} photos, coloured by the rank that takes each` }),
  taken.map((rank, i) => el("rect", { x: 4 + (i % 40) * 15.8, y: 4 + Math.floor(i / 40) * 25.4, width: 13, height: 22, rx: 3, fill: rank === null ? "var(--line)" : COLORS[rank % 8] }, el("title", {}, rank === null ? `#${i + 1}` : `#${i + 1}: rank ${rank}`))));
// Dealt by turns, photos are counted from 0 as samplers do; blocks are told as one would on paper, from #1.
const ownOf = (own, kind) => (kind === "blocks" && own.length ? `#${own[0] + 1} – #${own.at(-1) + 1}` : `${own.slice(0, 5).join(", ")}${own.length > 5 ? ", …" : ""}`);
const counts = (t, taken, ranks, kind) => table(["", t({ ko: "장수", en: "photos" }), kind === "blocks" ? t({ ko: "어느 사진", en: "which" }) : t({ ko: "처음 몇 장 (0부터)", en: "the first ones (from 0)" })],
  Array.from({ length: ranks }, (_, rank) => { const own = taken.flatMap((r, i) => (r === rank ? [i] : [])); return [[dot(rank), `rank ${rank}`], String(own.length), ownOf(own, kind)]; }));

function build(t, lesson) {
  let kind = "interleaved", ranks = 4, photos = PHOTOS;
  const picture = el("div"), numbers = el("div");
  const draw = () => { const taken = takers(kind, ranks, photos); put(picture, grid(t, taken)); put(numbers, counts(t, taken, ranks, kind), knowArithmetic(t, kind === "interleaved" ? `rank = photo mod ${ranks}` : `${ranks} blocks of ${photos} / ${ranks} photos`)); };
  draw();
  const asked = (told) => {
    const rows = Object.values(told.rows).flat(), taken = Array(PHOTOS).fill(null);
    let twice = 0;
    rows.forEach((row) => row.ids.forEach((id) => { if (taken[id] !== null) twice++; taken[id] = row.rank; }));
    const missing = taken.filter((rank) => rank === null).length;
    return rows.length ? [grid(t, taken), counts(t, taken, rows.length, told.arguments.kind), el("p", { role: "status" }, t({ ko: `두 번 나온 사진 ${twice}장, 빠진 사진 ${missing}장.`, en: `Photos taken twice: ${twice}. Photos left out: ${missing}.` }))] : [];
  };
  return [
    el("p", {}, t({ ko: "고양이 사진이 400장 있습니다. 네 랭크가 나누어 보면 한 랭크가 100장씩만 보면 됩니다. 겹치지도 빠지지도 않게 나누는 방법은 둘입니다. 카드를 돌리듯 번갈아(0, 4, 8, …) 나누거나, 1-100, 101-200처럼 덩어리로 나눕니다.", en: "There are 400 photos of cats. Four ranks that share them see 100 each. None twice, none left out: there are two ways. Deal them like cards (0, 4, 8, …), or cut them into blocks: 1-100, 101-200, and so on." })),
    el("figure", { class: "figure" }, el("div", { class: "controls" }, choice(t({ ko: "나누는 방법", en: "split" }), { interleaved: t({ ko: "번갈아", en: "interleaved" }), blocks: t({ ko: "덩어리로", en: "blocks" }) }, kind, (v) => { kind = v; draw(); }),
      choice(t({ ko: "사진", en: "photos" }), { all: t({ ko: "400장", en: "400 photos" }), few: t({ ko: "100장", en: "100 photos" }) }, "all", (v) => { photos = v === "few" ? 100 : PHOTOS; draw(); }),
      slider(t({ ko: "랭크 수", en: "ranks" }), 1, 8, 1, 4, (v) => { ranks = v; draw(); })), picture, numbers),
    el("p", {}, t({ ko: "위는 규칙을 그린 것입니다. 실제로 학습하는 랭크들은 무엇을 가져갈까요? 물어봅시다.", en: "That is the rule, drawn. What do ranks that train really take? Ask them." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "split", label: t({ ko: "랭크들에게 묻기", en: "Ask the ranks" }), options: () => ({ kind, ranks }), draw: asked })),
  ];
}

export const split = {
  title: { ko: "사진 400장 나누기", en: "Splitting 400 photos" },
  build,
  question: (t) => ({ text: t({ ko: "랭크 3개가 400장을 번갈아 나누면 rank 0은 몇 장을 볼까요?", en: "Three ranks take 400 photos by turns. How many does rank 0 see?" }),
    answer: () => { const value = takers("interleaved", 3).filter((rank) => rank === 0).length; return { value, why: `0, 3, 6, …, 399: ${value}` }; } }),
};
