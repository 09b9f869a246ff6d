"""A headless Chromium for tests of pages: it opens a local file as a reader would, and says what the page did.

- Chromium and its driver are the system's (`apt-get install chromium chromium-driver`); without them tests of pages are
  skipped with that as the reason. `TREAD_CHROMIUM` and `TREAD_CHROMEDRIVER` name others.
- No host can be reached, so a page that is not self-contained fails here too.
- `open` starts anew: width, colour scheme, console, clipboard and whether scripts run are those of that call.
"""

import base64
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PHONE = 390
"""Width of a phone in CSS pixels; windows up to 600 are emulated as phones."""
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"
INTO_VIEW = "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})"
"""At once: a page that scrolls smoothly would still move under the pointer."""


def program(variable: str, names: Sequence[str]) -> str | None:
    """The path of the program that the environment names, or of the first of `names` on the path."""
    return os.environ.get(variable) or next((found for name in names if (found := shutil.which(name))), None)


def missing() -> str | None:
    """Why no browser can be started, as the reason of a skipped test; None if one can."""
    wanted = {"chromium": ("TREAD_CHROMIUM", CHROMIUMS), "chromedriver": ("TREAD_CHROMEDRIVER", ("chromedriver",))}
    absent = [name for name, (variable, names) in wanted.items() if program(variable, names) is None]
    try:
        import selenium  # noqa: F401
    except ImportError:
        absent.append("selenium")
    if not absent:
        return None
    return f"no {' and no '.join(absent)}: apt-get install chromium chromium-driver, and the extra dev"


class Browser:
    """One Chromium process; `close` ends it."""

    def __init__(self) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = program("TREAD_CHROMIUM", CHROMIUMS) or ""
        for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", NO_NETWORK):
            options.add_argument(argument)
        if os.geteuid() == 0:  # the sandbox refuses to run as root
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(program("TREAD_CHROMEDRIVER", ("chromedriver",)))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.console: list[str] = []

    def open(
        self,
        page: Path,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
        fragment: str = "",
    ) -> None:
        """Load a file in a window of `width` x `height` CSS pixels; `fragment` is what follows # in its address."""
        phone = width <= 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.get("about:blank")  # a change of the fragment alone would not load the page again
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        for name in ("clipboard-read", "clipboard-write"):
            self.send("Browser.setPermission", permission={"name": name}, setting="granted")
        self._read_console()
        self.console = []
        self.driver.get(page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page; it finds `arguments` in `arguments[0]` and on.

        A promise is waited for.
        """
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        """Errors in the console since the page was opened: exceptions, refused and failed loads."""
        self._read_console()
        return list(self.console)

    def resources(self) -> list[str]:
        """Addresses that the page loaded besides itself and what it holds as data."""
        found = self.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        return [name for name in found if not name.startswith(("data:", "blob:"))]

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window; 0: nobody has to scroll sideways."""
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def drag(self, selector: str, fraction: float) -> None:
        """Press a range input's handle and move it to a fraction of its track, by the mouse; that must change it."""
        from selenium.webdriver.common.action_chains import ActionChains

        slider = self.driver.find_element("css selector", selector)
        box, (low, high, value) = slider.rect, (float(slider.get_attribute(n) or 0) for n in ("min", "max", "value"))
        across = lambda part: int((part - 0.5) * (box["width"] - 16))  # noqa: E731  # a handle is 16 pixels wide
        self.run(INTO_VIEW, slider)
        changed = "new Promise(done => slider.addEventListener('change', done, {once: true}))"
        self.run(f"const slider = arguments[0]; slider.changed = {changed}", slider)
        chain = ActionChains(self.driver)
        chain.move_to_element_with_offset(slider, across((value - low) / (high - low)), 0).click_and_hold()
        chain.move_to_element_with_offset(slider, across(fraction), 0).release().perform()
        self.run("return arguments[0].changed.then(() => null)", slider)  # the page may hear of it later

    def click(self, selector: str) -> None:
        """Click the element that a CSS selector finds first."""
        element = self.driver.find_element("css selector", selector)
        self.run(INTO_VIEW, element)
        element.click()

    def clipboard(self) -> str:
        """The text in the clipboard."""
        return self.run("return navigator.clipboard.readText()")

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A PNG of the whole page, or of the window alone."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def send(self, command: str, **parameters: Any) -> dict[str, Any]:
        """A command of the Chrome DevTools Protocol."""
        return self.driver.execute_cdp_cmd(command, parameters)

    def close(self) -> None:
        self.driver.quit()

    def _read_console(self) -> None:
        self.console += [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
