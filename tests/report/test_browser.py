"""The page in a real browser, where one is installed: nothing on the console, nothing asked of the network."""

import shutil
import subprocess

import numpy as np
import pytest

from marginax import report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_opens_without_a_word_on_the_console(tmp_path):
    with report.panels(tmp_path, "picture", (2, 1)):
        pass
    claim = report.claim(r"it is so at $\bar c = 2$", "Figure 1", "ratio", np.mean, np.ones(3), low=0.0)
    section = report.Section(
        "chain",
        "The chain",
        text=("Some `code`.",),
        figures=(report.Figure("picture", "A caption"),),
        tables=(report.Table("Numbers", ("a", "b"), ((1, 2.5),)),),
        claims=(claim,),
    )
    page = tmp_path / "report.html"
    report.write_page(page, "A report", [(tmp_path, section)])
    # The browser's own verdict on the picture is written into the title before the page is dumped.
    check = "<script>onload = () => { document.title = [...document.images].every(i => i.naturalWidth > 0) + ''; }</script>"
    page.write_text(page.read_text().replace("</body>", check + "</body>"))
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ":CONSOLE" not in done.stderr
    assert "<title>true</title>" in done.stdout
    assert "<h2>The chain</h2>" in done.stdout
