"""Opens the page of `BIN serve` in Chromium, as on a desktop and on a phone: python page_client.py BIN [FOLDER]

With FOLDER it also saves screenshots there. Every check prints a line. The exit code is 0 only if all held.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
FACTS = "".join(f"The key of box {i} is amber. " for i in range(100))
passed, failed = [], []


def check(what: str, held: bool, more: object = "") -> None:
    print(("ok    " if held else "FAIL  ") + what + ("" if held else f": {more}"), flush=True)
    (passed if held else failed).append(what)


def until(page, expression: str) -> None:
    """Polls, because wait_for_function() needs what the page's content security policy forbids."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    sys.exit("never true on the page: " + expression + "\n" + page.inner_text("body"))


class Server:
    def __init__(self, binary: str, port: int, *options: str):
        self.process = subprocess.Popen([binary, "serve", "--port", str(port), "--kv-bytes", "16MiB", *options],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.port}/"

    def ask(self, prompt: str, **more) -> dict:
        body = json.dumps({"prompt": prompt, "temperature": 0, **more}).encode()
        request = urllib.request.Request(self.url + "v1/completions", body, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def look(browser, server: Server, name: str, width: int, height: int, scheme: str, pictures: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500)
    said = []
    page.on("console", lambda m: m.type in ("error", "warning") and said.append(m.text))
    page.on("pageerror", lambda e: said.append(str(e)))
    page.goto(server.url)
    page.wait_for_selector(".bar")
    page.click("#go")
    until(page, "document.querySelector('#answer').textContent.endsWith('amber.')")
    until(page, "(document.querySelector('#answers button')?.ariaLabel || '').endsWith('ended by stop')")
    row = page.locator("#answers button").first
    label = row.get_attribute("aria-label")
    check(f"{name}: the answer has a row", "P0 → D0" in label, label)
    row.hover()
    note = page.inner_text("#answer-note")
    check(f"{name}: which says its phases", all(word in note for word in ("prefill", "decode", "TTFT", "stop")), note)
    parts = page.evaluate("""[...document.querySelectorAll('#answers li:first-child .lanes i')].map(
        i => [i.className, i.getBoundingClientRect().left, i.getBoundingClientRect().right])""")
    check(f"{name}: in order", len(parts) > 2 and all(a[1] <= b[1] + .01 for a, b in zip(parts, parts[1:])), parts)
    check(f"{name}: prefill above, decode below", "low" not in next(c for c, *_ in parts if "prefill" in c)
          and "low" in next(c for c, *_ in parts if "decode" in c), parts)

    running = threading.Thread(target=server.ask, args=(FACTS,), kwargs={"max_tokens": 2500, "ignore_eos": True})
    running.start()
    # Blocks in use are in transfer at first. They are active when the last instance decodes.
    bar = "[...document.querySelectorAll('.instance:last-child .bar i')].map(i => i.getBoundingClientRect().width)"
    until(page, f"{bar}[0] > 0")
    widths = page.evaluate(bar)
    check(f"{name}: a bar shows the active blocks and the free ones", len(widths) == 4 and widths[0] > 0 and widths[3] > 0, widths)
    if pictures:
        page.screenshot(path=f"{pictures}/page-{name}.png", full_page=True)
    running.join()
    check(f"{name}: all switches are there", page.locator("dl div").count() > 80
          and "--kv-bytes" in page.inner_text("#given"), page.inner_text("#given"))
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    check(f"{name}: nothing scrolls sideways", wide[0] <= wide[1], wide)
    check(f"{name}: the console is silent", not said, said)
    page.close()


def restarts(browser, binary: str) -> None:
    """With workers as processes. When the server goes and another one comes, the page continues."""
    server = Server(binary, 0, "--topology", "1P1D", "--processes")
    page = browser.new_page()
    said = []
    page.on("pageerror", lambda e: said.append(str(e)))
    page.goto(server.url)
    until(page, "document.querySelectorAll('.bar').length === 2")
    server.ask(FACTS)
    page.wait_for_selector("#answers button")
    server.end()
    until(page, "document.querySelector('#model').innerText.includes('does not answer')")
    again = Server(binary, server.port, "--topology", "1C", "--transport", "local", "--served-model-name", "<b>no</b>")
    until(page, "[...document.querySelectorAll('.instance b')].map(b => b.innerText).join() === 'C0'")
    until(page, "document.querySelectorAll('#answers button').length === 0")
    title = page.inner_text("#model")
    check("restarted: another model's name, as text", "<b>no</b>" in title, title)
    check("restarted: nothing failed on the page", not said, said)
    page.close()
    again.end()


def main() -> None:
    binary, pictures = sys.argv[1], (sys.argv[2:] or [""])[0]
    if pictures:
        pathlib.Path(pictures).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p, tempfile.TemporaryDirectory() as home:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env={"HOME": home})
        server = Server(binary, 0)
        look(browser, server, "desktop", 1280, 800, "light", pictures)
        look(browser, server, "phone", 390, 844, "light", pictures)
        look(browser, server, "narrow", 360, 780, "dark", pictures)
        server.end()
        restarts(browser, binary)
        browser.close()
    print(f"{len(passed)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


main()
