import { COLORS, el, experiment, rounds, svg, table } from "../kit.js";

/** Steps of the job that the button starts: the height of the drawing before the first line. */
const STEPS = 250;

function timeline(t, told) {
  const lines = told.lines.filter((line) => line.of === "disturbed");
  const steps = told.progress?.disturbed ?? [];
  // Each time that the team is formed, another line begins.
  const sessions = steps.reduce((all, point, i) => { if (!i || point[2] !== steps[i - 1][2]) all.push([]); all.at(-1).push(point); return all; }, []);
  const restart = told.restarts.disturbed?.[0], noticed = lines.find((line) => /SIGKILL|killed/.test(line.text))?.at;
  const { disturbed, peace } = told.results;
  const end = Math.max(1, ...lines.map((line) => line.at), ...steps.map(([at]) => at)), most = Math.max(STEPS, ...steps.map(([, step]) => step));
  const px = (at) => 52 + at / end * 560, py = (step) => 200 - step / most * 150;
  return [
    steps.length ? svg(640, 250, t({ ko: "시간에 따른 스텝, 죽은 순간과 다시 시작한 순간", en: "Steps over time, with the moment of the kill" }),
      [0, most / 2, most].map((step) => el("g", {}, el("line", { class: "axis", x1: 52, x2: 612, y1: py(step), y2: py(step) }), el("text", { class: "soft", x: 44, y: py(step) + 5, "text-anchor": "end" }, String(step)))),
      rounds(0, end, 5).map((at) => el("text", { class: "soft", x: px(at), y: 222, "text-anchor": at ? "middle" : "start" }, String(at))), el("text", { class: "soft", x: 332, y: 246, "text-anchor": "middle" }, t({ ko: "초", en: "seconds" })), el("text", { x: 4, y: 22 }, t({ ko: "스텝", en: "step" })),
      sessions.map((points, i) => el("g", {}, i ? el("line", { x1: px(sessions[i - 1].at(-1)[0]), y1: py(sessions[i - 1].at(-1)[1]), x2: px(points[0][0]), y2: py(points[0][1]), stroke: COLORS[0], "stroke-width": 2, "stroke-dasharray": "2 5" }) : null,
        el("polyline", { fill: "none", stroke: COLORS[0], "stroke-width": 3.5, "stroke-linejoin": "round", "stroke-linecap": "round", points: points.map(([at, step]) => `${px(at).toFixed(1)},${py(step).toFixed(1)}`).join(" ") }), el("circle", { cx: px(points.at(-1)[0]), cy: py(points.at(-1)[1]), r: 4.5, fill: COLORS[0] }))),
      noticed !== undefined ? el("g", {}, el("line", { x1: px(noticed), x2: px(noticed), y1: 34, y2: 200, stroke: "var(--warn)", "stroke-width": 2, "stroke-dasharray": "4 4" }), el("text", { x: px(noticed) + (noticed > end * 0.7 ? -8 : 8), y: 44, "text-anchor": noticed > end * 0.7 ? "end" : "start", style: "fill:var(--warn)" }, t({ ko: `rank ${restart?.rank ?? "?"} 죽음`, en: `rank ${restart?.rank ?? "?"} dies` }))) : null) : null,
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
