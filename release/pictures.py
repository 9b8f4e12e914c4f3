"""The documentation's pictures of the dashboard, taken by a headless Chromium while the tour runs.

    python release/pictures.py docs/pages

Each page in light, in dark, and on a phone. Needs the extra ``web``, Selenium, Pillow and Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from base64 import b64decode
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from celery_fdb.cli.tour import ORDERS, QUEUE, Tour, wait


class Look(NamedTuple):
    """How a page is looked at: the colours, and the room there is. A page that is shorter is as high as it is."""

    scheme: str
    width: int
    height: int


LOOKS = {"light": Look("light", 1_280, 800), "dark": Look("dark", 1_280, 800), "phone": Look("light", 390, 800)}
#: Of a picture.
COLOURS = 128
#: There when a page's numbers are.
READ = "#read, #live[data-state=live]"
#: As when a page is opened in that width.
INTO_VIEW = "document.querySelector('nav [aria-current]')?.scrollIntoView({inline: 'center', block: 'nearest'})"
#: Each page by the name of its pictures: the page of the tour at which they are taken, its address, and what it says.
#: ``{...}``: found as the tour goes.
PAGES = {
    "workflows": ("/workflows", "/workflows", "shop.pay"),
    "keys": ("/keys", f"/keys?queue={QUEUE}", "acme"),
    "queues": ("/keys", "/queues", QUEUE),
    "queue": ("/keys", f"/queue?queue={QUEUE}", "acme"),
    "messages": ("/keys", f"/messages?queue={QUEUE}&key=acme", "shop.resize"),
    "question": ("/keys", f"/act?action=purge&queue={QUEUE}", "waiting message"),
    "sessions": ("/sessions", "/sessions", "silent"),
    "workers": ("/sessions", "/workers", "shop.stocktaking"),
    "causes": ("/dead", f"/dead?queue={QUEUE}.dead", "PaymentServiceDown"),
    "dead": ("/dead", "/dead", f"{QUEUE}.dead"),
    "letters": ("/dead", f"/messages?queue={QUEUE}.dead", "PaymentServiceDown"),
    "letter": ("/dead", "{letter}", "Died"),
    "task": ("/dead", "/task?id={payment}", "retried"),
    "overview": ("/dead", "/", f"{ORDERS}\nto replay"),
    "tasks": ("/tasks", "/tasks", "shop.stocktaking"),
    "runs": ("/tasks", "/runs?task=shop.pay", "PaymentServiceDown"),
    "workflow": ("/tasks", "{inventory}", "shop.inventory"),
    "schedules": ("/tasks", "/schedules", "nightly report"),
}

#: On which page the link is that leads to it, and what that says.
LINKS = {"letter": (f"/messages?queue={QUEUE}.dead", "shop.pay"), "inventory": ("/workflows", "shop.stocktaking")}


class Camera:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._browser: Any = _browser()

    def close(self) -> None:
        self._browser.quit()

    def stop(self, tour: Tour, at: str) -> None:
        """Where a person would have a look, and here stops the flood for as long as it takes."""
        queue = tour.broker.queue(QUEUE)
        if at == "/workflows":
            tour.processes._start("beat", "beat", "-S", "celery_fdb.beat.Scheduler")  # for the page of schedules
        if at.startswith("/keys"):
            queue.limit("acme", max_in_flight=1)
        for name, (stop, address, says) in PAGES.items():
            if at.startswith(stop):
                self._take(name, tour.address + address.format_map(_Found(self, tour)), says)
        if at.startswith("/keys"):
            queue.unlimit("acme")

    def _take(self, name: str, address: str, says: str) -> None:
        """One page in all looks: it is opened once, as what it shows may be gone a second later."""
        self._look(LOOKS["light"])
        wait(f"{says!r} on {address}", lambda: says in self.open(address))
        wait(f"{address} to be read", lambda: self._browser.find_elements("css selector", READ))
        self._folder.mkdir(parents=True, exist_ok=True)
        for look, seen in LOOKS.items():
            self._look(seen)
            _save(self._picture(seen), self._folder / f"{name}-{look}.png")

    def open(self, address: str) -> str:
        """What it says."""
        self._browser.get(address)
        return str(self._browser.find_element("tag name", "main").text)

    def link(self, address: str, says: str) -> str:
        """Where the first link of the page leads that says so."""
        wait(f"{says!r} on {address}", lambda: says in self.open(address))
        return str(self._browser.find_element("partial link text", says).get_dom_attribute("href"))

    def _look(self, look: Look) -> None:
        wanted = {"prefers-color-scheme": look.scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": look.width, "height": look.height, "deviceScaleFactor": 1, "mobile": False}
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def _picture(self, look: Look) -> bytes:
        self._browser.execute_script(INTO_VIEW)
        height = self._browser.execute_script("return Math.ceil(document.body.getBoundingClientRect().height)")
        clip = {"x": 0, "y": 0, "width": look.width, "height": min(height, look.height), "scale": 1}
        return b64decode(self._browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"])


class _Found(dict[str, str]):
    """What an address names, looked up when one does."""

    def __init__(self, camera: Camera, tour: Tour) -> None:
        super().__init__(payment=tour.payment)
        self._camera, self._address = camera, tour.address

    def __missing__(self, name: str) -> str:
        page, says = LINKS[name]
        return self._camera.link(self._address + page, says)


def _save(png: bytes, path: Path) -> None:
    """With so few colours that a page takes some 20 kB."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)


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
    with tempfile.TemporaryDirectory(prefix="celery-fdb-tour-") as made, closing(Camera(Path(sys.argv[1]))) as camera:
        home = Path(made)
        Tour(Console(highlight=False), camera.stop).run(home, f"fdb+sqlite:///{home}/broker.db", 0)
