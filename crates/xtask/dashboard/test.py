"""The dashboard in a real browser, before a real grid of two machines on this one.

Each action is done by the page, and looked for by the command line. Usage: test.py HOLDFAST WORK
CHROMIUM [PICTURES]
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

HOLDFAST, WORK = sys.argv[1], Path(sys.argv[2])
CHROMIUM = sys.argv[3]
PICTURES = Path(sys.argv[4]) if len(sys.argv) > 4 else None
ETCD = "127.0.8.77"
TOKEN_LINE = re.compile(r"http://\S+")
PATIENCE_MS = 60_000
PHONE = {"width": 375, "height": 700}
DESK = {"width": 1280, "height": 900}


class Machine:
    """A machine of the grid: a directory, and addresses of this one."""

    def __init__(self, name, port):
        self.name, self.port, self.dir = name, port, WORK / name

    def run(self, *words):
        command = [HOLDFAST, "--dir", str(self.dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        # That something is not well is told by the code of `status`.
        if done.returncode > (2 if words[0] == "status" else 0):
            raise AssertionError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def typed(self, command):
        """A command as the page shows it."""
        words = shlex.split(command)
        assert words[0] == "holdfast", command
        return self.run(*words[1:])

    def told(self, *words):
        return json.loads(self.run(*words, "--json"))

    def volume(self, name):
        found = [volume for volume in self.told("volume", "list") if volume["name"] == name]
        return found[0] if found else None

    def down(self):
        subprocess.run([HOLDFAST, "--dir", str(self.dir), "grid", "down", "--force"], capture_output=True, timeout=120)


class Grid:
    """Machines a and b, with their metadata in an etcd of their own."""

    def __enter__(self):
        self.served, self.etcd = [], None
        self.a, self.b = Machine("a", 12800), Machine("b", 12840)
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def up(self):
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        urls = [f"http://{ETCD}:{port}" for port in (2379, 2380)]
        log = (WORK / "etcd.log").open("w")
        self.etcd = subprocess.Popen(
            ["etcd", "--data-dir", WORK / "etcd", "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
             "--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1],
             "--initial-cluster", f"default={urls[1]}"],
            stdout=log, stderr=log,
        )
        place = ["--devices", "1", "--device-size", "1GiB", "--etcd", urls[0]]
        until("etcd answers", lambda: "listening" in (WORK / "etcd.log").read_text() or "serving" in
              (WORK / "etcd.log").read_text())
        self.a.run("grid", "up", "--nodes", "3", "--port", str(self.a.port), *place, "--name", "a", "--tls", "on",
                   "--address", "127.0.0.1")
        token = self.a.run("grid", "token", "--for", "b").split()[0]
        self.b.run("grid", "up", "--nodes", "1", "--port", str(self.b.port), *place, "--name", "b",
                   "--address", "127.0.0.1", "--join", token)
        until("both see all nodes", lambda: all(len(of.told("status")["nodes"]) == 4 for of in (self.a, self.b)))
        self.a.run("volume", "create", "vm1", "--size", "256MiB", "--layout", "mirror:2")

    def __exit__(self, *_):
        for process in self.served:
            process.send_signal(signal.SIGINT)
            process.wait()
        self.b.down()
        self.a.down()
        if self.etcd:
            self.etcd.kill()
            self.etcd.wait()

    def load(self):
        """A guest's, until the end: a mix of requests, at a pace."""
        uri = self.a.volume("vm1")["uris"][0]
        words = ["--name=guest", "--ioengine=nbd", f"--uri={uri}", "--rw=randrw", "--rwmixread=70", "--bs=8k", "--iodepth=4",
                 "--rate_iops=300,130", "--time_based", "--runtime=1200", "--size=256M"]
        self.served.append(subprocess.Popen(["fio", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def dashboard(self):
        """The address that `holdfast dashboard` prints."""
        command = [HOLDFAST, "--dir", str(self.a.dir), "dashboard", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.served.append(process)
        return TOKEN_LINE.search(process.stdout.readline()).group()

    def over_tls(self, port=12790):
        """The host's own address, and a token of a reader."""
        tls = self.a.dir / "api-tls"
        self.a.run("grid", "tls", "server", "127.0.0.1", "--out", str(tls))
        with (self.a.dir / "holdfast.toml").open("a") as settings:
            settings.write(f'[api]\ntcp = "127.0.0.1:{port}"\ntls_dir = "{tls}"\n')
        self.a.run("grid", "down", "--host", "--force")
        self.a.run("grid", "up")
        return f"https://127.0.0.1:{port}/", self.a.run("grid", "tls", "operator", "bob", "--reader", "--token").strip()


def until(what, is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"it is never so that {what}"
        time.sleep(0.1)


class Browser:
    """A page, with all that it asked for and all that it complained of."""

    def __init__(self, chromium, **more):
        self.context = chromium.new_context(viewport=DESK, permissions=["clipboard-write"], **more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        self.asked, self.complaints = set(), []
        self.page.on("request", lambda request: self.asked.add(re.match(r"\w+://[^/]+", request.url).group()))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def is_accessible(self, what):
        found = Axe().run(self.page).response["violations"]
        told = [f"{of['id']}: {of['help']}: {node['html']}" for of in found for node in of["nodes"]]
        assert not told, f"{what}: " + "\n".join(told)
        return 1

    def act(self, button, fields, submit, within=None):
        """Opens an action, fills it in, does it; gives the command that it shows."""
        (within or self.page).get_by_role("button", name=button, exact=True).first.click()
        dialog = self.page.get_by_role("dialog")
        for label, value in fields.items():
            field = dialog.get_by_label(label)
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        command = dialog.locator(".command code").inner_text()
        if submit is not None:
            dialog.get_by_role("button", name=submit, exact=True).click()
        else:
            dialog.get_by_role("button", name="Cancel", exact=True).click()
        expect(dialog).to_be_hidden()
        return command

    def picture(self, name):
        if PICTURES:
            self.page.screenshot(path=PICTURES / f"{name}.png")


def goes(browser, page):
    browser.page.goto(browser.page.url.split("#")[0] + page)


def volumes(browser, grid):
    """Makes volumes, by the page and by the command that it shows, and does to one all that can be done."""
    page = browser.page
    goes(browser, "#/volumes")
    command = browser.act("New volume", {"Name": "web", "Size": "1.5 GiB", "Layout": "mirror:2"}, "Make it")
    assert command == "holdfast volume create web --size 1536MiB --layout mirror:2", command
    expect(page.get_by_role("heading", name="web", exact=True)).to_be_visible()
    assert grid.a.volume("web")["size_bytes"] == 3 << 29
    goes(browser, "#/volumes")
    command = browser.act("New volume", {"Name": "db", "Size": "64 MiB", "Compression": "lz4"}, None)
    assert grid.a.volume("db") is None, "it was called off"
    grid.a.typed(command)
    expect(page.get_by_role("link", name="db", exact=True)).to_be_visible()
    assert grid.a.volume("db")["compression"] == "lz4"

    # What is wrong is said, and nothing is done.
    page.get_by_role("button", name="New volume").click()
    page.get_by_role("button", name="Make it").click()
    expect(page.get_by_text("This has to be letters")).to_be_visible()
    page.get_by_label("Name").fill("web")
    page.get_by_role("button", name="Make it").click()
    expect(page.get_by_role("alert")).to_contain_text("web")
    browser.is_accessible("a dialog with what is wrong")
    page.keyboard.press("Escape")

    page.get_by_role("link", name="web", exact=True).click()
    shown = [browser.act("Resize", {"Size": "2 GiB"}, "Resize")]
    until("it is larger", lambda: grid.a.volume("web")["size_bytes"] == 2 << 30)
    shown.append(browser.act("Limits", {"Policy": "weight=200,limit=500/50MiB"}, "Set"))
    assert "limit=500" in grid.a.told("volume", "show", "web")["limit"]
    shown.append(browser.act("Take a snapshot", {"Name": "s1"}, "Take it"))
    first = page.locator("li", has=page.get_by_text("s1", exact=True))
    shown.append(browser.act("Clone", {"Name of the clone": "web2"}, "Clone", first))
    assert grid.a.volume("web2")["clone_of"] == "web"
    goes(browser, "#/volume/web2")
    shown.append(browser.act("Delete", {"Its name, once more": "web2"}, "Delete"))
    until("the clone is gone", lambda: grid.a.volume("web2") is None)
    goes(browser, "#/volume/web")
    shown.append(browser.act("Roll back", {}, "Roll back", first))
    until("it is as it was", lambda: grid.a.volume("web")["size_bytes"] in (3 << 29, 2 << 30))
    shown.append(browser.act("Delete", {}, "Delete", first))
    expect(first).to_be_hidden()
    shown.append(browser.act("Hand over", {"To": "b"}, "Hand over"))
    until("b has it", lambda: grid.b.volume("web")["host"] == "b")
    expect(page.locator(".facts")).to_contain_text("b")
    # The other host tells of it, too.
    expect(page.locator(".facts")).to_contain_text("whole")
    goes(browser, "#/volume/db")
    shown.append(browser.act("Out of service", {}, "Out of service"))
    until("it is served no more", lambda: grid.a.volume("db")["state"] == "closed")
    shown.append(browser.act("Into service", {}, "Into service"))
    until("it is served", lambda: grid.a.volume("db")["state"] == "open")
    shown.append(browser.act("Delete", {"Its name, once more": "db"}, "Delete"))
    until("it is in the trash", lambda: grid.a.volume("db") is None)
    shown.append(browser.act("Restore", {"Under the name": "db2"}, "Restore"))
    until("it is back", lambda: grid.a.volume("db2") is not None)
    return len(shown) + 2


def why_slow(browser):
    """A guest works at the volume: there is a verdict, and where the time goes."""
    page = browser.page
    goes(browser, "#/volume/vm1")
    expect(page.locator(".verdict")).to_have_count(2)
    expect(page.locator(".verdict").first).to_have_text(re.compile(r"\w+ \w+"))
    expect(page.get_by_role("table", name="Stages of Writes").get_by_role("row").nth(1)).to_be_visible()


def devices(browser, grid):
    """Has a device give its place to a new one, and takes it out; empties another one, and keeps it after all."""
    page = browser.page
    goes(browser, "#/machines")
    table = page.get_by_role("table", name="Devices of node 2")
    old = of_node(grid, 2)["devices"][0]["device"]
    row = table.get_by_role("row").nth(1)
    shown = [browser.act("Replace", {}, "Replace", row)]
    until("the new one is in", lambda: len(of_node(grid, 2)["devices"]) == 2)
    row = table.get_by_role("row").filter(has_text="2/0")
    shown.append(browser.act("Keep", {}, "Keep it", row))
    until("it is kept", lambda: not device(grid, old)["draining"])
    shown.append(browser.act("Replace", {}, "Replace", row))
    until("it is emptied", lambda: device(grid, old)["draining"])
    row.get_by_role("button", name="Take out").click()
    dialog = page.get_by_role("dialog")

    # Until the other host's volumes have left it, too, it is refused, and the page says why.
    def is_out():
        submit = dialog.get_by_role("button", name="Take it out")
        if submit.is_visible() and submit.is_enabled():
            submit.click()
        return device(grid, old) is None

    until("it is out", is_out)
    expect(dialog).to_be_hidden()
    return len(shown) + 1


def device(grid, of):
    return next((found for found in of_node(grid, 2)["devices"] if found["device"] == of), None)


def of_node(grid, node):
    return next(of for of in grid.a.told("status")["nodes"] if of["id"] == node)


def a_node_dies(browser, grid):
    """It is red, and green again once the node is back."""
    page = browser.page
    goes(browser, "#/")
    headline = page.locator(".headline")
    expect(headline).to_have_class("headline good")
    begun = time.monotonic()
    grid.a.run("node", "kill", "3")
    killed = time.monotonic()
    page.locator(".headline:not(.good)").wait_for()
    seen = time.monotonic()
    expect(page.locator(".events")).to_contain_text("node 3")
    browser.picture("dashboard-node-lost")
    browser.is_accessible("a node is lost")
    goes(browser, "#/machines")
    expect(page.get_by_role("heading", name=re.compile("Node 3 down"))).to_be_visible()
    goes(browser, "#/")
    grid.a.run("node", "start", "3")
    expect(headline).to_have_class("headline good")
    print(f"a killed node is told of {seen - killed:.2f} s after the command ends, {seen - begun:.2f} s after it begins")


def looks(browser):
    """Every page, light and dark, wide and narrow: no violation, nothing that is wider than the screen."""
    page, count = browser.page, 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name, hash in (("overview", "#/"), ("volumes", "#/volumes"), ("volume", "#/volume/vm1"), ("machines", "#/machines")):
            goes(browser, hash)
            page.wait_for_timeout(300)
            for details in page.locator("details").all():
                details.evaluate("of => { of.open = true }")
            count += browser.is_accessible(f"{name}, {scheme}")
            page.set_viewport_size(PHONE)
            page.wait_for_timeout(300)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name} is {wide} pixels wider than a phone: {widest(page)}"
            count += browser.is_accessible(f"{name}, {scheme}, on a phone")
            page.set_viewport_size(DESK)
            if name in ("overview", "machines"):
                for details in page.locator("details").all():
                    details.evaluate("of => { of.open = false }")
                browser.picture(f"dashboard-{name}-{scheme}")
    page.emulate_media(color_scheme="light")
    return count


def widest(page):
    return page.evaluate("""() => [...document.querySelectorAll("main *, header *")]
        .filter((of) => of.getBoundingClientRect().right > innerWidth && !of.closest(".table"))
        .map((of) => of.outerHTML.slice(0, 80)).slice(0, 5)""")


def keys(browser):
    page = browser.page
    goes(browser, "#/")
    page.keyboard.press("v")
    expect(page.get_by_role("heading", name="Volumes", exact=True)).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter volumes")).to_be_focused()
    page.keyboard.type("vm1")
    expect(page.get_by_role("table", name="Volumes").get_by_role("row")).to_have_count(2)
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="New volume")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="New volume")).to_be_focused()
    page.keyboard.press("m")
    expect(page.get_by_role("heading", name=re.compile("Machine a"))).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("overview")
    page.keyboard.press("Escape")


def many(browser):
    """A thousand volumes, as the host would tell of them: what the page is busy with at a time."""
    page = browser.page

    def multiply(route):
        told = route.fetch().json()
        one = next(volume for volume in told["volumes"] if volume["name"] == "vm1")
        told["volumes"] = [{**one, "name": f"volume-{n}", "id": f"{n:032x}"} for n in range(1000)]
        route.fulfill(json=told)

    page.route("**/v1/health", multiply)
    goes(browser, "#/volumes")
    expect(page.get_by_text("1 to 50 of 1000")).to_be_visible()
    page.evaluate("""() => {
        window.longest = 0;
        new PerformanceObserver((list) => list.getEntries().forEach((of) => {
            window.longest = Math.max(window.longest, of.duration);
        })).observe({ type: "longtask", buffered: false });
    }""")
    page.get_by_role("button", name="Size").click()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("51 to 100 of 1000")).to_be_visible()
    page.get_by_label("Filter volumes").fill("volume-99")
    expect(page.get_by_role("table", name="Volumes").get_by_role("row")).to_have_count(12)
    page.wait_for_timeout(5000)
    longest = page.evaluate("window.longest")
    print(f"with 1,000 volumes the page was busy for {f'{longest:.0f} ms' if longest else 'less than 50 ms'} at a time")
    page.unroute("**/v1/health")


def a_reader(chromium, grid):
    """Over TLS, with a token that is typed in."""
    address, token = grid.over_tls()
    browser = Browser(chromium, ignore_https_errors=True)
    page = browser.page
    until("the port is served", lambda: reaches(page, address))
    page.get_by_label("Token").fill("holdfast-token.x.y")
    page.get_by_role("button", name="Show the grid").click()
    expect(page.get_by_role("alert")).to_contain_text("token")
    browser.is_accessible("who is asked for a token")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Show the grid").click()
    expect(page.get_by_text("you may look")).to_be_visible()
    goes(browser, "#/volumes")
    expect(page.get_by_role("link", name="vm1", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="New volume")).to_have_count(0)
    grid.a.run("grid", "tls", "revoke", "reader/bob")
    expect(page.get_by_label("Token")).to_be_visible()
    assert browser.asked == {address.rstrip("/")}, browser.asked
    browser.context.close()


def reaches(page, address):
    try:
        page.goto(address)
        return True
    except Exception:
        return False


def main():
    if PICTURES:
        PICTURES.mkdir(parents=True, exist_ok=True)
    with Grid() as grid, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        browser = Browser(chromium)
        page = browser.page
        grid.load()
        address = grid.dashboard()
        origin = re.match(r"\w+://[^/]+", address).group()
        policy = page.goto(address).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy, policy
        expect(page.locator(".headline")).to_have_text("All is well")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first paint after {paint:.0f} ms")
        assert "token" not in page.url, "the key is out of sight"
        keys(browser)
        done = volumes(browser, grid) + devices(browser, grid)
        why_slow(browser)
        checked = looks(browser)
        a_node_dies(browser, grid)
        many(browser)
        assert browser.asked == {origin}, f"requests went to {browser.asked}"
        refused = [text for text in browser.complaints if "status of 4" not in text]
        assert not refused, refused
        # Without the key nobody is told anything.
        other = Browser(chromium)
        other.page.goto(origin)
        expect(other.page.get_by_label("Token")).to_be_visible()
        a_reader(chromium, grid)
        chromium.close()
    shutil.rmtree(WORK)
    print(f"dashboard: {done} actions, {checked} looks without a violation, nothing asked of another host")


main()
