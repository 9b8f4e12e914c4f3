"use strict";
// The box in the head of the table selects all on this page; the selected ones are counted.
{
  const all = document.getElementById("select-all");
  const boxes = [...document.querySelectorAll("input.action-select")];
  const count = () => {
    document.getElementById("selected").textContent = boxes.filter((box) => box.checked).length;
  };
  if (all) {
    all.addEventListener("change", () => {
      for (const box of boxes) { box.checked = all.checked; }
      count();
    });
    for (const box of boxes) { box.addEventListener("change", count); }
  }
}
