"use strict";
// Selecting messages, tables on a phone, moments in the reader's time zone, where one is in the bar, and the focus.
{
  const second = { hour: "numeric", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZoneName: "short" };
  const forms = {
    second,
    full: { year: "numeric", month: "numeric", day: "numeric", ...second },
    seconds: { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" },
    minute: { hour: "2-digit", minute: "2-digit", hourCycle: "h23" },
    day: { month: "short", day: "numeric" },
  };
  const zone = (moment) => {
    const parts = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" }).formatToParts(moment);
    return parts.find((each) => each.type === "timeZoneName").value;
  };
  // One shows and takes the reader's time; what is sent is the moment, which stays the same until another is chosen.
  const choose = (input) => {
    const sent = Object.assign(document.createElement("input"), { type: "hidden", name: input.name });
    const say = () => {
      input.labels[0].querySelector("[data-zone]").textContent = zone(sent.value ? new Date(sent.value) : new Date());
    };
    if (input.dataset.moment) {
      const moment = new Date(input.dataset.moment);
      sent.value = moment.toISOString();
      input.value = new Date(moment - moment.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
    }
    input.max = "9999-12-31T23:59"; // a longer year is no moment that can be sent
    input.removeAttribute("name");
    input.addEventListener("input", () => {
      sent.value = input.value && new Date(input.value).toISOString();
      say();
    });
    input.after(sent);
    say();
  };
  const localise = (root) => {
    for (const each of root.querySelectorAll(".plot [data-zone]")) { each.textContent = zone(new Date()); }
    for (const each of root.querySelectorAll("input[type=datetime-local][name]")) { choose(each); }
    for (const each of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(each.dateTime);
      if (Number.isNaN(moment.valueOf())) { continue; }
      each.textContent = moment.toLocaleString(undefined, forms[each.dataset.form ?? "full"]);
    }
  };
  const select = (root) => {
    const all = root.querySelector("#select-all");
    if (!all) { return; }
    const boxes = [...root.querySelectorAll("input[name=selected]")];
    const count = () => {
      const number = boxes.filter((box) => box.checked).length;
      root.querySelector("#selected").textContent = number;
      for (const button of root.querySelectorAll("button[data-selects]")) { button.disabled = number === 0; }
    };
    all.addEventListener("change", () => {
      for (const box of boxes) { box.checked = all.checked; }
      count();
    });
    for (const box of boxes) { box.addEventListener("change", count); }
    count();
  };
  // On a phone each row of a table is a card, in which a cell says its heading.
  const label = (root) => {
    for (const table of root.querySelectorAll("table.data")) {
      const headings = [...table.querySelectorAll("thead th")].map((each) => each.textContent.trim());
      for (const row of table.querySelectorAll("tbody tr")) {
        for (const [at, cell] of [...row.cells].entries()) { cell.dataset.label = headings[at] ?? ""; }
      }
      table.classList.add("cards");
    }
  };
  const dress = (root) => { localise(root); select(root); label(root); };
  document.addEventListener("DOMContentLoaded", () => {
    dress(document);
    document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  });
  document.addEventListener("htmx:afterSettle", () => dress(document));
  // What reads itself again would take the focus away with what has it.
  for (const each of ["htmx:beforeRequest", "htmx:beforeSwap"]) { // it may get the focus while the answer is on its way
    document.addEventListener(each, (event) => {
      const { target, requestConfig } = event.detail;
      if (requestConfig?.elt === target && target.contains(document.activeElement)) { event.preventDefault(); }
    });
  }
}
