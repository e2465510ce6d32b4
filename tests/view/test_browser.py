"""The page in a real browser, beside a run from its first update to its last.

Needs Chromium and its driver, as Debian's packages `chromium` and `chromium-driver` bring them.
"""

import re
import shutil
import subprocess
import sys
import time

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1200,900"),
)
LONG = 120.0  # seconds: a loaded machine may be slow to start a browser


@pytest.fixture
def browser(tmp_path):
    if BROWSER is None or DRIVER is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def command():
    """Starts the command; whatever is left of it ends with the test."""
    started = []

    def start(*arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-m", "polytempo", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(what):
    """Until it is so; an assertion that fails says what was there instead."""
    end = time.monotonic() + LONG
    while True:
        try:
            return what()
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@pytest.mark.timeout(400)
def test_a_run_as_it_goes(browser, command, tmp_path):
    folder = tmp_path / "run"
    run = command(
        *("run", "--strategy", "pace", "--data", "digits", "--clients", 6, "--limit", 120),
        *("--model", "linear", "--epochs", 1, "--updates", 1_000_000, "--eval-every", 20),
        *("--adapt-epochs", 0, "--backend", "serial", "--live", "--out", folder),
    )
    for line in run.stderr:
        if found := re.search(r"live view: (http://127\.0\.0\.1:\d+/)", line):
            break
    else:
        pytest.fail("the run told no address")

    def text(selector):
        return browser.execute_script(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )

    def points():
        return browser.execute_script("return document.querySelector('#curve').data?.[0].x ?? []")

    def check(so):
        assert so

    browser.get(found[1])
    wait_for(lambda: check(text(".run .status") == "running"))
    wait_for(lambda: check(len(points()) > 2))
    before = len(points())
    wait_for(lambda: check(len(points()) > before))  # the curve grows
    assert "6 clients" in browser.execute_script(
        "return document.querySelector('canvas').getAttribute('aria-label')"
    )
    assert "training" in text(".legend")
    wait_for(
        lambda: check(
            browser.execute_script(
                "return document.querySelectorAll('.timeline .plot .bars .point').length > 5"
            )
        )
    )
    wait_for(
        lambda: check(
            browser.execute_script("return document.querySelector('.graph .plot').data?.length")
        )
    )
    browser.execute_script("document.querySelector('input[name=x][value=updates]').click()")
    wait_for(lambda: check(all(x % 20 == 0 for x in points())))

    run.send_signal(2)  # Ctrl-C: the run stops, and the page sees it before the view ends
    run.communicate(timeout=LONG)
    assert run.returncode == 130
    wait_for(lambda: check(text(".run .status") == "interrupted"))
    wait_for(lambda: check("No answer" in text("#state")))
    said = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in said if "ERR_CONNECTION" not in entry["message"]]
    width = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert width <= 0  # nothing sticks out


def test_the_view_of_a_folder_ends_with_an_interrupt(command, make_run):
    folder = make_run()
    view = command("view", folder, "--listen", "127.0.0.1:0")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\n", view.stdout.readline())
    view.send_signal(2)
    view.communicate(timeout=LONG)
    assert view.returncode == 0


def test_beyond_this_machine_there_is_a_token(command, make_run):
    view = command("view", make_run(), "--listen", "0.0.0.0:0")
    assert re.search(r":\d+/\?token=[\w-]{20,}$", view.stdout.readline().strip())
    view.send_signal(15)
    view.communicate(timeout=LONG)


def test_a_view_beside_a_run_ends_with_it(command, make_run):
    view = command("view", make_run(), "--listen", "127.0.0.1:0", "--until-eof")
    assert view.stdout.readline().startswith("http")
    view.communicate(timeout=LONG)  # closes its standard input, as a killed parent does
    assert view.returncode == 0


def test_a_folder_that_is_not_there(command, tmp_path):
    view = command("view", tmp_path / "nowhere")
    _, said = view.communicate(timeout=LONG)
    assert view.returncode == 2 and "there is no folder" in said
