"""Finds the files that an experiment's result depends on, and hashes what the compiler sees of them. Edits of other files do
not change the hash. Nor do comments, layout, a renamed identifier or namespace, or a function that moves to another file of
its room (the top-level folder).

The search starts at the file that registers the experiment. It follows every quoted path of this repository: included
headers, and files that are read or embedded (models, a page). A header leads to its implementation: x.h leads to x.cc, and
to x_y.cc unless x_y.h exists. IMPLEMENTED lists the cases that names do not reveal. test_run.py compares the outcome with
what the linker and the compiler saw.

The main.cc of xpyd_experiments does not count, because it only passes points in and rows out.
"""
import hashlib
import os
import re

ROOMS = ("base", "allocator", "attention", "model", "batch", "disagg", "server", "experiments")
APART = ("bench", "gpu", "results", "demo_model")  # folders of other programs

LLAMA = ["model/llama/llama.cc", "model/weights/weights.cc"]  # implement model.h, which files that compute nothing include, too
IMPLEMENTED = {
    "allocator/kv_memory.h": ["allocator/schemes.cc"],
    "attention/attention.h": ["attention/variants.cc"],
    "attention/cuda/attention_cuda_kernel.h": ["attention/cuda/" + kernel + ".cu" for kernel in (
        "attention_naive", "decode_mma", "decode_split", "prefill_mma", "prefill_wgmma_sm90")],
    "attention/cpu/kernels.h": ["attention/cpu/tiled_attention.cc"],
    "base/copy.h": ["base/memory.cc"],
    "base/wait_word.h": ["base/thread_team.cc"],
    "disagg/instance/cluster.h": ["disagg/instance/build_instance.cc"],
    "experiments/subcommands.h": ["experiments/load/bench.cc", "experiments/load/prefix_stats.cc",
                                  "experiments/simulate/simulate_command.cc", "experiments/event_log/event_log_commands.cc"],
    "experiments/simulate/cluster.h": ["experiments/simulate/result.cc"],
    "experiments/simulate/traces.h": ["experiments/simulate/generate.cc"],
    "experiments/paged_attention.cc": LLAMA,
    "experiments/failure_timeline.cc": ["server/main.cc"],  # starts `xpyd worker` processes, and `xpyd serve` through tests/netns/run
    "experiments/kv_dtype.cc": LLAMA,
    "experiments/vattention_speed.cc": LLAMA,
    "model/jinja/jinja.h": ["model/jinja/jinja_eval.cc", "model/jinja/jinja_parser.cc", "model/jinja/jinja_value.cc"],
    "model/cuda/model_cuda.h": ["model/cuda/llama_cuda.cu"],
    "server/backend.cc": LLAMA,
    "experiments/load/bench.h": ["experiments/load/bench_client.cc", "experiments/load/bench_result.cc"],
    "server/openai/api.h": ["server/openai/api_parse.cc", "server/openai/generation.cc", "server/openai/page.cc", "server/openai/stats_body.cc"],
    "server/http/http.h": ["server/http/boost_impl.cc", "server/http/http_access.cc"],
    "server/workers/local_workers.h": ["server/workers/etcd_registry.cc"],
    "server/main.cc": ["server/cli/" + command + ".cc" for command in ("tour", "serve", "commands", "info")],
    "server/build.h": ["server/backend.cc", "server/backend_cuda.cu", "server/cli/options.cc"],
}

QUOTED = re.compile(r'"((?:%s)/[\w./-]+)' % "|".join(ROOMS))
NAMESPACE = re.compile(rb"\bnamespace ([\w:]+) \{")
FLAGS = re.compile(r"(_avx2\.cc|\.cu)?$")  # files that the Makefile compiles with other flags
TABLES = {  # table -> pattern of its rows' names, and the folder in which the files of these names are
    "disagg/transport/transports.h": (re.compile(rb"\bmake_(\w+)_transport\("), "disagg/transport/"),
    "allocator/schemes.cc": (re.compile(rb"^KvScheme (\w+)_scheme\(\);", re.M), "allocator/"),
}
REGISTERED = re.compile(r'^REGISTER_EXPERIMENT\("([\w/]+)",\s*"(\w+)"', re.M)
TOKEN = re.compile(rb'''(?P<nothing>//[^\n]*|/\*.*?\*/)|^[ \t]*\#(?P<directive>[^\n]*)|R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"|
    "(?:\\.|[^"\\\n])*"|\.?\d(?:\'?\w|\.|(?<=[eEpP])[+-])*|\'(?:\\.|[^\'\\\n])*\'|[A-Za-z_]\w*|::|->|[^\s\w]''', re.S | re.M | re.X)

NOTHING = re.compile(rb"(class|struct) \w+ ;|using namespace [\w: ]+;")
IDENTIFIER = re.compile(rb"[A-Za-z_]\w*")
FLOW = set(b"return case else goto throw new delete sizeof typename operator co_await co_return co_yield".split())
KEYWORDS = FLOW | set(b"""alignas alignof auto bool break catch char class concept const const_cast consteval constexpr constinit continue
    decltype default do double dynamic_cast enum explicit export extern false final float for friend if inline int long mutable namespace
    noexcept nullptr override private protected public register reinterpret_cast requires short signed static static_assert static_cast std
    struct switch template this thread_local true try typedef typeid union unsigned using virtual void volatile while""".split())
TYPE = re.compile(rb"[A-Z][a-z]")
DECLARED = (b"=", b";", b",", b")", b"{", b"(", b":", b"[")  # tokens that may follow the name of a variable
GOES_ON = (b";", b",", b"{", b"(", b"catch")  # tokens that continue a declaration after the } of a type, an initialiser, a lambda or a function-try-block


def tokens(text):
    """The tokens of a C++ file, without comments and layout. A preprocessor directive is one token. Adjacent string literals
    are joined, because clang-format splits them at the end of a line."""
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
    """The set of a file's declarations, as tuples of tokens. Code between brackets or between #if and #endif is not divided.

    Their order, file and namespace do not matter to the compiler, except for the order in which globals are constructed.
    Also left out are #include (its target is followed), `struct Name;`, `using namespace`, and repeated text."""
    found, part, depth, spaces = set(), [], 0, 0

    def end():
        if part and not NOTHING.fullmatch(b" ".join(part)):
            found.add(tuple(part))
        part.clear()

    for word, following in zip(words, words[1:] + [b""]):
        directive = word[2:].split(b" ", 1)[0] if word[:1] == b"#" else b""
        if directive == b"include" or word == b"# pragma once":
            continue
        if word == b"}" and not depth and spaces:
            end()
            spaces -= 1
            continue
        part.append(word)
        if word == b"{" and not depth and b"namespace" in part:
            begin = part.index(b"namespace")  # tokens before `namespace` are a macro without a semicolon
            del part[begin:]
            end()
            spaces += 1
        elif word in (b"{", b"(", b"[") or directive in (b"if", b"ifdef", b"ifndef"):
            depth += 1
        elif word in (b"}", b")", b"]") or directive == b"endif":
            depth = max(depth - 1, 0)
        if not depth and (word == b";" or directive or word == b"}" and following not in GOES_ON):
            end()
    end()
    return found


def short(*parts):
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()


class Shape:
    """A declaration without its names. `form` hashes its tokens with the n-th name replaced by n; `names` lists the names in
    that order.

    `said` holds names at namespace scope and names of a type's members, which mean the same in other declarations. `own` holds
    names that are declared inside (`int n =`, `const Row& n)`). `maybe` holds those that only look so (`a * n)`). Every other
    name counts as one of a library."""

    def __init__(self, words, spaces):
        kept, i = [], 0
        while i < len(words):
            if words[i] in spaces and words[i + 1:i + 2] == (b"::",):
                i += 2  # skip a namespace qualifier
                continue
            macro = words[i][:1] == b"#"
            kept.append(re.sub(rb"\b(\w+) :: ", lambda m: b"" if m[1] in spaces else m[0], words[i]) if macro else words[i])
            i += 1
        slots, form, depth = {}, [], 0
        self.said, self.own, self.maybe = set(), set(), set()
        in_type = bool({b"struct", b"class", b"union", b"enum"} & set(kept[:kept.index(b"{")] if b"{" in kept else ()))
        for earlier, before, word, after in zip([b"", b""] + kept, [b""] + kept, kept, kept[1:] + [b""]):
            depth += (word in (b"{", b"(", b"[")) - (word in (b"}", b")", b"]"))
            if not IDENTIFIER.fullmatch(word) or word in KEYWORDS:
                form.append(word)
                continue
            form.append(b"$%d" % slots.setdefault(word, len(slots)))
            if before in (b".", b"->") or before == b"::" and depth > 0:
                continue
            if depth == 0 or depth == 1 and in_type:
                self.said.add(word)
            elif after in DECLARED and IDENTIFIER.fullmatch(before) and before not in FLOW:
                self.own.add(word)
            elif after in DECLARED and after != b"(" and before in (b"&", b"*", b">"):
                a_type = before != b">" and (earlier in KEYWORDS - FLOW or TYPE.match(earlier))
                (self.own if a_type else self.maybe).add(word)
        self.form, self.names = short(*form), list(slots)


class Sources:
    """The files below `root` that count for one device. CUDA sources count only for "cuda"."""

    def __init__(self, root, device):
        self.root, self.device = root, device
        self.suffixes = (".h", ".cc", ".cu") if device == "cuda" else (".h", ".cc")
        self.texts, self.words, self.seen, self.shapes = {}, {}, {}, {}
        for room in ROOMS:
            for folder, folders, names in os.walk(os.path.join(root, room)):
                folders[:] = [f for f in folders if f not in APART]
                for name in names:
                    if name.endswith(self.suffixes) or not name.endswith((".cu", ".md", ".py")):
                        self.texts[os.path.relpath(os.path.join(folder, name), root)] = None
        code = b"\n".join(self.text(file) for file in self.texts if self._is_code(file))
        self.spaces = {name for path in NAMESPACE.findall(code) for name in path.split(b"::")}
        self.brings = {file: [f for f in files if f in self.texts] for file, files in IMPLEMENTED.items()}
        for table in TABLES.keys() & self.texts.keys():
            row, folder = TABLES[table]
            names = {name.decode() + ".cc" for name in row.findall(self.text(table))}
            self.brings[table] = sorted(f for f in self.texts if f.startswith(folder) and os.path.basename(f) in names)
        for file in sorted(self.texts):
            if self._is_code(file) and not file.endswith(".h") and not self._registers(file):
                header = self._header(file)
                if header:
                    self.brings.setdefault(header, []).append(file)

    def _is_code(self, file):
        return file.endswith(self.suffixes)

    def _registers(self, file):
        """[(name, device)] of the experiments that the file registers."""
        in_place = self._is_code(file) and file.startswith("experiments/")
        return REGISTERED.findall(self.text(file).decode()) if in_place else []

    def _header(self, file):
        """The header with the file's name or with the longest prefix of it, in its folder or one above; None if there is none."""
        folder, name = os.path.split(os.path.splitext(file)[0])
        while folder:
            stem = name
            while stem:
                if f"{folder}/{stem}.h" in self.texts:
                    return f"{folder}/{stem}.h"
                stem = stem.rpartition("_")[0]
            folder = os.path.dirname(folder)
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
        """The parts of a file that count. Code counts by its declarations and compiler flags, data by its path and whole content."""
        if file not in self.seen:
            if self._is_code(file):
                flags = FLAGS.search(file)[0].encode()
                self.seen[file] = {(flags, *part) for part in declarations(self.tokens(file))}
            else:
                self.seen[file] = {(b"#data", file.encode(), self.text(file))}
        return self.seen[file]

    def shape(self, part):
        if part not in self.shapes:
            self.shapes[part] = Shape(part[1:] if part[0] != b"#data" else (), self.spaces)
            self.shapes[part].form += short(*(part if part[0] == b"#data" else part[:1]))
        return self.shapes[part]

    def registered_in(self, name):
        return [file for file in self.texts
                if any(n == name and d in (self.device, "any") for n, d in self._registers(file))]

    def files_of(self, name):
        """The sorted files on which experiment `name` depends."""
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
        """The stamp of the experiment's files."""
        return self.stamp_of(self.files_of(name))

    def stamp_of(self, files):
        """Returns `room=hash room=hash ... names=hash`. A room's hash covers what counts of these files in that room, whatever
        file holds it and whatever it is called. The last hash covers which declaration uses which name.

        Names are compared by their places, as the Weisfeiler-Leman algorithm compares nodes of graphs. The colour of a name is
        the hash of the declarations that contain it and its positions there; a declaration's hash covers its form and the
        colours of its names. Two rounds are computed. Renaming something everywhere therefore keeps the stamp, and one call
        of another function changes it."""
        rooms = {}
        for file in files:
            rooms.setdefault(file.split("/")[0], set()).update(self.parts(file))
        shapes = {room: [self.shape(part) for part in parts] for room, parts in rooms.items()}
        every = [shape for found in shapes.values() for shape in found]
        said = set().union(*(shape.said for shape in every))
        colours = dict.fromkeys(said, b"")

        def signature(shape):
            return short(shape.form, *(b"" if n in shape.own else colours[n] if n in said else b"" if n in shape.maybe else n
                                       for n in shape.names))

        digests = {room: short(*sorted(map(signature, found))) for room, found in shapes.items()}
        for _ in range(2):
            places = {name: [] for name in said}
            for shape in every:
                seen = signature(shape)
                for place, name in enumerate(shape.names):
                    if name in said and name not in shape.own:
                        places[name].append(seen + b"%d" % place)
            colours = {name: short(*sorted(found)) for name, found in places.items()}
        digests["names"] = short(*sorted(map(signature, every)))
        return " ".join(f"{room}={digests[room].hex()[:8]}" for room in (*ROOMS, "names") if room in digests)


def changed(old, new):
    """The rooms whose hashes differ, as text."""
    if "=" not in old:
        return "sources have changed since"
    before, after = (dict(part.split("=") for part in text.split()) for text in (old, new))
    rooms = [room for room in ROOMS if before.get(room) != after.get(room)] or ["the use of names"]
    return f"{', '.join(rooms)} {'has' if len(rooms) == 1 else 'have'} changed since"
