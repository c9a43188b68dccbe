import { el, experiment, svg, table } from "../kit.js";

const WAYS = { "every-rank": { ko: "A. 랭크마다 파일 전체를 읽기", en: "A. every rank reads the whole file" }, slices: { ko: "A. 랭크마다 한 조각만 읽고 나누기", en: "A. each reads a slice, then they share" }, seed: { ko: "B. 시드로 만들기", en: "B. made from a seed" } };

function bars(t, told) {
  const found = Object.entries(WAYS).filter(([key]) => told.results[key]).map(([key, name]) => { const { storage, seconds, fingerprints, loaded } = told.results[key]; return { name: t(name), requests: storage.requests, bytes: storage.bytes, by: storage.by_rank, seconds: seconds.load, file: loaded?.bytes ?? 0, print: fingerprints[0] }; });
  const most = Math.max(1, ...found.map((way) => way.bytes));
  return [
    svg(640, 4 + found.length * 74, t({ ko: "스토리지에서 읽은 바이트", en: "Bytes read from storage" }), found.map((way, i) => { let x = 20; return el("g", {}, el("text", { x: 20, y: 30 + i * 74 }, way.name),
      way.bytes ? way.by.map((rank, r) => { const width = rank.bytes / most * 460; const bar = el("rect", { x, y: 40 + i * 74, width: Math.max(width - 2, 0), height: 26, rx: 4, fill: `var(--r${r % 8})` }, el("title", {}, `rank ${r}: ${rank.requests}, ${rank.bytes} B`)); x += width; return bar; }) : el("line", { class: "axis", x1: 20, x2: 20, y1: 40 + i * 74, y2: 66 + i * 74, "stroke-width": 3 }),
      el("text", { class: "mono", x: x + 10, y: 58 + i * 74 }, way.bytes ? `${(way.bytes / 1e6).toFixed(1)} MB` : "0 MB")); })),
    table(["", t({ ko: "읽기 요청", en: "read requests" }), t({ ko: "읽은 바이트", en: "bytes read" }), t({ ko: "모델이 준비되기까지", en: "until the model is ready" }), t({ ko: "학습 뒤 지문", en: "fingerprint after training" })],
      found.map((way) => [way.name, String(way.requests), way.bytes.toLocaleString("en"), `${way.seconds.toFixed(2)} s`, way.print])),
  ];
}

const direct = (t) => svg(640, 190, t({ ko: "GPUDirect Storage: 스토리지에서 GPU 메모리로 바로", en: "GPUDirect Storage: from storage straight into GPU memory" }),
  [[10, { ko: "공유 스토리지", en: "shared storage" }], [240, { ko: "CPU 메모리", en: "CPU memory" }], [470, { ko: "GPU 메모리", en: "GPU memory" }]].map(([x, name]) => el("g", {}, el("rect", { class: "frame", x, y: 60, width: 160, height: 56, rx: 12 }), el("text", { x: x + 80, y: 94, "text-anchor": "middle" }, t(name)))),
  el("path", { d: "M170,88 H240 M400,88 H470", stroke: "var(--soft)", "stroke-width": 2.5, "stroke-dasharray": "6 5", fill: "none" }),
  el("path", { d: "M90,116 C90,180 550,180 550,116", stroke: "var(--accent)", "stroke-width": 3, fill: "none" }),
  el("text", { class: "soft", x: 320, y: 44, "text-anchor": "middle" }, t({ ko: "보통은 CPU 메모리를 거칩니다", en: "usually by way of CPU memory" })), el("text", { class: "soft", x: 320, y: 148, "text-anchor": "middle" }, "GPUDirect Storage"));

function build(t, lesson) {
  return [
    el("p", {}, t({ ko: "첫 가중치는 어디서 올까요? 시나리오 A: 미리 학습한 가중치 파일이 공유 스토리지(FSx, NFS, S3)에 있고 모든 랭크가 그것을 가져와야 합니다. 시나리오 B: 코드와 시드로 만듭니다. 파일을 읽을 일이 없습니다.", en: "Where do the first weights come from? Scenario A: a file of pretrained weights is on shared storage (FSx, NFS, S3), and every rank needs it. Scenario B: code and a seed make them, and no file is read at all." })),
    el("p", {}, t({ ko: "버튼을 누르면 파일을 하나 만들고, 두 가지 방법으로 읽고, 시드로도 만들어 봅니다. 요청 수와 바이트 수는 스토리지에 닿은 것을 센 값입니다.", en: "The button makes such a file, loads it in two ways, and makes weights from a seed. Requests and bytes are counted where storage is touched." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "load", label: t({ ko: "읽어 보기", en: "Load it" }), options: () => ({ ranks: 4 }), draw: (told) => bars(t, told) })),
    el("p", {}, t({ ko: "모두가 전체를 읽으면 스토리지는 같은 파일을 랭크 수만큼 내보냅니다. 한 조각씩 읽고 서로 나누면 한 번이면 됩니다. 시드로 만들면 0번입니다.", en: "Where everybody reads everything, storage hands out the same file once per rank. With slices that are shared, once. From a seed, never." })),
    el("figure", { class: "figure" }, direct(t), el("figcaption", {}, el("span", { class: "badge recorded" }, t({ ko: "여기서는 실행되지 않았습니다", en: "not run here" })), " ", t({ ko: "GPUDirect Storage는 GPU와 드라이버가 있어야 합니다. 이 그림에는 측정값이 없습니다.", en: "GPUDirect Storage needs a GPU and its driver; nothing in this drawing was measured." }))),
  ];
}

export const weights = {
  title: { ko: "가중치는 어디서 오나", en: "Where weights come from" },
  build,
  question: (t) => ({ text: t({ ko: "500 MB 파일을 8개 랭크가 각각 통째로 읽으면 스토리지는 몇 MB를 내보낼까요?", en: "Eight ranks each read a 500 MB file whole. How many MB does storage hand out?" }),
    answer: () => { const value = 8 * 500; return { value, why: `8 × 500 = ${value} MB` }; } }),
};
