"""The documentation's pictures of the dashboard, taken by a headless Chromium while the tour runs.

    python release/pictures.py docs

Needs the extra ``web``, Selenium and Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from celery_fdb.cli.tour.acts import ORDERS, QUEUE, Tour
from celery_fdb.cli.tour.processes import wait

PHONE = (390, 800)
Size = tuple[int, int]


class Camera:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: The dashboard's.
        self.address = ""
        self._browser: Any = _browser()

    def close(self) -> None:
        self._browser.quit()

    def stop(self, tour: Tour, page: str) -> None:
        """Where a person would have a look."""
        self.address = tour.address
        if page == "/workflows":
            self.watch("/")
            workflow = f"/workflow?id={tour.payment}"
            self.take("dashboard-workflow", workflow, "shop.mail", dark=True, size=(1280, 480))
        elif page.startswith("/keys"):
            self.take("dashboard-keys", page, "acme", size=(1280, 480))
        elif page.startswith("/dead"):
            self.take("dashboard-causes", page, "PaymentServiceDown", size=(1280, 380))
            self.take_watched("dashboard-overview", f"{ORDERS}\nto replay", size=(1280, 700))
            self.take("dashboard-phone", "/", QUEUE, dark=True, size=PHONE)
        elif page == "/tasks":
            self.take("dashboard-tasks", page, "shop.stocktaking", size=(1280, 480))

    def watch(self, page: str) -> None:
        """Leave it open in a window of its own: its charts have a past when its picture is taken."""
        self._browser.get(self.address + page)
        self._browser.switch_to.new_window("window")

    def take_watched(self, name: str, shows: str, *, size: Size) -> None:
        """The page that was left open, once it says that."""
        watched, other = self._browser.window_handles
        self._browser.switch_to.window(watched)
        self._look("light", size)
        wait(f"{shows!r} to be seen", lambda: shows in self._text())
        self._save(name)
        self._browser.switch_to.window(other)

    def take(self, name: str, page: str, shows: str, *, dark: bool = False, size: Size) -> None:
        """``shows``: what the page says when all of it is there; it is opened until it does."""
        self._look("dark" if dark else "light", size)
        wait(f"{shows!r} on {page}", lambda: shows in self._open(page))
        wait(f"{page} to be live", lambda: self._browser.find_elements("css selector", "#live[data-state=live]"))
        self._save(name)

    def _save(self, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._browser.save_screenshot(str(self._folder / f"{name}.png"))

    def _open(self, page: str) -> str:
        self._browser.get(self.address + page)
        return self._text()

    def _text(self) -> str:
        return str(self._browser.find_element("tag name", "main").text)

    def _look(self, scheme: str, size: Size) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _browser() -> Any:
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if chromium is None:
        sys.exit("pictures need Chromium on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = shutil.which("chromedriver")
    service = webdriver.ChromeService(driver) if driver else webdriver.ChromeService()
    return webdriver.Chrome(options=options, service=service)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, closing(Camera(Path(sys.argv[1]))) as camera:
        home = Path(made)
        Tour(Console(highlight=False), camera.stop).run(home, f"fdb+sqlite:///{home}/broker.db", 0)
