"""A person's browser: a headless Chromium, and what a test does and sees in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from kit.processes import until

WIDE, NARROW = (1280, 860), (390, 844)


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Skips the test where there is none."""
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with chromedriver here (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Window:
    """A person's browser."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        self.address = address
        browser.get("about:blank")  # the page of a test before would go on asking its own server, which has ended

    def look(self, size: tuple[int, int] = WIDE, theme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wishes = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}  # colors change at once
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, path: str, **query: str) -> None:
        self.browser.get(f"{self.address}{path}{'?' + urlencode(query) if query else ''}")

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        from selenium.common.exceptions import WebDriverException

        with suppress(WebDriverException):  # the page is just being replaced
            return str(self.find(selector).text)
        return ""

    def wait_for(self, selector: str, pattern: str) -> None:
        until(lambda: re.search(pattern, self.text(selector)), say=lambda: self.text("body"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    @property
    def focused(self) -> Any:
        return self.browser.switch_to.active_element

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def complaints(self) -> list[Any]:
        """What the browser complains of: scripts that fail, and what the policy forbids."""
        return [each for each in self.browser.get_log("browser") if each["level"] in {"SEVERE", "WARNING"}]
