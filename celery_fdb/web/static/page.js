"use strict";
// Selecting messages, moments in the reader's time zone, and where one is in the bar.
{
  const localise = (root) => {
    for (const each of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(each.dateTime);
      if (Number.isNaN(moment.valueOf())) { continue; }
      const day = "hour" in each.dataset ? {} : { year: "numeric", month: "numeric", day: "numeric" };
      const clock = { hour: "numeric", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZoneName: "short" };
      each.textContent = moment.toLocaleString(undefined, { ...day, ...clock });
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
  const dress = (root) => { localise(root); select(root); };
  document.addEventListener("DOMContentLoaded", () => {
    dress(document);
    document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  });
  document.addEventListener("htmx:afterSettle", () => dress(document));
}
