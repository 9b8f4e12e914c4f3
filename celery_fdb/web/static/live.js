"use strict";
// What the server tells of the broker, written into the cells that name it: text only, never markup.
{
  const pill = document.getElementById("live");
  const address = document.body.dataset.events;

  const number = new Intl.NumberFormat("en", { useGrouping: true });
  const units = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];
  const age = (seconds) => {
    if (seconds < 60) { return seconds < 9.95 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds)} s`; }
    for (const [unit, size, smaller, smallerSize] of units) {
      if (seconds >= size) {
        const rest = Math.floor((seconds % size) / smallerSize);
        return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
      }
    }
    return "";
  };
  // Three digits, as on the server.
  const digits = (value) => (value >= 100 ? number.format(Math.round(value)).replaceAll(",", "\u202f") : String(Number(value.toPrecision(3))));
  const rate = (value) => {
    if (value >= 1 || value === 0) { return `${digits(value)}/s`; }
    return value * 60 >= 1 ? `${digits(value * 60)}/m` : `${digits(value * 3600)}/h`;
  };
  const kinds = {
    age,
    rate,
    number: (value) => number.format(value).replaceAll(",", "\u202f"),
    share: (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`,
  };
  const shown = (value, kind) => (value === null || value === undefined ? "–" : kinds[kind ?? "number"](value));

  const write = (cell, value) => {
    if (cell.dataset.field === "paused") { cell.hidden = !value; return; }
    if (cell.dataset.kind === "rate" && value === null) { return; } // the first look knows none
    const text = shown(value, cell.dataset.kind);
    if (cell.textContent !== text) { cell.textContent = text; }
    if (cell.dataset.field === "dead" || cell.dataset.summary === "dead" || cell.dataset.summary === "failures") {
      cell.classList.toggle("bad", value > 0);
    }
  };

  const writeQueue = (element, facts) => {
    for (const cell of element.querySelectorAll("[data-field]")) { write(cell, facts[cell.dataset.field]); }
    for (const cell of element.querySelectorAll("[data-field=consumers]")) {
      cell.classList.toggle("bad", facts.ready > 0 && facts.consumers === 0);
    }
  };

  // Links stay the same elements, so that one keeps the focus while its text changes.
  const attend = (alerts) => {
    const section = document.getElementById("alerts");
    if (!section) { return; }
    const list = section.querySelector("ul");
    while (list.children.length > alerts.length) { list.lastElementChild.remove(); }
    for (const [at, { text, queue }] of alerts.entries()) {
      const item = list.children[at] ?? list.appendChild(document.createElement("li"));
      const link = item.firstElementChild ?? item.appendChild(document.createElement("a"));
      link.href = queue === null ? section.dataset.sessions : `${section.dataset.queue}?${new URLSearchParams({ queue })}`;
      if (link.textContent !== text) { link.textContent = text; }
    }
    section.hidden = alerts.length === 0;
  };

  const look = ({ summary, queues, alerts }) => {
    attend(alerts);
    for (const cell of document.querySelectorAll("[data-summary]")) { write(cell, summary[cell.dataset.summary]); }
    for (const row of document.querySelectorAll("[data-live-queues] tr[data-queue]")) {
      if (Object.hasOwn(queues, row.dataset.queue)) { writeQueue(row, queues[row.dataset.queue]); }
    }
    for (const list of document.querySelectorAll("[data-live-queue]")) {
      if (Object.hasOwn(queues, list.dataset.liveQueue)) { writeQueue(list, queues[list.dataset.liveQueue]); }
    }
  };

  const say = (state, text) => {
    if (pill && pill.dataset.state !== state) { pill.dataset.state = state; pill.textContent = text; }
  };

  const listen = () => {
    const source = new EventSource(address);
    source.addEventListener("look", (each) => { say("live", "live"); look(JSON.parse(each.data)); });
    source.addEventListener("away", (each) => {
      say("away", "store away");
      pill.title = JSON.parse(each.data).text;
    });
    source.addEventListener("error", () => {
      say("lost", source.readyState === EventSource.CLOSED ? "not live" : "reconnecting");
    });
    addEventListener("pagehide", () => source.close());
  };

  // Where no answer can stream: one look after the other, while the page is seen.
  const poll = (seconds) => {
    const ask = async () => {
      if (!document.hidden) {
        try {
          const answer = await fetch(address, { headers: { accept: "application/json" } });
          if (!answer.ok) { throw new Error(answer.statusText); }
          const told = await answer.json();
          say("live", "live");
          look(told);
        } catch { say("lost", "not live"); }
      }
      setTimeout(ask, seconds * 1000);
    };
    ask();
  };

  addEventListener("pageshow", (event) => { if (event.persisted) { location.reload(); } });
  if (address && document.body.dataset.every) {
    poll(Number(document.body.dataset.every));
  } else if (address && "EventSource" in window) { listen(); }
}
