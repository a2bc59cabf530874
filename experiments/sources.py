"""Which files an experiment's result depends on, and their hash: an edit elsewhere, a comment, another
layout leave the result what it is.

From the file that registers the experiment, every quoted path of this repository is followed: what is included, and
what is read or carried inside (models, a page). A header brings what implements it: x.h brings x.cc, and x_y.cc
unless there is an x_y.h; what names do not tell stands in IMPLEMENTED. test_run.py compares the outcome with what the
linker and the compiler saw.

xpyd_experiments' main.cc does not count: it passes points in and rows out.
"""
import hashlib
import os
import re

ROOMS = ("base", "allocator", "attention", "model", "batch", "disagg", "server", "experiments")
APART = ("bench", "gpu", "results", "demo_model")  # folders of other programs

LLAMA = ["model/llama.cc", "model/weights.cc"]  # of model.h, which is also of those who compute nothing
IMPLEMENTED = {
    "allocator/pooled.h": ["allocator/contiguous.cc", "allocator/paged.cc", "allocator/vattention.cc"],
    "attention/attention.h": ["attention/append.cc", "attention/attention_reference.cc"],
    "attention/attention_cuda_kernel.h": ["attention/attention_naive.cu", "attention/decode_mma.cu",
                                          "attention/decode_split.cu", "attention/prefill_mma.cu",
                                          "attention/prefill_wgmma_sm90.cu"],
    "attention/kernels.h": ["attention/walk.cc"],
    "base/device_cuda.h": ["base/exported_memory_cuda.cu"],
    "disagg/transport/wires.h": ["disagg/transport/" + wire + ".cc"
                                 for wire in ("local", "handoff", "shm", "nccl", "rdma", "tcp")],
    "experiments/failure_timeline.cc": ["server/main.cc"],  # it starts `xpyd worker` processes
    "experiments/kv_dtype.cc": LLAMA,
    "experiments/kv_points.cc": ["server/main.cc"],  # it starts `xpyd serve`
    "experiments/vattention_speed.cc": LLAMA,
    "model/model_cuda.h": ["model/llama_cuda.cu"],
    "server/backend_cpu.cc": LLAMA,
    "server/http.h": ["server/boost_asio_impl.cc", "server/boost_beast_impl.cc"],
    "server/main.cc": ["server/" + command + ".cc"
                       for command in ("tour", "serve", "worker_command", "generate", "bench", "peak_command", "info",
                                       "prefix_stats", "export")],
}

QUOTED = re.compile(r'"((?:%s)/[\w./-]+)' % "|".join(ROOMS))
REGISTERED = re.compile(r'^REGISTER_EXPERIMENT\("(\w+)",\s*"(\w+)"', re.M)
TOKEN = re.compile(rb'''(?P<nothing>//[^\n]*|/\*.*?\*/)|^[ \t]*\#(?P<directive>[^\n]*)|R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"|
    "(?:\\.|[^"\\\n])*"|\.?\d(?:\'?\w|\.|(?<=[eEpP])[+-])*|\'(?:\\.|[^\'\\\n])*\'|[A-Za-z_]\w*|[^\s\w]''', re.S | re.M | re.X)


def tokens(text):
    """What the compiler sees of a C++ file, a token a line: no comment, no layout. A renamed variable is another text: to
    tell it from another function of the same shape takes a compiler."""
    found = []
    for match in TOKEN.finditer(text.replace(b"\\\n", b" ")):
        if match["directive"] is not None:  # ends with its line
            found += [b"#", *tokens(match["directive"]).split(b"\n"), b"#end"]
        elif match["nothing"] is None:
            found.append(match[0])
    return b"\n".join(found)


class Sources:
    """The files below `root` that count for one device: CUDA sources do so for "cuda" alone."""

    def __init__(self, root, device):
        self.root, self.device = root, device
        self.suffixes = (".h", ".cc", ".cu") if device == "cuda" else (".h", ".cc")
        self.texts, self.tokens = {}, {}
        for room in ROOMS:
            for folder, folders, names in os.walk(os.path.join(root, room)):
                folders[:] = [f for f in folders if f not in APART]
                for name in names:
                    if name.endswith(self.suffixes) or not name.endswith((".cu", ".md", ".py")):
                        self.texts[os.path.relpath(os.path.join(folder, name), root)] = None
        self.brings = {file: [f for f in files if f in self.texts] for file, files in IMPLEMENTED.items()}
        for file in sorted(self.texts):
            if self._is_code(file) and not file.endswith(".h") and not self._registers(file):
                header = self._header(file)
                if header:
                    self.brings.setdefault(header, []).append(file)

    def _is_code(self, file):
        return file.endswith(self.suffixes)

    def _registers(self, file):
        """(name, device) of the experiments in it."""
        in_place = self._is_code(file) and file.startswith("experiments/")
        return REGISTERED.findall(self.text(file).decode()) if in_place else []

    def _header(self, file):
        """The header with its name, else with the longest beginning of its name, else None."""
        stem = os.path.splitext(file)[0]
        while True:
            if stem + ".h" in self.texts:
                return stem + ".h"
            stem, found, _ = stem.rpartition("_")
            if not found or "/" not in stem:
                return None

    def text(self, file):
        if self.texts[file] is None:
            with open(os.path.join(self.root, file), "rb") as opened:
                self.texts[file] = opened.read()
        return self.texts[file]

    def registered_in(self, name):
        return [file for file in self.texts
                if any(n == name and d in (self.device, "any") for n, d in self._registers(file))]

    def files_of(self, name):
        """The files that experiment `name` depends on, sorted."""
        roots = self.registered_in(name)
        if not roots:
            raise SystemExit(f"run.py: no file of experiments/ registers '{name}' for device {self.device}")
        return self.closure(roots)

    def closure(self, roots):
        seen, left = set(roots), list(roots)
        while left:
            file = left.pop()
            named = list(self.brings.get(file, []))
            for path in QUOTED.findall(self.text(file).decode()) if self._is_code(file) else []:
                named += [path] if path in self.texts else self._models(path)
            for path in named:
                if path not in seen:
                    seen.add(path)
                    left.append(path)
        return sorted(seen)

    def _models(self, folder):
        folder = folder.rstrip("/") + "/"
        return [file for file in self.texts if file.startswith(folder) and file.endswith(".json")]

    def stamp(self, name):
        """`room=hash room=hash ...`: of the experiment's files in each room."""
        rooms = {}
        for file in self.files_of(name):
            text = self.text(file)
            if self._is_code(file):
                if file not in self.tokens:
                    self.tokens[file] = tokens(text)
                text = self.tokens[file]
            digest = rooms.setdefault(file.split("/")[0], hashlib.sha256())
            digest.update(file.encode() + b"\0" + text + b"\0")
        return " ".join(f"{room}={rooms[room].hexdigest()[:8]}" for room in ROOMS if room in rooms)


def changed(old, new):
    """The rooms whose hashes differ, in words."""
    if "=" not in old:
        return "sources have changed since"
    before, after = (dict(part.split("=") for part in text.split()) for text in (old, new))
    rooms = [room for room in ROOMS if before.get(room) != after.get(room)]
    return f"{', '.join(rooms)} {'has' if len(rooms) == 1 else 'have'} changed since"
