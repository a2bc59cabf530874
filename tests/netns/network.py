"""Four hosts and a switch as network namespaces, joined by cables that have a rate, delay and loss, and that can be pulled."""
import ctypes
import heapq
import multiprocessing
import os
import select
import socket
import subprocess
import time

NAME = f"x{os.getpid()}"  # names of all that is made here begin with it
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "d": "10.77.0.4"}
ETCD, CLIENTS = "10.77.0.9", "10.77.0.254"  # a second address of host c, and the switch's own
LINKS = [(100, 5, 0.1), (1000, 1, 0.01), (10000, 0.1, 0)]  # of each cable: Mbit/s, ms to and fro, percent lost


class Refused(Exception):
    """The machine cannot make what is needed."""


def sh(command):
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def carry(pairs, delay_s):
    """The process that stands in for netem: carries frames between the two devices of each pair, each after `delay_s`."""
    ends, under_way, n = {}, [], 0
    for pair in pairs:
        two = []
        for device in pair:
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            end.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR: segments stay as long as TCP made them
            end.setsockopt(263, 23, 1)  # PACKET_IGNORE_OUTGOING
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            end.bind((device, 0))
            two.append(end)
        ends.update({two[0]: two[1], two[1]: two[0]})
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, to, frame = heapq.heappop(under_way)
            try:
                to.send(frame)
            except OSError:
                pass  # a full queue, or a device that is down: the frame is lost
        for end in select.select(list(ends), [], [], max(0, under_way[0][0] - now) if under_way else 0.05)[0]:
            try:
                frame = end.recv(1 << 17)
            except OSError:
                return  # the devices are gone
            n += 1
            heapq.heappush(under_way, (time.monotonic() + delay_s.value, n, ends[end], frame))


class Network:
    """Host h has eth0, whose other end is the switch's device NAMEh. With netem that device is on the bridge. Without netem
    NAMEhs is on the bridge, and carry() carries frames between the two."""

    def __init__(self):
        self.cable, self.carrier, self.delay_s = LINKS[0], None, multiprocessing.Value("d", 0, lock=False)

    def make(self):
        sh(f"ip netns add {NAME}")
        self.netem = not subprocess.run(f"tc -n {NAME} qdisc add dev lo root netem delay 1ms", shell=True, capture_output=True).returncode
        if not self.netem:
            print("netns: this kernel has no netem: rate is tbf's, loss a filter's, and delay a process's that carries frames", flush=True)
        sh(f"ip -n {NAME} link add {NAME} type bridge && ip -n {NAME} link set {NAME} up && ip -n {NAME} link set lo up")
        sh(f"ip -n {NAME} addr add {CLIENTS}/24 dev {NAME}")
        for host, address in ADDRESS.items():
            ns = NAME + host
            sh(f"ip netns add {ns} && ip -n {NAME} link add {ns} type veth peer name eth0 netns {ns}")
            sh(f"ip -n {ns} addr add {address}/24 dev eth0 && ip -n {ns} link set lo up && ip -n {ns} link set eth0 up")
            if not self.netem:
                sh(f"ip -n {NAME} link add {ns}c type veth peer name {ns}s")
                sh(f"ip -n {NAME} link set {ns}c up && ip -n {NAME} link set {ns} up")
            sh(f"ip -n {NAME} link set {self.plugged(host)} master {NAME} up")
        sh(f"ip -n {NAME}c addr add {ETCD}/24 dev eth0")

    def plugged(self, host):
        return NAME + host + ("" if self.netem else "s")

    def start(self):
        """Moves this thread, and those that it starts from now on, to the switch."""
        with open(f"/run/netns/{NAME}") as switch:
            if ctypes.CDLL(None, use_errno=True).setns(switch.fileno(), 0x40000000):
                raise Refused("setns: " + os.strerror(ctypes.get_errno()))
        if not self.netem:
            pairs = [(NAME + host, NAME + host + "c") for host in ADDRESS]
            self.carrier = multiprocessing.Process(target=carry, args=(pairs, self.delay_s), daemon=True)
            self.carrier.start()

    def shape(self, mbit, delay_ms, loss):
        """Sets rate, delay and loss of every cable, both ways."""
        self.cable, self.delay_s.value = (mbit, delay_ms, loss), delay_ms / 2000
        for host in ADDRESS:
            for ns, device in ((NAME + host, "eth0"), (NAME, NAME + host)):
                if self.netem:
                    sh(f"tc -n {ns} qdisc replace dev {device} root netem rate {mbit}mbit delay {delay_ms / 2}ms loss {loss}% limit 20000")
                    continue
                burst = max(131072, int(mbit * 1e6 / 8 / 100))  # bytes between two ticks
                sh(f"tc -n {ns} qdisc replace dev {device} root tbf rate {mbit}mbit burst {burst} latency 100ms")
                subprocess.run(f"tc -n {ns} qdisc del dev {device} clsact", shell=True, capture_output=True)
                if loss:  # a random number below it drops the packet (2), any other lets it on (-1)
                    code = f"4,32 0 0 4294963256,53 1 0 {int(loss / 100 * 2**32)},6 0 0 2,6 0 0 4294967295"
                    sh(f"tc -n {ns} qdisc add dev {device} clsact && tc -n {ns} filter add dev {device} ingress bpf da bytecode '{code}'")

    def cut(self, host):
        sh(f"ip -n {NAME} link set {self.plugged(host)} nomaster")

    def plug(self, host):
        sh(f"ip -n {NAME} link set {self.plugged(host)} master {NAME}")

    def pids(self):
        ours = {os.stat(f"/run/netns/{ns}").st_ino for ns in [NAME] + [NAME + host for host in ADDRESS]}
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                found |= {int(pid)} if os.stat(f"/proc/{pid}/ns/net").st_ino in ours else set()
            except OSError:
                pass  # it has ended
        return found - {os.getpid(), self.carrier.pid if self.carrier else 0}

    def remove(self):
        if self.carrier:
            self.carrier.kill()
            self.carrier.join()
        for ns in [NAME + h for h in ADDRESS] + [NAME]:
            subprocess.run(["ip", "netns", "del", ns], capture_output=True)
