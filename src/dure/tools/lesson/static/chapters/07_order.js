import { COLORS, add, binary, el, f32, hex, knowArithmetic, leftToRight, pairwise, put, shown, svg, table } from "../kit.js";

const FIRST = [0.55, 0.26, 0.8, 0.27, 0.49, -0.36, 0.1, -0.36];

const bitsOf = (value) => { const text = binary(value); return el("span", { class: "num" }, el("span", { style: "color:var(--warn)" }, text[0]), " ", el("span", { style: "color:var(--r0)" }, text.slice(1, 9)), " ", el("span", { style: "color:var(--r2)" }, text.slice(9))); };
// Sums of a rank's own shards from left to right, then over ranks: what a plain loop on so many ranks does.
export const byRanks = (numbers, ranks) => leftToRight(Array.from({ length: ranks }, (_, r) => leftToRight(numbers.slice(r * 8 / ranks, (r + 1) * 8 / ranks))));

function treePicture(t, numbers) {
  const levels = [numbers.map(f32)];
  while (levels.at(-1).length > 1) { const level = levels.at(-1); levels.push(Array.from({ length: level.length / 2 }, (_, i) => add(level[2 * i], level[2 * i + 1]))); }
  const x = (level, i) => (i + 0.5) * (640 / levels[level].length), y = (level) => 34 + level * 62;
  return svg(640, 260, t({ ko: "여덟 수를 둘씩 더해 올라가는 나무", en: "A tree that adds eight numbers two by two" }),
    levels.slice(1).flatMap((level, l) => level.flatMap((_, i) => [0, 1].map((side) => el("line", { class: "axis", x1: x(l, 2 * i + side), y1: y(l) + 10, x2: x(l + 1, i), y2: y(l + 1) - 18, "stroke-width": 2 })))),
    levels.flatMap((level, l) => level.map((value, i) => el("g", {}, el("rect", { class: "frame", x: x(l, i) - 37, y: y(l) - 17, width: 74, height: 28, rx: 8 }), el("text", { class: l === 3 ? "leaf root" : "leaf", x: x(l, i), y: y(l) + 2, "text-anchor": "middle" }, shown(value, 6))))));
}

function build(t) {
  let numbers = FIRST.map(f32);
  const cells = el("div", { class: "controls tight" }), picture = el("div"), result = el("div");
  function draw() {
    put(picture, treePicture(t, numbers));
    const plain = [1, 2, 4, 8].map((ranks) => [ranks, byRanks(numbers, ranks)]), tree = pairwise(numbers), kinds = new Set(plain.map(([, v]) => hex(v))).size;
    put(result, table(["", t({ ko: "합", en: "sum" }), t({ ko: "16진수", en: "hex" }), t({ ko: "비트: 부호, 지수, 가수", en: "bits: sign, exponent, mantissa" })],
      plain.map(([ranks, value]) => [t({ ko: `순서대로, 랭크 ${ranks}개`, en: `in turn, ${ranks} rank(s)` }), shown(value), hex(value), bitsOf(value)]),
      [[t({ ko: "나무, 랭크 1·2·4·8개", en: "tree, 1, 2, 4 or 8 ranks" }), shown(tree), hex(tree), bitsOf(tree)]]),
      el("p", { role: "status" }, t({ ko: `순서대로 더하면 랭크 수에 따라 답이 ${kinds}가지입니다. 나무로 더하면 언제나 하나입니다: 어느 랭크가 어느 가지를 계산하든 더하는 짝이 같기 때문입니다.`, en: `Added in turn, there are ${kinds} different results, by the number of ranks. Added by the tree there is always one: whichever rank computes a branch, the pairs are the same.` })),
      knowArithmetic(t, `((((((a+b)+c)+d)+e)+f)+g)+h   ↔   ((a+b)+(c+d)) + ((e+f)+(g+h))\n${numbers.map((n) => `${shown(n)} = 0x${hex(n)}`).join("\n")}`));
  }
  put(cells, numbers.map((value, i) => el("input", { class: "cell", value: shown(value, 6), inputmode: "decimal", "aria-label": t({ ko: `${i + 1}번째 수`, en: `number ${i + 1}` }), oninput: (event) => { const given = Number(event.target.value); if (Number.isFinite(given) && event.target.value.trim()) { numbers[i] = f32(given); draw(); } } })));
  draw();
  return [
    el("p", {}, t({ ko: "종이 위에서는 (a + b) + c와 a + (b + c)가 같습니다. 컴퓨터에서는 그렇지 않습니다. 숫자 하나를 32비트에 담기 때문에 더할 때마다 끝자리가 반올림되고, 순서가 바뀌면 반올림도 바뀝니다.", en: "On paper, (a + b) + c is a + (b + c). In a computer it is not. A number has 32 bits, so every addition rounds the last digits, and another order rounds differently." })),
    el("p", {}, t({ ko: "여덟 개의 수를 바꿔 보세요. 샤드(shard) 여덟 개의 gradient라고 생각하면 됩니다.", en: "Change the eight numbers. Think of them as the gradients of eight shards." })),
    el("figure", { class: "figure" }, cells, picture, result),
    el("p", {}, t({ ko: "그래서 dure는 배치를 언제나 8개의 샤드로 나누고, 언제나 같은 나무로 더합니다. 랭크가 1개든 8개든 가중치가 비트까지 같은 까닭입니다.", en: "So dure always cuts a batch into 8 shards and always adds them by the same tree. That is why the weights are the same bits on 1 rank and on 8." })),
  ];
}

export const order = {
  title: { ko: "왜 순서가 중요한가", en: "Why the order matters" },
  build,
  question: (t) => ({ text: t({ ko: "float32에서 16777216 + 1은 얼마일까요?", en: "What is 16777216 + 1 in float32?" }),
    answer: () => { const value = add(16777216, 1); return { value, near: 0.5, why: t({ ko: `${value}. 가수가 24비트뿐이라 1이 반올림되어 사라집니다.`, en: `${value}. The mantissa has 24 bits, so the 1 is rounded away.` }) }; } }),
};
