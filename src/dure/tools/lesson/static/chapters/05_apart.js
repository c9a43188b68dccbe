import { COLORS, dot, el, experiment, lines, shown, table } from "../kit.js";

const NAMES = [{ ko: "귀", en: "ear" }, { ko: "수염", en: "whiskers" }, { ko: "눈", en: "eyes" }];

function paths(t, rows, label) {
  const ranks = [...new Set(rows.map((row) => row.rank))].sort((a, b) => a - b);
  const of = (rank) => rows.filter((row) => row.rank === rank);
  const values = rows.flatMap((row) => row.weights ?? []);
  const [from, to] = [Math.min(0, ...values), Math.max(...values)];
  const ends = ranks.map((rank) => of(rank).find((row) => row.accuracy !== undefined));
  const kinds = new Set(ends.filter(Boolean).map((row) => row.fingerprint)).size;
  return [
    el("h2", { class: "part" }, label),
    el("ul", { class: "legend" }, ranks.map((rank) => el("li", {}, dot(rank), `rank ${rank}`))),
    el("div", { class: "trio" }, NAMES.map((name, i) => lines(
      ranks.map((rank) => ({ color: COLORS[rank], points: of(rank).filter((row) => row.step !== undefined).map((row) => [row.step, row.weights[i]]) })),
      { width: 250, height: 210, right: 10, label: t(name), x: t({ ko: "스텝", en: "step" }), y: t(name), from, to }))),
    ends.every(Boolean) && ends.length ? table(["", t({ ko: "귀", en: "ear" }), t({ ko: "수염", en: "whiskers" }), t({ ko: "눈", en: "eyes" }), t({ ko: "새 사진 200장 정답률", en: "right on 200 new photos" }), t({ ko: "지문", en: "fingerprint" })],
      ends.map((row) => [[dot(row.rank), `rank ${row.rank}`], ...row.weights.map((w) => shown(w, 4)), `${(row.accuracy * 100).toFixed(1)} %`, row.fingerprint])) : null,
    kinds ? el("p", { role: "status" }, kinds > 1 ? t({ ko: `서로 다른 모델이 ${kinds}개 생겼습니다.`, en: `There are ${kinds} different models now.` }) : t({ ko: "모든 랭크의 모델이 비트까지 같습니다.", en: "All ranks have one model, the same to the last bit." })) : null,
  ];
}

function build(t, lesson) {
  return [
    el("p", {}, t({ ko: "네 학생이 같은 시험을 준비하는데, 한 명은 수학만, 한 명은 영어만, 한 명은 과학만, 한 명은 역사만 공부한다고 해 봅시다. 시험 날 골고루 잘하는 사람은 없습니다. 하지만 매일 저녁 모여 배운 것을 나눈다면 다릅니다.", en: "Four students prepare for one exam: one studies only maths, one only English, one only science, one only history. On the day, nobody does well in all of them. Unless they meet every evening and share what they learned." })),
    el("p", {}, t({ ko: "아래에서는 랭크 넷이 서로 다른 사진 100장씩을 봅니다. rank 0의 사진은 귀로, rank 1은 수염으로, rank 2는 눈으로 고양이를 알 수 있습니다. 먼저 혼자서(sync = false), 그다음에는 스텝마다 gradient를 나누며(sync = true) 정말로 학습합니다. 출발점은 모두 0.5, 0.3, 0.2입니다.", en: "Below, four ranks see 100 photos each. In rank 0's photos it is the ears that tell cats, in rank 1's the whiskers, in rank 2's the eyes. They really train: first each alone (sync = false), then sharing gradients at every step (sync = true). All start from 0.5, 0.3, 0.2." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "apart", label: t({ ko: "따로, 그리고 함께 학습하기", en: "Train apart, then together" }),
      draw: (told) => [told.rows.apart ? paths(t, told.rows.apart, t({ ko: "동기화 없이: 네 갈래 길", en: "Without synchronisation: four paths" })) : [], told.rows.together ? paths(t, told.rows.together, t({ ko: "동기화하며: 한 갈래 길", en: "With synchronisation: one path" })) : []].flat() })),
    el("p", {}, t({ ko: "따로 학습한 랭크는 자기 사진에 있던 특징의 가중치만 크게 키웁니다. 함께 학습하면 네 선이 하나로 겹칩니다. 그림이 하나처럼 보이는 것이 아니라 비트까지 같습니다.", en: "A rank that trains alone raises the weight of what its own photos showed. Together, the four lines are one. They do not just look alike: they are the same bits." })),
  ];
}

export const apart = {
  title: { ko: "동기화하지 않으면: 네 학생, 네 모델", en: "Without synchronisation: four students, four models" },
  build,
  question: (t) => ({ text: t({ ko: "랭크 4개가 동기화 없이 사진 400장을 나누어 한 번씩(1 에포크) 보면, 모델 하나는 사진을 몇 장 보고 배울까요?", en: "Four ranks share 400 photos, one epoch, without synchronisation. From how many photos does each model learn?" }),
    answer: () => { const value = 400 / 4; return { value, why: `400 / 4 = ${value}` }; } }),
};
