"""What a dashboard that stays open costs its host: memory, and the time of its largest request.

Arguments: the program, a directory to work in. A grid with 1,000 volumes is made there, and asked as the page asks.
"""

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

VOLUMES = 1000
SETTLES_S = 30
LOOKS_S = 300
LOOK_EVERY_S = 2
SELDOM_EVERY_S = 10
SELDOM = ["tasks", "machines", "room", "capacity"]
GOAL_MIB = 10


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("host")
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def ask(connection, of):
    """Length of the answer, and seconds that it took."""
    began = time.monotonic()
    connection.request("GET", f"/v1/{of}")
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        sys.exit(f"{of}: {answer.status}: {body.decode()}")
    return len(body), time.monotonic() - began


def listen(path):
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(str(path))
    stream.sendall(b"GET /v1/events HTTP/1.1\r\nHost: host\r\nAccept: text/event-stream\r\n\r\n")
    while stream.recv(1 << 16):
        pass


def resident_mib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def look_on(path, pid):
    """As the page does: times of the common request, memory at each look, lengths of answers."""
    threading.Thread(target=listen, args=(path,), daemon=True).start()
    connections = {of: Connection(path) for of in ["health", *SELDOM]}
    times, memory, lengths, seldom_at = [], [], {}, 0
    end = time.monotonic() + LOOKS_S
    while (now := time.monotonic()) < end:
        lengths["health"], took = ask(connections["health"], "health")
        times.append(took)
        if now >= seldom_at:
            seldom_at = now + SELDOM_EVERY_S
            for of in SELDOM:
                lengths[of] = ask(connections[of], of)[0]
        memory.append(resident_mib(pid))
        time.sleep(max(0, LOOK_EVERY_S - (time.monotonic() - now)))
    return sorted(times), memory, lengths


def main(program, work):
    grid = work / "cost"
    holdfast = [program, "--dir", str(grid)]
    subprocess.run([*holdfast, "grid", "down", "--force"], capture_output=True)
    shutil.rmtree(grid, ignore_errors=True)
    grid.mkdir(parents=True)
    up = ["grid", "up", "--nodes", "3", "--devices", "1", "--device-size", "6GiB"]
    subprocess.run([*holdfast, *up], check=True)
    try:
        for number in range(VOLUMES):
            create = ["volume", "create", f"volume-{number}", "--size", "16MiB", "--layout", "mirror:2"]
            subprocess.run([*holdfast, *create], check=True, stdout=subprocess.DEVNULL)
        time.sleep(SETTLES_S)
        pid = json.loads((grid / "run/host.pid").read_text())["pid"]
        before = resident_mib(pid)
        times, memory, lengths = look_on(grid / "api.sock", pid)
    finally:
        subprocess.run([*holdfast, "grid", "down", "--force"], check=True)
        shutil.rmtree(grid)
    more = max(memory) - before
    print(f"memory of the host: {before:.1f} MiB, with a dashboard {more:.1f} MiB more at most")
    print(f"lengths of answers: {lengths}")
    at = [times[len(times) * share // 100] * 1000 for share in (50, 99)]
    print(f"/v1/health of {VOLUMES} volumes: half in {at[0]:.1f} ms, 99 of 100 in {at[1]:.1f} ms, {len(times)} times")
    return more <= GOAL_MIB


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1], Path(sys.argv[2])))
