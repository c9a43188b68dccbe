// The ledger as a picture: every sample of an epoch once, coloured by the rank that took it.

import { blank, card, colour, el, fmt, rankColour, t } from "./ui.js";

const THUMB = 32;
const ACROSS = 20;
/** While a run goes on, its epochs may be shorter than anybody looks at one. */
const SHOWN_MS = 5000;

export class SamplesView {
  constructor(context) {
    this.context = context;
    this.photos = true;
    this.root = el("div", { class: "view" });
    this.pictures = [];
    this.resizer = new ResizeObserver(() => this.#paint());
    this.resizer.observe(this.root);
  }

  destroy() {
    this.resizer.disconnect();
  }

  async update(run) {
    const { progress, condition } = run.state;
    const stamp = `${run.id}:${progress.epoch || progress.step}:${condition}:${document.documentElement.lang}:${document.documentElement.dataset.theme}`;
    if (stamp === this.stamp || (condition === "running" && performance.now() < this.until)) return;
    this.told = await this.context.source.samples(run.id);
    await this.#photo(run);
    this.stamp = stamp;
    this.until = performance.now() + SHOWN_MS;
    this.#build(run);
    this.#paint();
  }

  async #photo(run) {
    const address = this.told.thumbnails ? this.context.source.thumbnails(run.id) : null;
    if (!address || this.sprite) return;
    const image = new Image();
    image.src = address;
    this.sprite = await image.decode().then(() => image, () => null);
  }

  #build(run) {
    const { told } = this;
    const { recorded, dealt } = told;
    this.pictures = [];
    const cards = [];
    if (recorded.epoch !== null) {
      const picture = this.#picture(recorded, "samples.tip", Boolean(this.sprite));
      cards.push(card(t("samples.recorded", { epoch: recorded.epoch + 1 }), verdict(told), this.#toggle(), picture, legend(recorded.owner)));
    } else cards.push(el("p", { class: "notice" }, t("samples.unrecorded")));
    const splits = ["interleaved", "blocks"].filter((kind) => dealt[kind]);
    cards.push(
      el(
        "div",
        { class: "two" },
        splits.map((kind) =>
          card(
            t(`samples.${kind}`),
            told.kind === kind && el("span", { class: "pill live" }, t("samples.used")),
            this.#picture(dealt[kind], "samples.position", false),
            legend(dealt[kind].owner),
          ),
        ),
      ),
    );
    const notes = [told.shuffled && t("samples.shuffled"), told.drawn < told.samples && t("samples.first", { drawn: fmt.whole(told.drawn), samples: fmt.whole(told.samples) })];
    cards.push(el("p", { class: "small muted" }, notes.filter(Boolean).join(" ")));
    this.root.replaceChildren(...cards);
  }

  #toggle() {
    if (!this.sprite) return null;
    const button = el("button", { type: "button", "aria-pressed": String(this.photos) }, t("samples.photos"));
    button.addEventListener("click", () => {
      this.photos = !this.photos;
      button.setAttribute("aria-pressed", String(this.photos));
      this.#paint();
    });
    button.style.marginBottom = "0.6rem";
    return button;
  }

  #picture(cells, words, withPhotos) {
    const canvas = el("canvas", { role: "img", "aria-label": t("samples.alt", { drawn: fmt.whole(cells.owner.length) }) });
    const tip = el("div", { class: "tip", hidden: true });
    const stage = el("div", { class: "stage" }, canvas, tip);
    const picture = { canvas, stage, tip, cells, words, withPhotos };
    canvas.addEventListener("pointermove", (event) => hover(picture, event));
    canvas.addEventListener("pointerleave", () => {
      tip.hidden = true;
    });
    this.pictures.push(picture);
    return stage;
  }

  #paint() {
    for (const picture of this.pictures) paint(picture, this.photos ? this.sprite : null);
  }
}

function paint(picture, sprite) {
  const { canvas, stage, cells, withPhotos } = picture;
  const width = stage.clientWidth;
  const count = cells.owner.length;
  if (!width || !count) return;
  const image = withPhotos ? sprite : null;
  const narrow = width < 500; // a phone
  const wanted = image ? (narrow ? 29 : 38) : count <= 1000 ? (narrow ? 19 : 22) : count <= 5000 ? 11 : 6;
  const across = Math.max(1, Math.floor(width / wanted));
  const size = width / across;
  const rows = Math.ceil(count / across);
  picture.across = across;
  picture.size = size;
  const ctx = blank(canvas, width, rows * size);
  const [empty, bad] = [colour("sunk"), colour("bad")];
  ctx.font = `600 ${Math.round(size * 0.42)}px ${colour("font")}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const gap = size > 9 ? 1.5 : 0.5;
  for (let at = 0; at < count; at += 1) {
    const x = (at % across) * size;
    const y = Math.floor(at / across) * size;
    const owner = cells.owner[at];
    ctx.fillStyle = owner < 0 ? empty : rankColour(owner);
    ctx.beginPath();
    ctx.roundRect(x + gap, y + gap, size - 2 * gap, size - 2 * gap, Math.min(4, size / 5));
    ctx.fill();
    if (image && owner >= 0) {
      const rim = 3;
      ctx.drawImage(image, (at % ACROSS) * THUMB, Math.floor(at / ACROSS) * THUMB, THUMB, THUMB, x + gap + rim, y + gap + rim, size - 2 * (gap + rim), size - 2 * (gap + rim));
    } else if (size > 18 && owner >= 0) {
      ctx.fillStyle = "#10141a";
      ctx.fillText(String(owner), x + size / 2, y + size / 2 + 0.5);
    }
    if (cells.times && cells.times[at] > 1) {
      ctx.strokeStyle = bad;
      ctx.lineWidth = 2;
      ctx.strokeRect(x + 1.5, y + 1.5, size - 3, size - 3);
    }
  }
}

function hover(picture, event) {
  const { across, size, cells, tip, stage } = picture;
  const at = Math.floor(event.offsetY / size) * across + Math.floor(event.offsetX / size);
  if (!(at >= 0 && at < cells.owner.length)) {
    tip.hidden = true;
    return;
  }
  const told = { sample: fmt.whole(at), rank: cells.owner[at], step: fmt.whole(cells.step[at]) };
  tip.textContent = cells.owner[at] < 0 ? t("samples.nobody", told) : t(picture.words, told);
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, stage.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${event.offsetY + 16}px`;
}

function legend(owner) {
  const counts = new Map();
  for (const rank of owner) if (rank >= 0) counts.set(rank, (counts.get(rank) || 0) + 1);
  const rows = [...counts].sort(([one], [other]) => one - other).slice(0, 32);
  const list = el("ul", { class: "legend" }, rows.map(([rank, count]) => el("li", {}, el("span", { class: "swatch", style: { background: rankColour(rank) } }), t("samples.of", { rank, count: fmt.whole(count) }))));
  list.style.marginTop = "0.7rem";
  return list;
}

function verdict(told) {
  const { times } = told.recorded;
  const repeated = times.filter((count) => count > 1).length;
  const seen = times.filter((count) => count > 0).length;
  if (repeated) return el("span", { class: "pill bad" }, t("samples.wrong", { repeated: fmt.whole(repeated), missing: fmt.whole(times.length - seen) }));
  if (seen === told.samples) return el("span", { class: "pill good" }, t("samples.once", { samples: fmt.whole(told.samples) }));
  return el("span", { class: "pill" }, t("samples.partly", { seen: fmt.whole(seen), samples: fmt.whole(told.samples) }));
}
