// The frame of the lesson: language, chapters, and the question at the end of each.
import { el, put } from "./kit.js";
import { CHAPTERS } from "./chapters/all.js";

const LESSON = globalThis.LESSON ?? { live: true, recordings: {} };
const WORDS = {
  ko: { chapters: "차례", skip: "본문으로", next: "다음", back: "이전", check: "확인", question: "생각해 보기", yours: "내 답", right: "맞아요!", wrong: "다시 생각해 보세요. 계산하면", chapter: (n) => `${n}장`, live: "이 컴퓨터에서 실행 중", saved: "저장된 수업", lang: "언어" },
  en: { chapters: "Chapters", skip: "Skip to the text", next: "Next", back: "Back", check: "Check", question: "A question", yours: "My answer", right: "Right!", wrong: "Not quite. Computed, it is", chapter: (n) => `Chapter ${n}`, live: "running on this machine", saved: "saved lesson", lang: "Language" },
};
let language = remembered() ?? (LESSON.language || (navigator.language.startsWith("ko") || !navigator.language ? "ko" : "en"));

function remembered() { try { return localStorage.getItem("dure-language"); } catch { return null; } }
const t = (words) => (typeof words === "string" ? words : words[language] ?? words.en);

function draw() {
  const words = WORDS[language];
  const number = Math.min(Math.max(parseInt(location.hash.slice(1), 10) || 1, 1), CHAPTERS.length);
  const chapter = CHAPTERS[number - 1];
  document.documentElement.lang = language;
  document.title = `${number}. ${t(chapter.title)} · dure`;
  document.getElementById("skip").textContent = words.skip;
  put(document.getElementById("mode"), LESSON.live ? words.live : words.saved);
  const switcher = document.getElementById("languages");
  switcher.setAttribute("aria-label", words.lang);
  put(switcher, [["ko", "한국어"], ["en", "English"]].map(([key, name]) => el("button", { type: "button", lang: key, "aria-pressed": String(key === language), onclick: () => { language = key; try { localStorage.setItem("dure-language", key); } catch { /* a page from disk may have no storage */ } draw(); switcher.querySelector("[aria-pressed=true]").focus(); } }, name)));
  const list = document.getElementById("chapters");
  list.setAttribute("aria-label", words.chapters);
  put(list, el("ol", {}, CHAPTERS.map((each, i) => el("li", {}, el("a", { href: `#${i + 1}`, "aria-current": i + 1 === number ? "page" : null }, el("span", { class: "n" }, String(i + 1)), el("span", { class: "t" }, t(each.title)))))));
  const row = list.firstChild, current = row.querySelector("[aria-current]");
  row.scrollLeft = current.offsetLeft - (row.clientWidth - current.offsetWidth) / 2; // on a phone, chapters are in one row
  const main = document.getElementById("main");
  put(main, el("p", { class: "kicker" }, words.chapter(number)), el("h1", {}, t(chapter.title)), chapter.build(t, LESSON), question(chapter, words),
    el("div", { class: "turn" }, number > 1 ? el("a", { href: `#${number - 1}` }, `←\u00a0${words.back}: ${t(CHAPTERS[number - 2].title)}`) : el("span"), number < CHAPTERS.length ? el("a", { href: `#${number + 1}` }, `${words.next}: ${t(CHAPTERS[number].title)}\u00a0→`) : el("span")));
}

// The answer is computed when it is asked for; none is stored.
function question(chapter, words) {
  const asked = chapter.question(t);
  const answer = el("p", { class: "answer", role: "status" });
  const input = el("input", { class: "cell", type: "text", inputmode: "decimal", "aria-label": words.yours, autocomplete: "off" });
  return el("section", { class: "question", "aria-label": words.question }, el("h2", {}, words.question), el("p", {}, asked.text),
    el("form", { onsubmit: (event) => { event.preventDefault(); const found = asked.answer(); const given = Number(input.value.replace(",", "."));
      answer.textContent = input.value.trim() && Math.abs(given - found.value) <= (found.near ?? 1e-6) ? `${words.right} ${found.why}` : `${words.wrong} ${found.why}`; } },
      input, el("button", { class: "act", type: "submit" }, words.check)), answer);
}

document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); }); // its address is no chapter's
addEventListener("hashchange", () => { draw(); scrollTo(0, 0); document.getElementById("main").focus({ preventScroll: true }); });
draw();
