"use strict";
// Reads the counters again while the page is looked at, and draws each queue's ready messages since it was opened.
{
  const INTERVAL_MS = 2000;
  const MOST_POINTS = 90;
  const table = document.querySelector("table[data-live]");
  const seen = new Map();

  const draw = (cell, points) => {
    const most = Math.max(...points, 1);
    const step = 100 / Math.max(points.length - 1, 1);
    const line = points.map((value, at) => `${at * step},${20 - (18 * value) / most}`).join(" ");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const polyline = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.setAttribute("viewBox", "0 0 100 22");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `ready: from ${points[0]} to ${points.at(-1)}, at most ${Math.max(...points)}`);
    polyline.setAttribute("points", line);
    svg.append(polyline);
    cell.replaceChildren(svg);
  };

  const show = (row, counts) => {
    for (const cell of row.querySelectorAll("[data-state]")) {
      cell.textContent = counts[cell.dataset.state] || (cell.dataset.state === "oldest" ? "–" : 0);
      if (cell.dataset.state === "dead") { cell.classList.toggle("alarming", counts.dead > 0); }
    }
    const points = seen.get(row) ?? [];
    points.push(counts.ready);
    seen.set(row, points.slice(-MOST_POINTS));
    if (points.length > 1) { draw(row.querySelector(".trend"), points); }
  };

  const look = async () => {
    if (document.hidden) { return; }
    const answer = await fetch(table.dataset.live, { headers: { Accept: "application/json" } });
    if (!answer.ok) { return; }
    const { queues, sessions } = await answer.json();
    document.getElementById("sessions").textContent = sessions;
    for (const row of table.querySelectorAll("tr[data-queue]")) {
      const counts = queues[row.dataset.queue];
      if (counts) { show(row, counts); }
    }
  };

  if (table) {
    look();
    setInterval(() => look().catch(() => {}), INTERVAL_MS);
  }
}
