import { COLORS, el, experiment, svg, table } from "../kit.js";

function plan(t) {
  const node = (x, name, address, first) => el("g", {}, el("rect", { class: "frame", x, y: 130, width: 280, height: 130, rx: 14 }), el("text", { x: x + 16, y: 156 }, name), el("text", { class: "soft", x: x + 264, y: 156, "text-anchor": "end" }, address),
    el("rect", { x: x + 14, y: 170, width: 252, height: 76, rx: 10, fill: "none", stroke: "var(--accent)", "stroke-dasharray": "5 4" }), el("text", { class: "soft", x: x + 22, y: 188 }, "pytorch_squash.sqsh"),
    [0, 1, 2, 3].map((i) => el("g", {}, el("circle", { cx: x + 48 + i * 60, cy: 218, r: 18, fill: COLORS[first + i] }), el("text", { x: x + 48 + i * 60, y: 223, "text-anchor": "middle", style: "fill:var(--panel);font-weight:700" }, String(first + i)))));
  return svg(640, 280, t({ ko: "두 노드, 랭크 0-7, 공유 스토리지", en: "Two nodes, ranks 0-7, shared storage" }),
    el("rect", { class: "frame", x: 20, y: 14, width: 600, height: 90, rx: 14 }), el("text", { x: 36, y: 38 }, t({ ko: "공유 스토리지 /mnt/shared", en: "shared storage /mnt/shared" })),
    [["pytorch_squash.sqsh", "ro", 36, 64], ["training_data/", "ro", 36, 90], ["ddp.py", "ro", 356, 64], ["checkpoints/", "rw", 356, 90]].map(([name, mode, x, y]) => el("text", { class: "mono", x, y, style: mode === "rw" ? "fill:var(--warn)" : null }, `${name} ${mode}`)),
    el("path", { d: "M160,104 V130 M480,104 V130", stroke: "var(--soft)", "stroke-width": 2, fill: "none" }), el("path", { d: "M300,200 H340", stroke: "var(--accent)", "stroke-width": 4, fill: "none" }),
    node(20, "node0", "10.0.1.10", 0), node(340, "node1", "10.0.1.11", 4));
}

function build(t, lesson) {
  const draw = (told) => {
    const { nodes, alone } = told.results, said = told.lines.filter((line) => /ranks? \d|node\d/.test(line.text)).map((line) => line.text.replace(/^dure: /, ""));
    return [said.length ? el("pre", { class: "note", style: "white-space:pre-wrap" }, said.slice(-6).join("\n")) : null,
      nodes || alone ? table(["", t({ ko: "랭크", en: "ranks" }), "sha256"], [nodes ? [t({ ko: "노드 2개 × 랭크 2개", en: "2 nodes × 2 ranks" }), String(nodes.ranks), nodes.weights_sha256.slice(0, 32)] : null, alone ? [t({ ko: "랭크 1개, 혼자서", en: "1 rank, alone" }), String(alone.ranks), alone.weights_sha256.slice(0, 32)] : null].filter(Boolean)) : null,
      nodes && alone ? el("p", { role: "status" }, nodes.weights_sha256 === alone.weights_sha256 ? t({ ko: "두 노드에서 학습한 가중치와 혼자 학습한 가중치가 비트까지 같습니다.", en: "Trained on two nodes and alone: the weights are the same to the last bit." }) : t({ ko: "가중치가 다릅니다!", en: "The weights differ!" })) : null];
  };
  return [
    el("p", {}, t({ ko: "컴퓨터 한 대를 노드라고 합니다. 노드 두 대에 네 랭크씩, rank 0-7이 함께 학습합니다. 두 노드는 같은 컨테이너 이미지에서 실행되고 같은 공유 스토리지를 봅니다. 코드와 데이터는 읽기만 할 수 있고, 쓸 수 있는 곳은 checkpoints/뿐입니다.", en: "One computer is called a node. Two nodes with four ranks each train together, ranks 0-7. Both run from the same container image and see the same shared storage. Code and data can only be read; only checkpoints/ can be written." })),
    el("figure", { class: "figure" }, plan(t), el("figcaption", {}, t({ ko: "문서의 그림. ro는 읽기 전용, rw는 읽기·쓰기입니다.", en: "The documents' picture. ro: read-only, rw: read and write." }))),
    el("p", {}, t({ ko: "root 권한이 있으면 이 컴퓨터 안에 네트워크가 따로 있는 노드 두 개를 만들어 정말로 학습합니다(랭크 둘씩). 권한이 없으면 녹화를 보여 줍니다.", en: "With root, two nodes with networks of their own are made on this machine, and really train (two ranks each). Without, you see a recording." })),
    el("figure", { class: "figure" }, experiment(t, lesson, { name: "nodes", label: t({ ko: "두 노드에서 학습하기", en: "Train on two nodes" }), draw })),
  ];
}

export const nodes = {
  title: { ko: "두 노드, 이미지, checkpoints/", en: "Two nodes, an image, checkpoints/" },
  build,
  question: (t) => ({ text: t({ ko: "노드 2대에 랭크 4개씩일 때, node1의 두 번째 랭크는 몇 번일까요? (번호는 0부터)", en: "On 2 nodes with 4 ranks each, which number has node1's second rank? (counted from 0)" }),
    answer: () => { const value = 1 * 4 + 1; return { value, why: `1 × 4 + 1 = ${value}` }; } }),
};
