// Lines over steps, drawn by uPlot: dragging zooms for all that follow the same range.

import { colour, el, fmt, t } from "./ui.js";

/** A chart that keeps its element, and is made anew when series or colours change. */
export class Lines {
  constructor({ height = 240, onZoom, onReset, label }) {
    this.root = el("div", { class: "chart", role: "img", "aria-label": label });
    this.height = height;
    this.onZoom = onZoom;
    this.onReset = onReset;
    this.marks = [];
    this.key = "";
    this.resizer = new ResizeObserver(() => this.#resize());
    this.resizer.observe(this.root);
  }

  /** `series`: [{label, color, dash, points, scale, band: [low, high]}]; `data`: [x, ...ys]; `marks`: [{step, color}]. */
  show(series, data, marks = []) {
    this.marks = marks;
    const key = JSON.stringify([series, colour("bg"), document.documentElement.lang]);
    this.data = data;
    if (key !== this.key || !this.plot) {
      this.key = key;
      this.series = series;
      this.plot?.destroy();
      this.plot = this.#make(series, data);
    } else this.plot.setData(data);
  }

  destroy() {
    this.resizer.disconnect();
    this.plot?.destroy();
  }

  #resize() {
    const width = this.root.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }

  #make(series, data) {
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: `12px ${colour("font")}` };
    const scales = [...new Set(series.map((one) => one.scale || "y"))];
    const bands = [];
    series.forEach((one, at) => {
      if (one.band) bands.push({ series: [at + 1, at + 2], fill: one.band });
    });
    return new window.uPlot(
      {
        width: Math.max(200, this.root.clientWidth || 600),
        height: this.height,
        padding: [10, 8, 0, 0],
        cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 7 }, sync: { key: "steps" } },
        legend: { live: true, markers: { width: 2 } },
        scales: { x: { time: false }, metric: { range: (_, low, high) => (low >= 0 && high <= 1 ? [0, 1.05] : [low, high]) } },
        axes: [
          { ...axis, size: 34, values: (_, ticks) => ticks.map((one) => (Number.isInteger(one) ? fmt.whole(one) : "")) },
          ...scales.map((scale, at) => ({
            ...axis,
            scale,
            side: at ? 1 : 3,
            size: 56,
            grid: at ? { show: false } : axis.grid,
            values: (_, ticks) => ticks.map((one) => fmt.number(one)),
          })),
        ],
        bands,
        series: [
          { label: t("series.step"), value: (_, value) => (value === null ? "–" : fmt.whole(value)) },
          ...series.map((one) => ({
            label: one.label,
            scale: one.scale || "y",
            stroke: one.color,
            width: one.width ?? 1.8,
            dash: one.dash,
            spanGaps: one.spanGaps ?? false,
            points: { show: one.points ?? false, size: 7, fill: one.color },
            value: (_, value) => fmt.number(value),
          })),
        ],
        hooks: {
          setSelect: [
            (plot) => {
              const { left, width } = plot.select;
              if (width > 4) this.onZoom?.(Math.floor(plot.posToVal(left, "x")), Math.ceil(plot.posToVal(left + width, "x")) + 1);
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            },
          ],
          draw: [(plot) => this.#drawMarks(plot)],
          ready: [(plot) => plot.over.addEventListener("dblclick", () => this.onReset?.())],
        },
      },
      data,
      this.root,
    );
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = mark.color;
      ctx.setLineDash(mark.solid ? [] : [4 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(x, bbox.top, 3.5 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }
}
