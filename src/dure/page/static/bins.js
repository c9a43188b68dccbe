// Windows of steps: float32 [rank, stat, column, bin], and who holds the others up.

export const STATS = ["min", "max", "first", "last", "mean"];
export const PHASES = ["save", "data", "compute", "exchange", "update"];

export class Bins {
  constructor(head, values) {
    Object.assign(this, head);
    this.values = values;
  }

  /** One rank's column: a number per bin, NaN where there are no steps. */
  get(rank, column, stat) {
    const at = this.ranks.indexOf(rank);
    const which = this.stats.length === 1 ? 0 : this.stats.indexOf(stat);
    const place = (at * this.stats.length + which) * this.columns.length + this.columns.indexOf(column);
    return this.values.subarray(place * this.bins, (place + 1) * this.bins);
  }

  /** The first step of a bin. */
  step(bin) {
    return this.from + bin * this.width;
  }
}

/** As the server sends it: four bytes with the length of the JSON that follows, then float32. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return new Bins(head, new Float32Array(buffer, 4 + length));
}

/** The same answer as the server's, from finer bins that are here: for a saved report. */
export function rebin(source, { from, to, bins, columns, ranks, stats }) {
  to = Math.max(from + 1, to);
  const least = Math.max(1, Math.ceil((to - from) / Math.max(1, bins)));
  const width = Math.max(source.width, Math.ceil(least / source.width) * source.width);
  const start = Math.floor(from / source.width) * source.width;
  const count = Math.ceil((to - start) / width);
  const chosen = source.ranks.filter((rank) => !ranks || ranks.includes(rank));
  const wanted = stats || STATS;
  const head = { from: start, to, width, bins: count, ranks: chosen, columns, stats: wanted };
  const out = new Float32Array(chosen.length * wanted.length * columns.length * count).fill(NaN);
  let place = 0;
  for (const rank of chosen) {
    for (const stat of wanted) {
      for (const column of columns) {
        fold(source.get(rank, column, stat), source, head, stat, out.subarray(place, place + count));
        place += count;
      }
    }
  }
  return new Bins(head, out);
}

function fold(fine, source, head, stat, out) {
  const counts = stat === "mean" ? new Float32Array(out.length) : null;
  const first = Math.max(0, (head.from - source.from) / source.width);
  for (let at = first; at < fine.length; at += 1) {
    const bin = Math.floor((source.from + at * source.width - head.from) / head.width);
    if (bin >= out.length) break;
    const value = fine[at];
    if (Number.isNaN(value)) continue;
    const before = out[bin];
    if (stat === "mean") {
      out[bin] = counts[bin] ? before + (value - before) / (counts[bin] + 1) : value;
      counts[bin] += 1;
    } else if (Number.isNaN(before)) out[bin] = value;
    else if (stat === "min") out[bin] = Math.min(before, value);
    else if (stat === "max") out[bin] = Math.max(before, value);
    else if (stat === "last") out[bin] = value;
  }
}

function median(values) {
  const sorted = Float64Array.from(values).sort();
  if (!sorted.length) return NaN;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The rank that the others wait for: it comes last, so it waits least. The same rule as straggler.py. */
export function straggler(bins) {
  if (bins.ranks.length < 2) return null;
  const waits = bins.ranks.map((rank) => bins.get(rank, "wait", "mean"));
  const spans = bins.ranks.map((rank) => bins.get(rank, "span", "mean"));
  const counts = new Array(bins.ranks.length).fill(0);
  const steps = [];
  for (let at = 0; at < bins.bins; at += 1) {
    if (waits.some((wait) => !Number.isFinite(wait[at]))) continue;
    let last = 0;
    for (let rank = 1; rank < waits.length; rank += 1) if (waits[rank][at] < waits[last][at]) last = rank;
    counts[last] += 1;
    steps.push(at);
  }
  if (!steps.length) return null;
  const late = counts.indexOf(Math.max(...counts));
  const behind = median(
    steps.map((at) => Math.min(...waits.filter((_, rank) => rank !== late).map((wait) => wait[at])) - waits[late][at]),
  );
  const step = median(spans.flatMap((span) => Array.from(span).filter(Number.isFinite)));
  const often = counts[late] / steps.length;
  if (often < 0.6 || behind < Math.max(2000, 0.05 * (Number.isFinite(step) ? step : 0))) return null;
  return { rank: bins.ranks[late], behind_ms: behind / 1000, often };
}
