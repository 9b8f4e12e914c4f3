"use strict";
// The box in the head of the table selects all on this page.
{
  const all = document.getElementById("select-all");
  if (all) {
    all.addEventListener("change", () => {
      for (const box of document.querySelectorAll("input.action-select")) { box.checked = all.checked; }
    });
  }
}
