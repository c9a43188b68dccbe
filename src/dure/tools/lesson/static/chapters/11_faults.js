import { COLORS, el, experiment, svg, table } from "../kit.js";

function timeline(t, told) {
  const lines = told.lines.filter((line) => line.of === "disturbed");
  const steps = lines.flatMap((line) => { const found = /step (\d+)\/(\d+)/.exec(line.text); return found ? [{ at: line.at, step: Number(found[1]), of: Number(found[2]) }] : []; });
  const restart = told.restarts.disturbed?.[0], told_at = lines.find((line) => /SIGKILL|killed/.test(line.text))?.at;
  const { disturbed, peace } = told.results;
  const end = Math.max(1, ...lines.map((line) => line.at)), px = (at) => 40 + at / end * 560;
  return [
    steps.length ? svg(640, 210, t({ ko: "시간에 따른 스텝, 죽은 순간과 다시 시작한 순간", en: "Steps over time, with the moment of the kill" }),
      el("line", { class: "axis", x1: 40, x2: 600, y1: 170, y2: 170 }), el("text", { class: "soft", x: 600, y: 192, "text-anchor": "end" }, `${end.toFixed(0)} s`), el("text", { class: "soft", x: 40, y: 18 }, t({ ko: "스텝", en: "step" })),
      el("polyline", { fill: "none", stroke: COLORS[0], "stroke-width": 3, points: steps.map((s) => `${px(s.at)},${170 - s.step / s.of * 140}`).join(" ") }), steps.map((s) => el("circle", { cx: px(s.at), cy: 170 - s.step / s.of * 140, r: 4, fill: COLORS[0] })),
      told_at !== undefined ? el("g", {}, el("line", { x1: px(told_at), x2: px(told_at), y1: 24, y2: 170, stroke: "var(--warn)", "stroke-width": 2, "stroke-dasharray": "4 4" }), el("text", { x: px(told_at) + 6, y: 36, style: "fill:var(--warn)" }, t({ ko: `rank ${restart?.rank ?? "?"} 죽음`, en: `rank ${restart?.rank ?? "?"} dies` }))) : null) : null,
    restart ? el("p", {}, t({ ko: `스텝 ${restart.step}에서 rank ${restart.rank}이(가) 죽은 것을 알아챘고, ${restart.ranks}개 랭크가 메모리에 있던 상태에서 다시 시작했습니다.`, en: `At step ${restart.step} the death of rank ${restart.rank} was noticed, and ${restart.ranks} ranks started again from the state in memory.` })) : null,
    disturbed || peace ? table(["", t({ ko: "다시 시작", en: "restarts" }), "sha256"], [disturbed ? [t({ ko: "방해받은 실행", en: "the disturbed run" }), String(told.restarts.disturbed.length), disturbed.weights_sha256.slice(0, 40)] : null, peace ? [t({ ko: "평온한 실행", en: "the same run in peace" }), String(told.restarts.peace.length), peace.weights_sha256.slice(0, 40)] : null].filter(Boolean)) : null,
    disturbed && peace ? el("p", { role: "status" }, disturbed.weights_sha256 === peace.weights_sha256 ? t({ ko: "랭크가 죽었다 살아났어도 가중치는 비트까지 같습니다.", en: "A rank died and came back, and the weights are the same to the last bit." }) : t({ ko: "가중치가 다릅니다!", en: "The weights differ!" })) : null,
  ];
}

function build(t, lesson) {
  return [
    el("p", {}, t({ ko: "며칠씩 이어지는 학습에서는 무언가 반드시 죽습니다. 프로세스가, 컴퓨터가, 전원이. 보통은 마지막 체크포인트부터 다시 하고, 결과는 조금 달라집니다. 여기서는 직접 죽여 보세요.", en: "In a training that takes days, something is bound to die: a process, a machine, the power. Usually one goes back to the last checkpoint, and the result is a little different. Here, kill one yourself." })),
    el("p", {}, t({ ko: "시작한 뒤 랭크 버튼을 누르면 그 랭크를 kill -9로 정말 죽입니다. 나머지는 곧 알아채고, 메모리에 둔 상태에서 다시 모여 이어 갑니다. 끝나면 같은 학습을 평온하게 한 번 더 해서 비교합니다.", en: "Start it, then press a button: that rank is really killed, with kill -9. The rest notices, gathers again from a state that was kept in memory, and goes on. At the end the same training runs once more in peace, to compare." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "kill", label: t({ ko: "랭크 4개로 학습 시작", en: "Start training on 4 ranks" }), draw: (told) => timeline(t, told),
      extra: ({ kill }) => [0, 1, 2, 3].map((rank) => el("button", { class: "act quiet", type: "button", "data-kill": rank, style: `border-color:${COLORS[rank]};color:${COLORS[rank]};margin-right:.4rem`, onclick: () => kill(rank) }, t({ ko: `rank ${rank} 죽이기`, en: `kill rank ${rank}` }))) })),
    el("p", {}, t({ ko: "복사본이 모두 같기 때문에 하나만 살아 있어도 모두를 되살릴 수 있습니다. 그리고 데이터의 위치가 (에포크, 스텝) 두 숫자뿐이라 어느 사진도 두 번 보거나 빠뜨리지 않습니다.", en: "All copies are the same, so one survivor is enough to restore everybody. And the place in the data is two numbers, (epoch, step), so no photo is seen twice or left out." })),
  ];
}

export const faults = {
  title: { ko: "무언가 죽으면", en: "When something dies" },
  build,
  question: (t) => ({ text: t({ ko: "5스텝마다 상태를 메모리에 두는데 23스텝을 마치고 죽었습니다. 몇 스텝을 다시 해야 할까요?", en: "A state is kept in memory every 5 steps, and a rank dies after 23 steps are done. How many steps are done again?" }),
    answer: () => { const value = 23 % 5; return { value, why: `23 - ${23 - value} = ${value}` }; } }),
};
