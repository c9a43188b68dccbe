// The team as it is: storage → nodes → ranks → shards.

import { fmt, svg, t } from "./ui.js";

const RANK = 92;
const GAP = 12;
const MOST = 64;

/** An SVG of a run's nodes. */
export function drawTeam(state) {
  const nodes = state.nodes;
  const ranks = nodes.flatMap((node) => node.ranks);
  const few = ranks.length <= MOST;
  const shown = nodes.map((node) => ({ ...node, ranks: few ? node.ranks : node.ranks.slice(0, 4) }));
  const widths = shown.map((node) => Math.max(150, node.ranks.length * (RANK + GAP) + GAP + (few ? 0 : 70)));
  const width = Math.max(360, widths.reduce((sum, one) => sum + one + 22, -22) + 2);
  const label = t("now.alt", { nodes: nodes.length, ranks: ranks.length, shards: state.team.shards ?? 0 });
  const root = svg("svg", { viewBox: `0 0 ${width} ${114 + heightOf(ranks)}`, role: "img", "aria-label": label });
  root.style.maxWidth = `${Math.max(width, 620)}px`;
  root.style.minWidth = `${Math.min(width, 1100) * 0.85}px`;
  const requests = ranks.reduce((sum, one) => sum + one.requests, 0);
  const middle = width / 2;
  let left = 1;
  shown.forEach((node, at) => {
    drawNode(root, state, node, left, widths[at], middle, few ? 0 : nodes[at].ranks.length - 4);
    left += widths[at] + 22;
  });
  root.append(
    svg("rect", { class: "t-box", x: middle - 92, y: 1, width: 184, height: 44, rx: 12 }),
    text(middle, 19, t("now.storage"), "t-text", 13, 650),
    text(middle, 36, requests ? t("now.reads", { count: fmt.whole(requests) }) : t("now.noreads"), "t-muted", 12),
  );
  return root;
}

/** Of a rank's box and the room around it: one or two rows of shards. */
function heightOf(ranks) {
  const most = Math.max(0, ...ranks.map((one) => one.shards.length));
  return most > 8 ? 126 : most > 4 ? 120 : 104;
}

function drawNode(root, state, node, left, width, middle, more) {
  const top = 74;
  const tall = heightOf(state.nodes.flatMap((one) => one.ranks));
  root.append(svg("rect", { class: "t-node", x: left, y: top, width, height: tall + 31, rx: 14 }));
  root.append(text(left + 14, top + tall + 20, t("now.node", { node: node.node }), "t-text", 12.5, 650, "start"));
  root.append(text(left + width - 14, top + tall + 20, node.host.slice(0, 18), "t-muted", 12, 400, "end"));
  node.ranks.forEach((one, at) => {
    const x = left + GAP + at * (RANK + GAP);
    const centre = x + RANK / 2;
    const used = one.requests > 0 ? " used" : "";
    root.append(svg("path", { class: `t-line${used}`, d: `M${middle} 45 C ${middle} 74, ${centre} 50, ${centre} ${top + 9}` }));
    drawRank(root, state, one, x, top + 9, tall - 10);
  });
  if (more > 0) root.append(text(left + width - 40, top + 84, `+ ${more}`, "t-muted", 14, 600));
}

function drawRank(root, state, one, x, y, tall) {
  const late = state.straggler?.rank === one.rank ? " t-late" : "";
  root.append(svg("rect", { class: `t-box${late}`, x, y, width: RANK, height: tall, rx: 10 }));
  root.append(text(x + RANK / 2, y + 21, t("now.rank", { rank: one.rank }), "t-text", 13, 650));
  root.append(text(x + RANK / 2, y + 38, one.memory ? fmt.bytes(one.memory) : "", "t-muted", 11.5));
  root.append(text(x + RANK / 2, y + 62, t("now.shards"), "t-muted", 11));
  const shards = one.shards.slice(0, 8);
  const across = Math.min(4, Math.max(1, shards.length));
  const size = 17;
  const first = x + RANK / 2 - (across * (size + 3) - 3) / 2;
  shards.forEach((shard, at) => {
    const sx = first + (at % across) * (size + 3);
    const sy = y + 69 + Math.floor(at / across) * (size + 3);
    root.append(svg("rect", { class: "t-shard", x: sx, y: sy, width: size, height: size, rx: 4 }));
    root.append(text(sx + size / 2, sy + 12.5, String(shard), "t-text", 10.5));
  });
  if (one.shards.length > shards.length) {
    root.append(text(x + RANK / 2, y + 112, `+ ${one.shards.length - shards.length}`, "t-muted", 11));
  }
}

function text(x, y, words, kind, size, weight = 400, anchor = "middle") {
  return svg("text", { x, y, class: kind, "font-size": size, "font-weight": weight, "text-anchor": anchor }, words);
}
