import { COLORS, div, el, experiment, lines, svg, table } from "../kit.js";

function draw(t, told) {
  const found = [1, 2, 4].filter((ranks) => told.results[ranks]).map((ranks) => ({ ranks, rate: told.results[ranks].samples_per_second, sha: told.results[ranks].weights_sha256, seconds: told.results[ranks].seconds }));
  if (!found.length) return [];
  const base = found[0].rate;
  return [
    lines([{ name: t({ ko: "이상", en: "ideal" }), color: "var(--soft)", dashed: true, points: found.map((f) => [f.ranks, f.ranks]) }, { name: t({ ko: "측정", en: "measured" }), color: COLORS[0], points: found.map((f) => [f.ranks, f.rate / base]) }], { label: t({ ko: "랭크 수에 따른 속도", en: "Speed by the number of ranks" }), x: t({ ko: "랭크 수", en: "ranks" }), y: t({ ko: "몇 배 빠른가", en: "times faster" }), from: 0, to: Math.max(4, ...found.map((f) => f.rate / base)), marks: found.map((f) => f.ranks), dots: true }),
    table(["", t({ ko: "초당 샘플", en: "samples/s" }), t({ ko: "몇 배", en: "times" }), t({ ko: "효율", en: "efficiency" }), t({ ko: "학습 시간", en: "training" }), t({ ko: "시작·준비", en: "starting" }), "sha256"],
      found.map((f) => [t({ ko: `랭크 ${f.ranks}개`, en: `${f.ranks} rank(s)` }), f.rate.toFixed(0), (f.rate / base).toFixed(2), `${(f.rate / base / f.ranks * 100).toFixed(0)} %`, `${f.seconds.train.toFixed(2)} s`, `${(f.seconds.launch + f.seconds.start + f.seconds.load).toFixed(2)} s`, f.sha.slice(0, 12)])),
    new Set(found.map((f) => f.sha)).size === 1 && found.length > 1 ? el("p", { role: "status" }, t({ ko: "속도는 달라도 가중치는 비트까지 같습니다.", en: "The speeds differ; the weights are the same bits." })) : null,
  ];
}

function build(t, lesson) {
  const cores = globalThis.navigator?.hardwareConcurrency;
  return [
    el("p", {}, t({ ko: "“GPU가 8대면 8배 빠르다”고들 합니다. 정말 그럴까요? 이 컴퓨터에서 같은 작업을 랭크 1개, 2개, 4개로 학습해 재 봅시다. 점선은 이상, 실선은 측정값입니다.", en: "“Eight GPUs are eight times faster.” Really? Train the same job here on 1, 2 and 4 ranks, and measure. The dashed line is the ideal, the solid one what was measured." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "speed", label: t({ ko: "재 보기", en: "Measure" }), draw: (told) => draw(t, told) }), lesson.live && cores ? el("figcaption", {}, t({ ko: `이 컴퓨터의 코어: ${cores}개. 코어보다 랭크가 많으면 서로 기다립니다.`, en: `This machine has ${cores} cores. More ranks than cores wait for each other.` })) : null),
    el("p", {}, t({ ko: "시간은 어디로 갈까요? 계산은 나눌 수 있습니다. 나눌 수 없는 것도 있습니다: gradient를 주고받는 시간, 가장 느린 랭크를 기다리는 시간, 모두가 똑같이 하는 업데이트, 그리고 시작하는 시간. 나눌 수 없는 몫이 5 %만 되어도 8개의 랭크로 8배는 되지 않습니다.", en: "Where does the time go? Computing can be shared. Some things cannot: exchanging gradients, waiting for the slowest rank, the update that everybody does, and starting. With only 5 % that cannot be shared, 8 ranks are not 8 times faster." })),
  ];
}

export const speed = {
  title: { ko: "정말 8배 빠를까?", en: "Really 8 times faster?" },
  build,
  question: (t) => ({ text: t({ ko: "한 스텝의 5 %는 나눌 수 없고 95 %는 완벽하게 나뉜다면, 랭크 8개로 몇 배 빨라질까요? (소수 첫째 자리까지)", en: "If 5 % of a step cannot be shared and 95 % is shared perfectly, how many times faster are 8 ranks? (one decimal)" }),
    answer: () => { const value = div(1, 0.05 + 0.95 / 8); return { value, near: 0.06, why: `1 / (0.05 + 0.95 / 8) = ${value.toFixed(2)}` }; } }),
};
