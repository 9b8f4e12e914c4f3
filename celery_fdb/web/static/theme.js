"use strict";
// Before anything is drawn: the theme that was chosen here, else the system's.
{
  const KEY = "celery-fdb-theme";
  const root = document.documentElement;
  const chosen = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  if (chosen()) { root.dataset.theme = chosen(); }
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* for this page only */ }
    });
  });
}
