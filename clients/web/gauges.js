// What the engine is doing, once a second while the page is seen.

import { ask } from "./api.js";
import { $ } from "./dom.js";

let before = null; // {time, tokens} of the reading before

const show = (id, value) => { $(id).textContent = value; };

async function read() {
  try {
    const stats = await (await ask("/stats")).json();
    const mine = stats.replicas.map((replica) => replica.models[$("model").value]).filter(Boolean);
    const sum = (name) => mine.reduce((total, gauges) => total + (gauges[name] || 0), 0);
    const kv = mine.length ? Math.max(...mine.map((gauges) => gauges.kv_usage || 0)) : 0;
    show("g-running", sum("running"));
    show("g-waiting", sum("waiting"));
    $("g-kv").value = kv;
    show("g-kv-text", `${(100 * kv).toFixed(0)} %`);
    show("g-preemptions", sum("preemptions"));
    const asked = sum("prefix_queries");
    show("g-hits", asked ? `${((100 * sum("prefix_hits")) / asked).toFixed(0)} %` : "–");
    const tokens = sum("generation_tokens");
    let rate = null;
    if (before && stats.time > before.time) {
      rate = Math.max(0, (tokens - before.tokens) / (stats.time - before.time));
      show("g-rate", rate.toFixed(0));
    }
    if (!before || stats.time > before.time) before = { time: stats.time, tokens };
    show("g-replicas", `${stats.replicas.filter((replica) => replica.ready).length} of ${stats.replicas.length}`);
    if (rate !== null) show("pulse", rate >= 1 ? `${rate.toFixed(0)} tokens/s` : "");
    document.body.classList.remove("away");
  } catch {
    show("g-replicas", "no answer");
    show("pulse", "no answer");
    document.body.classList.add("away");
  }
}

export function watch() {
  read();
  setInterval(() => document.hidden || read(), 1000);
}
