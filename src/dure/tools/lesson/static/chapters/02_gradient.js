import { COLORS, add, div, el, f32, knowArithmetic, mul, choice, put, shown, slider, sub, svg, table } from "../kit.js";

// How visible ears are in eight photos of cats; whiskers and eyes always count for 0.3.
const EARS = [0.9, 0.7, 1.0, 0.4, 0.8, 0.6, 1.0, 0.5].map(f32);
const REST = f32(0.3);
const missOf = (w, ear) => sub(1, add(mul(w, ear), REST));
export const lossAt = (w) => div(EARS.reduce((sum, ear) => add(sum, mul(missOf(w, ear), missOf(w, ear))), f32(0)), EARS.length);
export const slopeAt = (w) => div(EARS.reduce((sum, ear) => add(sum, mul(mul(-2, missOf(w, ear)), ear)), f32(0)), EARS.length);

// What document 003 says of a gradient: which number to change, which way, and by how much.
const TOLD = { tail: [["귀", "ear", 0.7], ["꼬리", "tail", -0.3]], numbers: [["이 숫자", "this number", 0.5], ["저 숫자", "that number", -0.3]] };
const BEFORE = [0.2, 0.6];

function corrections(t) {
  let kind = "tail", before = BEFORE.map(f32);
  const cells = el("div"), after = [el("span"), el("span")], behind = el("div");
  const signed = (value) => (value < 0 ? `−${shown(-value, 6)}` : `+${shown(value, 6)}`);
  const add2 = () => {
    before.forEach((value, i) => put(after[i], shown(add(value, f32(TOLD[kind][i][2])), 6)));
    put(behind, knowArithmetic(t, before.map((value, i) => `${shown(value)} ${signed(f32(TOLD[kind][i][2]))} = ${shown(add(value, f32(TOLD[kind][i][2])))}`).join("\n")));
  };
  const draw = () => {
    put(cells, table(["", t({ ko: "지금", en: "now" }), t({ ko: "화살표", en: "the arrow" }), t({ ko: "고친 뒤", en: "corrected" })], TOLD[kind].map(([ko, en, change], i) => [t({ ko, en }),
      el("input", { class: "cell", value: shown(before[i], 6), inputmode: "decimal", "aria-label": t({ ko, en }), oninput: (event) => { const given = Number(event.target.value); if (event.target.value.trim() && Number.isFinite(given)) { before[i] = f32(given); add2(); } } }),
      signed(f32(change)), after[i]])));
    add2();
  };
  draw();
  return el("figure", { class: "figure" }, el("div", { class: "controls" }, choice(t({ ko: "예", en: "example" }), { tail: t({ ko: "귀 +0.7, 꼬리 −0.3", en: "ear +0.7, tail −0.3" }), numbers: "+0.5, −0.3" }, kind, (v) => { kind = v; draw(); })), cells, behind);
}

function build(t) {
  let weight = f32(0.2);
  const picture = el("div"), words = el("p", { class: "num", role: "status" }), behind = el("div");
  const px = (w) => 50 + (w / 2) * 560, py = (loss) => 240 - loss * 280;
  const curve = Array.from({ length: 101 }, (_, i) => i / 50).map((w) => `${px(w).toFixed(1)},${py(lossAt(w)).toFixed(1)}`).join(" ");
  function draw() {
    const loss = lossAt(weight), slope = slopeAt(weight), step = Math.max(-180, Math.min(180, -slope * 130));
    const x = px(weight), y = py(loss);
    put(picture, svg(640, 280, t({ ko: "손실 곡선과 기울기 화살표", en: "The loss curve, and the arrow of its gradient" }),
      el("defs", {}, el("marker", { id: "tip", markerWidth: 9, markerHeight: 9, refX: 6, refY: 4, orient: "auto" }, el("path", { d: "M0,0 L8,4 L0,8 z", fill: COLORS[5] }))),
      el("line", { class: "axis", x1: 50, x2: 610, y1: 240, y2: 240 }),
      el("polyline", { points: curve, fill: "none", stroke: "var(--accent)", "stroke-width": 3 }),
      el("line", { x1: x - 90, x2: x + 90, y1: y + slope * 90, y2: y - slope * 90, stroke: "var(--soft)", "stroke-dasharray": "4 4" }),
      Math.abs(step) > 6 ? el("line", { x1: x, x2: x + step, y1: y, y2: y, stroke: COLORS[5], "stroke-width": 3, "marker-end": "url(#tip)" }) : null,
      el("circle", { cx: x, cy: y, r: 9, fill: COLORS[5] }),
      el("text", { x: 610, y: 262, "text-anchor": "end", class: "soft" }, t({ ko: "귀 가중치 →", en: "ear weight →" })),
      el("text", { x: 50, y: 18, class: "soft" }, t({ ko: "손실 (여덟 장의 평균)", en: "loss (mean of eight photos)" }))));
    words.textContent = t({ ko: `가중치 ${shown(weight, 4)} · 손실 ${shown(loss, 4)} · 기울기 ${shown(slope, 4)} → ${slope < -0.005 ? "올리세요" : slope > 0.005 ? "내리세요" : "거의 바닥입니다"}`, en: `weight ${shown(weight, 4)} · loss ${shown(loss, 4)} · gradient ${shown(slope, 4)} → ${slope < -0.005 ? "raise it" : slope > 0.005 ? "lower it" : "almost at the bottom"}` });
    put(behind, knowArithmetic(t, `loss(w) = mean of (1 - (w × ear + 0.3))²\ngradient = mean of -2 × (1 - (w × ear + 0.3)) × ear\near = ${EARS.map((e) => shown(e)).join(", ")}`));
  }
  const control = slider(t({ ko: "귀 가중치를 끌어 보세요", en: "drag the ear weight" }), 0, 2, 0.01, 0.2, (v) => { weight = f32(v); draw(); }, (v) => v.toFixed(2));
  const walk = () => { weight = f32(Math.max(0, Math.min(2, sub(weight, mul(0.3, slopeAt(weight)))))); control.querySelector("input").value = weight; control.querySelector("output").textContent = weight.toFixed(2); draw(); };
  draw();
  return [
    el("p", {}, t({ ko: "눈을 가리고 산에서 길을 찾는다고 해 봅시다. 발밑이 어느 쪽으로 얼마나 기울었는지는 느낄 수 있습니다. 그 화살표가 gradient(기울기)입니다: 무엇을, 어느 쪽으로, 얼마나 바꿔야 하는지 알려 주는 화살표.", en: "Imagine finding your way on a mountain, blindfolded. You can feel which way the ground slopes, and how steeply. That arrow is the gradient: it says what to change, which way, and how much." })),
    el("p", {}, t({ ko: "아래 곡선의 높이는 모델이 얼마나 틀리는지(손실)입니다. 가중치를 끌면 그 자리의 손실과 기울기를 계산합니다. 화살표는 언제나 내려가는 쪽을 가리킵니다.", en: "The height of the curve below is how wrong the model is: the loss. Drag the weight, and its loss and gradient are computed. The arrow always points downhill." })),
    el("figure", { class: "figure" }, el("div", { class: "controls" }, control, el("button", { class: "act", type: "button", onclick: walk }, t({ ko: "화살표대로 한 걸음", en: "One step along the arrow" }))), picture, words, behind),
    el("p", {}, t({ ko: "가중치가 여럿이면 화살표도 여럿입니다. “북쪽으로 10 m, 위로 5 m”처럼, 숫자마다 어느 쪽으로 얼마나 고칠지 적은 지시서가 gradient입니다.", en: "Several weights have several arrows. Like “10 m north, 5 m up”, the gradient is a list of instructions: for each number, which way to change it and by how much." })),
    corrections(t),
  ];
}

export const gradient = {
  title: { ko: "Gradient: 산 위의 화살표", en: "The gradient: an arrow on a mountain" },
  build,
  question: (t) => ({ text: t({ ko: "귀 가중치가 0.5일 때 기울기는 얼마일까요? (소수 둘째 자리까지)", en: "What is the gradient where the ear weight is 0.5? (two decimals)" }),
    answer: () => { const value = slopeAt(f32(0.5)); return { value, near: 0.006, why: shown(value, 4) }; } }),
};
