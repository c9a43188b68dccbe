import { COLORS, add, div, el, f32, knowArithmetic, mul, put, shown, slider, sub, svg, table } from "../kit.js";

const START = [0.5, 0.3, 0.2].map(f32);
const PHOTO = [0.9, 0.4, 0.6].map(f32);
const scoreOf = (weights) => weights.reduce((sum, w, i) => add(sum, mul(w, PHOTO[i])), f32(0));

function build(t) {
  const names = [t({ ko: "귀", en: "ear" }), t({ ko: "수염", en: "whiskers" }), t({ ko: "눈", en: "eyes" })];
  let strength = f32(0.5), weights = [...START], shots = [scoreOf(START)];
  const board = el("div"), numbers = el("div"), behind = el("div");
  const at = (score) => 320 + (score - 1) * 300;
  function draw() {
    put(board, svg(640, 230, t({ ko: "과녁: 가운데가 1, 화살은 모델의 점수", en: "A target: its centre is 1, arrows are the model's scores" }),
      [[92, "var(--tint)"], [62, "var(--panel)"], [34, "var(--tint)"]].map(([r, fill]) => el("circle", { cx: 320, cy: 112, r, fill, stroke: "var(--line)", "stroke-width": 1.5 })),
      el("circle", { cx: 320, cy: 112, r: 8, fill: "var(--accent)" }),
      el("text", { x: 320, y: 222, "text-anchor": "middle", class: "soft" }, t({ ko: "정답 = 1 (고양이다)", en: "right answer = 1 (it is a cat)" })),
      shots.map((score, i) => { const last = i === shots.length - 1; return el("g", { opacity: last ? 1 : 0.35 },
        el("circle", { cx: at(score), cy: 112, r: last ? 7 : 5, fill: COLORS[5] }),
        last ? el("line", { x1: at(score), x2: at(score), y1: 40, y2: 102, stroke: COLORS[5], "stroke-width": 2 }) : null,
        last ? el("text", { x: at(score), y: 32, "text-anchor": "middle", class: "mono" }, shown(score, 6)) : null); })));
    const score = scoreOf(weights), miss = sub(1, score);
    put(numbers, table(["", names[0], names[1], names[2], t({ ko: "점수", en: "score" })], [
      [t({ ko: "가중치", en: "weights" }), ...weights.map((w) => shown(w, 6)), ""],
      [t({ ko: "사진에 보이는 정도", en: "how visible in the photo" }), ...PHOTO.map((x) => shown(x)), ""],
      [t({ ko: "곱", en: "product" }), ...weights.map((w, i) => shown(mul(w, PHOTO[i]), 6)), shown(score, 6)],
      [t({ ko: "빗나간 정도 = 1 - 점수", en: "miss = 1 - score" }), "", "", "", shown(miss, 6)]]));
    put(behind, knowArithmetic(t, `score = ((${weights.map((w, i) => `${shown(w)} × ${shown(PHOTO[i])}`).join(") + (")})) = ${shown(score)}\nweight += strength × (1 - score) × visible`));
  }
  const shoot = () => { const miss = sub(1, scoreOf(weights)); weights = weights.map((w, i) => add(w, mul(mul(strength, miss), PHOTO[i]))); shots = [...shots, scoreOf(weights)].slice(-12); draw(); };
  const again = () => { weights = [...START]; shots = [scoreOf(START)]; draw(); };
  draw();
  return [
    el("p", {}, t({ ko: "처음 활을 쏘는 사람은 과녁을 빗나갑니다. 코치가 “조금 더 오른쪽으로”라고 말하고, 다시 쏩니다. 빗나가고, 고치고, 또 쏘는 것. 이것이 학습입니다.", en: "Someone who shoots a bow for the first time misses. The coach says “a little to the right”, and they shoot again. Miss, correct, shoot again: that is learning." })),
    el("p", {}, t({ ko: "여기 고양이를 알아보는 아주 작은 모델이 있습니다. 숫자가 세 개뿐입니다: 귀 0.5, 수염 0.3, 눈 0.2. 이 숫자를 가중치라고 합니다. 귀, 수염, 눈이 모두 또렷한 사진이면 0.5 + 0.3 + 0.2 = 1, “고양이다”. 하지만 아래 사진은 수염이 잘 보이지 않아 점수가 1에 못 미칩니다. 쏘고, 얼마나 고칠지 바꿔 보세요.", en: "Here is a very small model that recognises cats. It is three numbers: ear 0.5, whiskers 0.3, eyes 0.2. They are called weights. Where ears, whiskers and eyes are all clear to see, 0.5 + 0.3 + 0.2 = 1: a cat. But in the photo below the whiskers hardly show, so its score is short of 1. Shoot, and change how strongly the coach corrects." })),
    el("figure", { class: "figure" }, el("div", { class: "controls" },
      slider(t({ ko: "한 번에 고치는 정도", en: "strength of a correction" }), 0.1, 2, 0.1, 0.5, (v) => { strength = f32(v); }, (v) => v.toFixed(1)),
      el("button", { class: "act", type: "button", onclick: shoot }, t({ ko: "쏘고 고치기", en: "Shoot and correct" })),
      el("button", { class: "act quiet", type: "button", onclick: again }, t({ ko: "처음부터", en: "Start again" }))),
      board, numbers, behind),
    el("p", {}, t({ ko: "고치는 정도가 너무 작으면 오래 걸리고, 너무 크면 과녁을 지나쳐 반대쪽을 맞힙니다. 이 정도를 학습률(learning rate)이라고 합니다.", en: "Corrections that are too small take for ever; too large ones overshoot and hit the other side. That strength is called the learning rate." })),
  ];
}

export const learning = {
  title: { ko: "학습이란", en: "What learning is" },
  build,
  question: (t) => ({ text: t({ ko: "귀·수염·눈이 모두 정확히 절반(0.5)만 보이는 사진이라면, 처음 가중치로 점수는 얼마일까요?", en: "In a photo that shows ear, whiskers and eyes each half (0.5), what is the score with the first weights?" }),
    answer: () => { const value = START.reduce((sum, w) => add(sum, mul(w, 0.5)), f32(0)); return { value, near: 1e-4, why: `(0.5 + 0.3 + 0.2) × 0.5 = ${shown(value, 6)}` }; } }),
};
