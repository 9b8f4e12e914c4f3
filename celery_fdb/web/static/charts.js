"use strict";
// The charts of the overview, by uPlot: what the live stream tells.
{
  const SPAN_S = 300;
  const GAP_S = Math.max(20, 3 * Number(document.querySelector("[data-trend-source]").dataset.interval));
  const HEIGHT = 150;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const found = { rates: document.getElementById("chart-rates"), backlog: document.getElementById("chart-backlog") };
  let points = [];
  let charts = [];

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const axes = () => [
    {
      stroke: colour("--dim"), grid: { show: false }, ticks: { show: false }, size: 24, font: "11px system-ui", space: 80,
      values: (_, values) => values.map((each) => clock.format(each * 1000)),
    },
    {
      stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, size: 44,
      font: "11px system-ui", values: (_, values) => values.map((each) => compact.format(each)),
    },
  ];
  const series = (name) => ({ stroke: colour(name), width: 1.5, points: { show: false }, spanGaps: false, fill: colour(`${name}-fill`) });
  const options = (element, names) => ({
    width: element.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.1] } },
    axes: axes(), series: [{}, ...names.map(series)],
  });

  const columns = () => [0, 1, 2, 3].map((at) => points.map((each) => each[at]));
  const make = () => {
    for (const each of charts) { each.destroy(); }
    const [at, backlog, published, acked] = columns();
    charts = [
      new uPlot(options(found.rates, ["--in", "--out"]), [at, published, acked], found.rates),
      new uPlot(options(found.backlog, ["--backlog"]), [at, backlog], found.backlog),
    ];
  };
  const show = () => {
    if (!charts.length) { make(); return; }
    const [at, backlog, published, acked] = columns();
    charts[0].setData([at, published, acked]);
    charts[1].setData([at, backlog]);
  };

  // -- the period: what the stream tells, or what the store keeps --------------------------------------------------

  const REFRESH_MS = 15000;
  const bar = document.querySelector("[data-trend-source]");
  const note = document.getElementById("span-note");
  let live = [];
  let span = "";

  const read = async () => {
    const asked = span;
    const answer = await fetch(`${bar.dataset.trendSource}?span=${asked}`);
    const found = answer.ok ? (await answer.json()).points : [];
    if (asked !== span) { return; }
    points = found;
    note.textContent = found.length ? "" : "Nothing is kept yet: workers write it while they run.";
    show();
  };
  const choose = (button) => {
    span = button.dataset.span;
    for (const each of bar.querySelectorAll("button")) { each.setAttribute("aria-pressed", String(each === button)); }
    note.textContent = "";
    if (span) { read().catch(() => { note.textContent = "The store did not answer."; }); } else { points = live; show(); }
  };
  bar.hidden = false;
  for (const each of bar.querySelectorAll("button")) { each.addEventListener("click", () => choose(each)); }
  setInterval(() => { if (span && !document.hidden) { read().catch(() => {}); } }, REFRESH_MS);

  // Of the last five minutes, with a hole wherever there was no look, for there is no line across what is not known.
  const recent = (all) => {
    const end = all.at(-1)?.[0] ?? 0;
    const found = [];
    for (const each of all.filter(([at]) => at > end - SPAN_S)) {
      const last = found.at(-1);
      if (last && each[0] - last[0] > GAP_S) { found.push([last[0] + 1, null, null, null]); }
      found.push(each);
    }
    return found;
  };

  document.addEventListener("live-points", (event) => {
    live = recent(event.detail);
    if (!span) { points = live; show(); }
  });
  document.addEventListener("live-point", (event) => {
    const last = live.at(-1);
    if (!last || event.detail[0] > last[0]) { live = recent([...live, event.detail]); }
    if (!span) { points = live; show(); }
  });
  document.addEventListener("theme", make);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", make);
  new ResizeObserver(() => {
    if (charts.length) {
      charts[0].setSize({ width: found.rates.clientWidth, height: HEIGHT });
      charts[1].setSize({ width: found.backlog.clientWidth, height: HEIGHT });
    }
  }).observe(found.rates);
}
