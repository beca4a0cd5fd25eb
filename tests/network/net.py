"""Hosts out of Linux network namespaces: a switch, and hosts with a cable, addresses, a name and an /etc/hosts each.

Needs root and `ip`. Names of hosts are node-0, node-1, ...; node6-0 is the IPv6 address of node-0.

    python net.py IN OUT DELAY LOSS RATE     is the wire: it forwards frames between two interfaces of its namespace
"""

import array
import collections
import contextlib
import fcntl
import math
import os
import pathlib
import random
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no host has."""


class Network:
    """A network of `size` hosts; it is taken down with the block.

    Args:
        size: the number of hosts.
        own_name: the address of a host's name on the host itself; None for the one that the others see.
    """

    def __init__(self, size, own_name=None):
        self.size = size
        self._own_name = own_name
        self._prefix = f"re{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._made = []
        self._wires = {}

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for wire in self._wires.values():
            wire.kill()
            wire.wait()
        for name in self._made:
            for pid in _ip(f"netns pids {name}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for name in self._made:
            _ip(f"netns del {name}")
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def _make(self):
        self._add(self._switch)
        _ip(f"-n {self._switch} link add br0 type bridge")
        _ip(f"-n {self._switch} link set br0 up")
        for host in range(self.size):
            name = self._name(host)
            self._add(name)
            _ip(f"-n {self._switch} link add v{host} type veth peer name eth0 netns {name}")
            _ip(f"-n {self._switch} link set v{host} master br0")
            _ip(f"-n {self._switch} link set v{host} up")
            _ip(f"-n {name} addr add {ip4(host)}/24 dev eth0")
            _ip(f"-n {name} addr add {ip6(host)}/64 dev eth0 nodad")
            _ip(f"-n {name} link set eth0 up")
            folder = pathlib.Path(f"/etc/netns/{name}")
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for other in range(self.size):
                seen = self._own_name if self._own_name and other == host else ip4(other)
                lines += [f"{seen} node-{other}", f"{ip6(other)} node6-{other}"]
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _add(self, name):
        _ip(f"netns add {name}")
        self._made.append(name)
        _ip(f"-n {name} link set lo up")

    def _name(self, host):
        return f"{self._prefix}h{host}"

    def start(self, host, command, environment, log, clock=0):
        """Starts a program on a host, whose monotonic clock is `clock` seconds ahead."""
        inside = f'hostname node-{host}; exec "$@"'
        times = ["-fT", "--monotonic", str(clock), "--boottime", str(clock)] if clock else []
        with open(log, "wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._name(host), "unshare", "-u", *times, "sh", "-c", inside, "sh", *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, host, number):
        """Sends a signal to all processes of a host."""
        for pid in _ip(f"netns pids {self._name(host)}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def cable(self, host, plugged):
        """Pulls the cable of a host out of the switch, or puts it back."""
        _ip(f"-n {self._switch} link set v{host} {'up' if plugged else 'down'}")

    def part(self, one, other):
        """Lets nothing through between two hosts: their frames for each other go to nobody."""
        for host, there in ((one, other), (other, one)):
            for address in (ip4(there), ip6(there)):
                _ip(f"-n {self._name(host)} neigh replace {address} lladdr {NOBODY} dev eth0 nud permanent")

    def heal(self, one, other):
        """Undoes `part`."""
        for host, there in ((one, other), (other, one)):
            for address in (ip4(there), ip6(there)):
                _ip(f"-n {self._name(host)} neigh flush to {address} dev eth0 nud permanent")

    def wire(self, host, delay=0.0, loss=0.0, rate=math.inf):
        """Makes the way between a host and the switch worse; with the defaults, as it was.

        Args:
            host: its index.
            delay: seconds each way.
            loss: the share of frames that get lost each way.
            rate: bits a second each way.
        """
        if host in self._wires:
            wire = self._wires.pop(host)
            wire.kill()
            wire.wait()
            _ip(f"-n {self._switch} link set v{host} master br0")
            _ip(f"-n {self._switch} link del d{host}a")
        if (delay, loss, rate) == (0.0, 0.0, math.inf):
            return
        ends = f"d{host}a", f"d{host}b"
        _ip(f"-n {self._switch} link add {ends[0]} type veth peer name {ends[1]}")
        for end in ends:
            _ip(f"-n {self._switch} link set {end} up")
        _ip(f"-n {self._switch} link set {ends[0]} master br0")
        # A frame that goes through the wire must be whole: with its checksum, and no longer than a frame.
        for each in range(self.size):
            self._run(self._name(each), "plain", "eth0")
        self._run(self._switch, "plain", f"v{host}", ends[1])
        _ip(f"-n {self._switch} link set v{host} nomaster")
        command = [*_within(self._switch), "wire", f"v{host}", ends[1], *map(str, (delay, loss, rate))]
        self._wires[host] = subprocess.Popen(command)

    def _run(self, name, *arguments):
        subprocess.run([*_within(name), *arguments], check=True)


def ip4(host):
    """The IPv4 address of a host."""
    return f"10.77.0.{10 + host}"


def ip6(host):
    """The IPv6 address of a host."""
    return f"fd77::{10 + host:x}"


def _ip(arguments):
    return subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True).stdout


def _within(name):
    return ["ip", "netns", "exec", name, sys.executable, __file__]


def _plain(*interfaces):
    """Has the checksums of interfaces computed at once, which also ends frames of more than their length."""
    checksums, ethtool = 0x17, 0x8946
    with socket.socket() as sock:
        for interface in interfaces:
            value = array.array("B", struct.pack("II", checksums, 0))
            fcntl.ioctl(sock, ethtool, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))


def _wire(one, other, delay, loss, rate):
    """Forwards frames both ways, late, not all, or only so many bits a second."""
    outgoing, draw = 4, random.Random(0)
    ends = [_raw(one), _raw(other)]
    free = [0.0, 0.0]  # when the way in each direction is free again
    waiting = collections.deque(), collections.deque()
    with selectors.DefaultSelector() as selector:
        for at, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, at)
        while True:
            due = min((each[0][0] for each in waiting if each), default=math.inf)
            for key, _ in selector.select(None if due == math.inf else max(due - time.monotonic(), 0.0)):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame, about = key.fileobj.recvfrom(1 << 16)
                        if about[2] == outgoing or draw.random() < loss:
                            continue
                        now = time.monotonic()
                        free[key.data] = max(free[key.data], now) + 8 * len(frame) / rate
                        if free[key.data] - now < 1.0:  # a second of frames fits into the queue
                            waiting[key.data].append((free[key.data] + delay, frame))
            for at, frames in enumerate(waiting):
                while frames and frames[0][0] <= time.monotonic():
                    with contextlib.suppress(OSError):  # the other end is down: the frame is lost
                        ends[1 - at].send(frames.popleft()[1])


def _raw(interface):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((interface, 0))
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    return sock


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        _plain(*sys.argv[2:])
    else:
        _wire(sys.argv[2], sys.argv[3], *map(float, sys.argv[4:]))
