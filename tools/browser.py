"""A headless Chromium, driven by its own protocol: for tests and for screenshots.

    python tools/browser.py [FOLDER]     take pictures of every page of the built book,
                                         light, dark and at phone width
"""
from __future__ import annotations

import base64
import functools
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars",
)  # fmt: skip
PART = 3000  # pixels of a page in one picture


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def serve(folder: Path):
    """Serve `folder` on this machine; gives the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


class Page:
    """One tab: open an address, see what it fetched, run scripts, take pictures."""

    def __init__(self, port: int):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        self.socket = websocket.create_connection(address, timeout=30)
        self.numbers = itertools.count(1)
        self.events: list[dict] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def look(self, *, width=1280, height=900, dark: bool = False) -> None:
        """Set the window's size in pixels and the reader's theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def open(self, address: str) -> None:
        """Load a page, with all that it fetches, and let its scripts finish."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + 30
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address} did not load")
            self.evaluate("1")
            time.sleep(0.02)
        self.evaluate("document.fonts.ready.then(() => 1)")
        time.sleep(0.1)
        self.evaluate("1")

    def evaluate(self, script: str):
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    def requested(self) -> list[str]:
        """Addresses that the page asked for, other than data inside it."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def complaints(self) -> list[str]:
        """Scripts that failed and files that were not there."""
        found = []
        for event in self.events:
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                thrown = details["exceptionDetails"]
                found.append(str(thrown.get("exception", thrown).get("description")))
            elif event["method"] == "Log.entryAdded":
                entry = details["entry"]
                if entry["level"] == "error":
                    found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def screenshots(self, stem: Path, **look) -> None:
        """The whole page from top to bottom: stem-1.png, stem-2.png, …"""
        self.look(**look)
        # What slides into its place would be caught on the way.
        self.evaluate(
            "document.head.appendChild(document.createElement('style')).textContent"
            " = '* {transition: none !important; animation: none !important}'"
        )
        width, height = self.evaluate(
            "[innerWidth, document.documentElement.scrollHeight]"
        )
        for part, top in enumerate(range(0, height, PART), start=1):
            clip = {"x": 0, "y": top, "width": width,
                    "height": min(PART, height - top), "scale": 1}
            picture = self.call(
                "Page.captureScreenshot", clip=clip, captureBeyondViewport=True
            )
            file = stem.with_name(f"{stem.name}-{part}.png")
            file.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def browser():
    """A fresh Chromium, closed at the end; gives a Page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [find_chromium(), *FLAGS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            deadline = time.monotonic() + 60
            while not (port_file.exists() and port_file.read_text().strip()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("Chromium did not start")
                time.sleep(0.1)
            yield Page(int(port_file.read_text().split()[0]))
        finally:
            process.terminate()
            process.wait(timeout=30)


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    html = root / "_build" / "html"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "_build" / "pictures"
    if find_chromium() is None or not html.is_dir():
        raise SystemExit("needs Chromium, and the built book: make book")
    target.mkdir(parents=True, exist_ok=True)
    looks = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390}}
    with serve(html) as address, browser() as page:
        for file in sorted([*html.glob("chapters/*.html"), html / "404.html"]):
            for name, look in looks.items():
                page.look(**look)
                page.open(f"{address}/{file.relative_to(html).as_posix()}")
                page.screenshots(target / f"{file.stem}-{name}", **look)
            print(file.stem, flush=True)


if __name__ == "__main__":
    main()
