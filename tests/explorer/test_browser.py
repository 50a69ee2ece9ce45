"""The explorer in a real browser: it draws, answers a click, learns, and asks nothing of the network."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("panel")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "marginax", "explore", "--port", str(port), "--no-browser"]
    with subprocess.Popen(command) as server:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(url).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
        server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_answers_a_click_without_a_network(address):
    requests = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 850})
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.get_by_text("the fixed point of every operator").wait_for(timeout=60_000)
        before = page.get_by_role("table").inner_text()
        page.mouse.click(600, 300)  # a state in the middle of the map
        page.wait_for_timeout(2000)
        assert page.get_by_role("table").inner_text() != before
        page.get_by_role("button", name="Learn with ten seeds").click()
        page.wait_for_timeout(3000)
        browser.close()
    local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
    assert [url for url in requests if not url.startswith(local)] == []
