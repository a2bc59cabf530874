"""Which files an experiment's result depends on, and the hash of what the compiler sees of them: an edit elsewhere, a
comment, another layout, another file of the room for the same function leave the result what it is.

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
FLAGS = re.compile(r"(_avx2\.cc|\.cu)?$")  # those that the Makefile compiles otherwise
REGISTERED = re.compile(r'^REGISTER_EXPERIMENT\("(\w+)",\s*"(\w+)"', re.M)
TOKEN = re.compile(rb'''(?P<nothing>//[^\n]*|/\*.*?\*/)|^[ \t]*\#(?P<directive>[^\n]*)|R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"|
    "(?:\\.|[^"\\\n])*"|\.?\d(?:\'?\w|\.|(?<=[eEpP])[+-])*|\'(?:\\.|[^\'\\\n])*\'|[A-Za-z_]\w*|[^\s\w]''', re.S | re.M | re.X)

FORWARD = re.compile(rb"(class|struct) \w+ ;")
GOES_ON = (b";", b",", b"{", b"(", b"catch")  # after the } of a type, an initialiser, a lambda, a function that is one try


def tokens(text):
    """The tokens of a C++ file, a directive of the preprocessor being one: no comment, no layout. Neighbouring literals
    are one text, which clang-format parts where the line ends."""
    found = []
    for match in TOKEN.finditer(text.replace(b"\\\n", b" ")):
        if match["directive"] is not None:  # ends with its line
            found.append(b"# " + b" ".join(tokens(match["directive"])))
        elif match["nothing"] is None:
            if match[0][:1] == b'"' and found and found[-1][:1] == b'"':
                found[-1] = found[-1][:-1] + match[0][1:]
            else:
                found.append(match[0])
    return found


def declarations(words):
    """The set of a file's declarations, each with its namespaces: what stands between brackets or #if and #endif is whole.

    Their order and their file are nothing to the compiler, but for the order in which globals are made. Nothing, too, are
    #include (what it brings is followed), `struct Name;`, and one text twice. A renamed variable is another text: to tell
    it from another function of the same shape takes a compiler."""
    found, spaces, part, depth = set(), [], [], 0

    def end():
        if part and not FORWARD.fullmatch(b" ".join(part)):
            found.add(b"\n".join(spaces + part))
        part.clear()

    for word, following in zip(words, words[1:] + [b""]):
        directive = word[2:].split(b" ", 1)[0] if word[:1] == b"#" else b""
        if directive == b"include" or word == b"# pragma once":
            continue
        if word == b"}" and not depth and spaces:
            end()
            spaces.pop()
            continue
        part.append(word)
        if word == b"{" and not depth and b"namespace" in part:
            begin = part.index(b"namespace")  # before it: a macro without a semicolon
            space = b" ".join(part[begin:])
            del part[begin:]
            end()
            spaces.append(space)
        elif word in (b"{", b"(", b"[") or directive in (b"if", b"ifdef", b"ifndef"):
            depth += 1
        elif word in (b"}", b")", b"]") or directive == b"endif":
            depth = max(depth - 1, 0)
        if not depth and (word == b";" or directive or word == b"}" and following not in GOES_ON):
            end()
    end()
    return found


class Sources:
    """The files below `root` that count for one device: CUDA sources do so for "cuda" alone."""

    def __init__(self, root, device):
        self.root, self.device = root, device
        self.suffixes = (".h", ".cc", ".cu") if device == "cuda" else (".h", ".cc")
        self.texts, self.words, self.seen = {}, {}, {}
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

    def tokens(self, file):
        if file not in self.words:
            self.words[file] = tokens(self.text(file))
        return self.words[file]

    def parts(self, file):
        """What counts of a file: its declarations, for the flags that it is compiled with; of data all, by its path."""
        if file not in self.seen:
            if self._is_code(file):
                flags = FLAGS.search(file)[0].encode()
                self.seen[file] = {flags + b"\n" + part for part in declarations(self.tokens(file))}
            else:
                self.seen[file] = {file.encode() + b"\0" + self.text(file)}
        return self.seen[file]

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
            for path in QUOTED.findall(b" ".join(self.tokens(file)).decode()) if self._is_code(file) else []:
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
        """Of the experiment's files."""
        return self.stamp_of(self.files_of(name))

    def stamp_of(self, files):
        """`room=hash room=hash ...`: of what counts of these files in each room, whichever file it is in."""
        rooms = {}
        for file in files:
            rooms.setdefault(file.split("/")[0], set()).update(self.parts(file))
        digests = {room: hashlib.sha256(b"\0".join(sorted(parts))).hexdigest() for room, parts in rooms.items()}
        return " ".join(f"{room}={digests[room][:8]}" for room in ROOMS if room in digests)


def changed(old, new):
    """The rooms whose hashes differ, in words."""
    if "=" not in old:
        return "sources have changed since"
    before, after = (dict(part.split("=") for part in text.split()) for text in (old, new))
    rooms = [room for room in ROOMS if before.get(room) != after.get(room)]
    return f"{', '.join(rooms)} {'has' if len(rooms) == 1 else 'have'} changed since"
