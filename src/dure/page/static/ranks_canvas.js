// The two pictures of ranks × time: columns of many steps, and bars of a few in time.

import { PHASES } from "./bins.js";
import { fmt } from "./ui.js";

export const PARTS = ["save", "data", "compute", "exchange", "wait", "update", "other"];
/** Up to so many steps are drawn in time. */
export const MOST_IN_TIME = 48;

/** Each column is one bin; its height is the mean time of a step, cut into phases. */
export function drawBins(ctx, shape, bins, colours) {
  const { left, right, top, rowHeight } = shape;
  const each = (right - left) / bins.bins;
  const tallest = scaleOf(bins);
  bins.ranks.forEach((rank, row) => {
    const bottom = top + (row + 1) * rowHeight - 3;
    const full = rowHeight - 6;
    label(ctx, shape, row, rank, colours);
    const heights = new Float32Array(bins.bins);
    const parts = partsOf(bins, rank);
    for (const name of PARTS) {
      ctx.fillStyle = colours[name];
      const values = parts[name];
      for (let at = 0; at < bins.bins; at += 1) {
        const height = Math.min(full - heights[at], (values[at] / tallest) * full);
        if (!(height > 0)) continue;
        const x = left + at * each;
        ctx.fillRect(x, bottom - heights[at] - height, Math.max(0.6, each > 3 ? each - 0.8 : each + 0.3), height);
        heights[at] += height;
      }
    }
  });
  const ticks = niceSteps(bins.from, bins.to, Math.max(2, Math.floor((right - left) / 110)));
  axis(ctx, shape, bins, colours, ticks.map((step) => [left + ((step - bins.from) / (bins.bins * bins.width)) * (right - left), fmt.whole(step)]));
}

/** Bars in time. All ranks end an exchange at the same moment: there their own clocks are laid over each other. */
export function drawGantt(ctx, shape, bins, colours) {
  const { left, right, top, rowHeight } = shape;
  const { times, begin, end } = meetings(bins);
  const x = (time) => left + ((time - begin) / Math.max(1, end - begin)) * (right - left);
  const waits = bins.ranks.map((rank) => bins.get(rank, "wait", "mean"));
  const bottom = top + bins.ranks.length * rowHeight;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, right - left, bottom + 4);
  ctx.clip();
  for (let at = 0; at < bins.bins; at += 1) {
    if (!Number.isFinite(times[at])) continue;
    bins.ranks.forEach((rank, row) => drawStep(ctx, shape, bins, rank, row, at, times[at], x, colours));
    ctx.strokeStyle = colours.ink;
    ctx.globalAlpha = 0.35;
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(x(times[at]), top - 2);
    ctx.lineTo(x(times[at]), bottom);
    ctx.stroke();
    ctx.globalAlpha = 1;
    markLast(ctx, shape, bins, waits, at, times[at], x, colours);
  }
  ctx.restore();
  bins.ranks.forEach((rank, row) => label(ctx, shape, row, rank, colours));
  const room = Math.max(1, Math.ceil((bins.bins * 46) / (right - left)));
  const ticks = [];
  for (let at = 0; at < bins.bins; at += room) if (Number.isFinite(times[at])) ticks.push([x(times[at]), fmt.whole(bins.step(at))]);
  axis(ctx, shape, bins, colours, ticks);
}

function drawStep(ctx, shape, bins, rank, row, at, met, x, colours) {
  const value = (name) => {
    const found = bins.get(rank, name, "mean")[at];
    return Number.isFinite(found) ? found : 0;
  };
  const y = shape.top + row * shape.rowHeight + 4;
  const height = shape.rowHeight - 8;
  let start = met - value("exchange") - value("compute") - value("data") - value("save");
  for (const name of PHASES) {
    const length = value(name);
    if (length > 0) bar(ctx, x(start), x(start + length), y, height, colours[name]);
    if (name === "exchange" && value("wait") > 0) bar(ctx, x(start), x(start + value("wait")), y, height, colours.wait);
    start += length;
  }
}

function bar(ctx, from, to, y, height, color) {
  ctx.fillStyle = color;
  ctx.fillRect(from, y, Math.max(0.75, to - from - 0.4), height);
}

/** A small sign where the last rank arrives, when the others waited for it. */
function markLast(ctx, shape, bins, waits, at, met, x, colours) {
  if (waits.length < 2 || waits.some((wait) => !Number.isFinite(wait[at]))) return;
  let last = 0;
  for (let row = 1; row < waits.length; row += 1) if (waits[row][at] < waits[last][at]) last = row;
  const others = Math.min(...waits.filter((_, row) => row !== last).map((wait) => wait[at]));
  if (others - waits[last][at] < 2000) return;
  const arrived = x(met - bins.get(bins.ranks[last], "exchange", "mean")[at]);
  const y = shape.top + last * shape.rowHeight + 3;
  ctx.fillStyle = colours.warn;
  ctx.beginPath();
  ctx.moveTo(arrived - 5, y - 3);
  ctx.lineTo(arrived + 5, y - 3);
  ctx.lineTo(arrived, y + 6);
  ctx.fill();
}

/** When each step's exchange ended, on the first rank's clock, in microseconds; and what to draw from and to. */
export function meetings(bins) {
  const rank = bins.ranks[0];
  const span = bins.get(rank, "span", "mean");
  const update = bins.get(rank, "update", "mean");
  const times = new Float64Array(bins.bins);
  let clock = 0;
  for (let at = 0; at < bins.bins; at += 1) {
    const length = at === 0 ? 0 : Number.isFinite(span[at]) ? span[at] : bins.ranks.reduce((most, one) => Math.max(most, busy(bins, one, at)), 0);
    clock += length - (at ? (update[at] || 0) - (update[at - 1] || 0) : 0);
    times[at] = Number.isFinite(update[at]) ? clock : NaN;
  }
  const first = times.findIndex(Number.isFinite);
  const begin = (times[first] || 0) - bins.ranks.reduce((most, one) => Math.max(most, busy(bins, one, Math.max(0, first)) - (bins.get(one, "update", "mean")[Math.max(0, first)] || 0)), 0);
  const end = clock + Math.max(...bins.ranks.map((one) => bins.get(one, "update", "mean")[bins.bins - 1] || 0)) * 1.5;
  return { times, begin, end };
}

function busy(bins, rank, at) {
  return PHASES.reduce((sum, name) => sum + (bins.get(rank, name, "mean")[at] || 0), 0);
}

function partsOf(bins, rank) {
  const get = (name) => bins.get(rank, name, "mean");
  const parts = { save: get("save"), data: get("data"), compute: get("compute"), update: get("update"), wait: get("wait") };
  const exchange = get("exchange");
  const span = get("span");
  parts.exchange = new Float32Array(bins.bins);
  parts.other = new Float32Array(bins.bins);
  for (let at = 0; at < bins.bins; at += 1) {
    parts.exchange[at] = exchange[at] - (parts.wait[at] || 0);
    parts.other[at] = span[at] - PHASES.reduce((sum, name) => sum + (get(name)[at] || 0), 0);
  }
  return parts;
}

/** Nearly the longest step, so that a single long one does not flatten all others. */
function scaleOf(bins) {
  const totals = [];
  for (const rank of bins.ranks) {
    for (let at = 0; at < bins.bins; at += 1) {
      const total = Math.max(busy(bins, rank, at), bins.get(rank, "span", "mean")[at] || 0);
      if (total > 0) totals.push(total);
    }
  }
  totals.sort((one, other) => one - other);
  return totals[Math.floor(totals.length * 0.985)] * 1.05 || 1;
}

function label(ctx, shape, row, rank, colours) {
  ctx.fillStyle = colours.ink;
  ctx.font = `600 12px ${colours.font}`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  ctx.fillText(shape.rank(rank), 0, shape.top + (row + 0.5) * shape.rowHeight, shape.left - 8);
}

function axis(ctx, shape, bins, colours, ticks) {
  ctx.font = `11.5px ${colours.font}`;
  ctx.textBaseline = "alphabetic";
  ctx.textAlign = "center";
  ctx.fillStyle = colours.muted;
  let free = 0;
  for (const [x, words] of ticks) {
    const half = ctx.measureText(words).width / 2;
    if (x - half < free) continue;
    ctx.fillText(words, Math.min(Math.max(x, shape.left + half), shape.right - half), 16);
    free = x + half + 12;
  }
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = 1;
  for (let row = 1; row < bins.ranks.length; row += 1) {
    const y = shape.top + row * shape.rowHeight;
    ctx.beginPath();
    ctx.moveTo(0, y);
    ctx.lineTo(shape.right, y);
    ctx.stroke();
  }
}

function niceSteps(from, to, most) {
  const rough = Math.max(1, (to - from) / most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const each = Math.max(1, [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough));
  const found = [];
  for (let step = Math.ceil(from / each) * each; step < to; step += each) found.push(step);
  return found;
}
