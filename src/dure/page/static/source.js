// Where a run comes from: the page's server, or the report that this file is. Both answer in one shape.

import { Bins, decode, rebin } from "./bins.js";

/** Asks the server; what is new about once a second, never more than a few requests at a time. */
export class ServerSource {
  saved = false;

  async runs() {
    return (await this.#get("/api/runs")).json();
  }

  async state(run, since) {
    return (await this.#get(`/api/state?${new URLSearchParams({ run, since })}`)).json();
  }

  async window(run, query) {
    const told = { run, from: query.from, to: query.to, bins: query.bins, columns: query.columns.join(",") };
    if (query.ranks) told.ranks = query.ranks.join(",");
    if (query.stats) told.stats = query.stats.join(",");
    return decode(await (await this.#get(`/api/window?${new URLSearchParams(told)}`)).arrayBuffer());
  }

  async samples(run) {
    return (await this.#get(`/api/samples?${new URLSearchParams({ run })}`)).json();
  }

  thumbnails(run) {
    return `/api/thumbnails?${new URLSearchParams({ run })}`;
  }

  export(run, name, range) {
    return `/export/${name}?${new URLSearchParams({ run, ...range })}`;
  }

  async #get(path) {
    const answer = await fetch(path, { signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
    return answer;
  }
}

/** What `dure report` put into this file. */
export class SavedSource {
  saved = true;

  constructor(text) {
    this.told = JSON.parse(text);
    this.lang = this.told.lang;
    this.made = this.told.made;
    this.bins = new Map();
    for (const run of this.told.runs) {
      const bytes = Uint8Array.from(atob(run.values), (letter) => letter.charCodeAt(0));
      this.bins.set(run.state.id, new Bins(run.head, new Float32Array(bytes.buffer)));
    }
  }

  #run(id) {
    return this.told.runs.find((run) => run.state.id === id);
  }

  async runs() {
    const runs = this.told.runs.map((run) => ({ id: run.state.id }));
    return { runs, first: runs[0].id };
  }

  async state(run) {
    return this.#run(run).state;
  }

  async window(run, query) {
    return rebin(this.bins.get(run), query);
  }

  /** Steps in one bin of what was saved: 1 when every step is here. */
  finest(run) {
    return this.bins.get(run).width;
  }

  async samples(run) {
    return this.#run(run).samples;
  }

  thumbnails(run) {
    return this.#run(run).thumbnails;
  }
}
