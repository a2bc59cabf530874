#!/usr/bin/env python3
"""Tests of the runner, the result files and the claims, with a program that only pretends to measure."""
import contextlib
import glob
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import run  # noqa: E402
import tables  # noqa: E402
from claims import CLAIMS, HOW, Claim, Expect, gap99, known  # noqa: E402
from evidence import READ, Evidence, against, decide, interval, lost, printed, share  # noqa: E402
from sources import APART, IMPLEMENTED, ROOMS, Sources, declarations, tokens  # noqa: E402
from table import Table, TableError  # noqa: E402

# It has three points and logs every call. FAKE_WRONG names an x whose result is wrong, FAKE_DIE one at which it ends.
FAKE = textwrap.dedent("""\
    #!{python}
    import json, os, sys
    words = sys.argv[1:]
    if words[0] == "machine":
        print(json.dumps({{"commit": "abc", "build": "release", "machine": "toy", "cuda": "",
                           "cuda_missing": "no CUDA device"}}))
    elif words[0] == "peak":
        print('{{"read_gbps": 1}}')
    elif words[0] == "points":
        print(json.dumps([{{"x": x}} for x in (1, 2, 4)]))
    else:
        for line in sys.stdin:
            x = json.loads(line)["x"]
            with open(os.environ["FAKE_LOG"], "a") as log:
                log.write(str(x) + " ")
            if os.environ.get("FAKE_DIE") == str(x):
                print("out of luck", file=sys.stderr)
                sys.exit(7)
            if os.environ.get("FAKE_WRONG") == str(x):
                print(json.dumps({{"error": "wrong result, not timed: hash"}}), flush=True)
            else:
                print(json.dumps({{"rows": [{{"y": 10 * x}}]}}), flush=True)
    """)

# The sources of the pretended program: two experiments, a header and its implementation, a model, and unrelated files.
SOURCES = {
    "experiments/toy.cc": '#include "model/shape.h"\nREGISTER_EXPERIMENT("toy", "cpu", points, open);\n',
    "experiments/other.cc": '#include "model/shape.h"\nREGISTER_EXPERIMENT("other", "cpu", points, open);\n',
    "experiments/models/one/config.json": "{}",
    "model/shape.h": "int sides();\n",
    "model/shape_many.cc": '#include "base/count.h"\nconst char* dir = "experiments/models/one";\n',
    "model/form.h": "int form();\n",
    "base/count.h": "int count();\n",
    "base/count.cc": "int count() { return 1; }\n",
    "base/count_cuda.cu": "int count_there() { return 1; }\n",
}


class RunnerTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.log = os.path.join(self.dir, "log")
        self.bin = os.path.join(self.dir, "program")
        with open(self.bin, "w") as file:
            file.write(FAKE.format(python=sys.executable))
        os.chmod(self.bin, 0o755)
        os.environ["FAKE_LOG"] = self.log
        for name in ("FAKE_WRONG", "FAKE_DIE"):
            os.environ.pop(name, None)
        self.claim = Claim("toy", "?", "nowhere", [Expect("y at 2", lambda t: t("y", x=2), 19, 21, "s")], repeats=2)
        self.csv = os.path.join(self.dir, "toy.csv")
        self.root, run.ROOT = run.ROOT, self.dir  # this root has its own sources, and set-aside files go below it
        for path, text in SOURCES.items():
            self.edit(path, text)

    def edit(self, path, text):
        os.makedirs(os.path.dirname(os.path.join(self.dir, path)), exist_ok=True)
        with open(os.path.join(self.dir, path), "w") as file:
            file.write(text)
        run.sources_below.cache_clear()

    def rename(self, old, new):
        with open(os.path.join(self.dir, old)) as file:
            self.edit(new, file.read())
        os.remove(os.path.join(self.dir, old))

    def tearDown(self):
        run.ROOT = self.root
        shutil.rmtree(self.dir)

    def runner(self, **more):
        class Options:
            bin, results, seed, traces, tiny, repeats = self.bin, self.dir, 0, "", False, 0
        for key, value in more.items():
            setattr(Options, key, value)
        return run.Runner(Options)

    def measured(self):
        """The points that were measured since the last call."""
        text = ""
        if os.path.exists(self.log):
            with open(self.log) as file:
                text = file.read()
            os.remove(self.log)
        return text.split()

    def quietly(self, call, *words):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            result = call(*words)
        return result, out.getvalue()

    def run_claim(self, **more):
        return self.quietly(self.runner(**more).run, self.claim)

    def verdict(self, **more):
        """(verdict of the claim's one expectation, state of the file)."""
        state, found = run.verdict(self.runner(**more), self.claim)
        return (found[0][1].verdict if found else "not run"), state

    def test_repetitions_interleave_and_a_second_run_measures_nothing(self):
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), [])
        self.assertEqual(self.verdict(), ("agrees with arithmetic", ""))

    def test_what_reads_no_clock_is_asked_of_several_programs_and_stands_in_the_order_of_the_plan(self):
        self.claim.how = "virtual"
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(sorted(self.measured()), sorted(["1", "2", "4"] * 2))
        self.assertEqual([(row["repeat"], row["x"]) for row in Table.load(self.csv).rows],
                         [(r, x) for r in "01" for x in "124"])

    def test_an_interrupted_run_goes_on_where_it_was(self):
        os.environ["FAKE_DIE"] = "4"
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("ended with code 7: out of luck", out)
        self.measured()
        self.assertIn("failed: ", self.verdict()[1])
        self.assertIn("out of luck", self.verdict()[1])
        self.assertFalse(self.quietly(run.check, self.runner(), [self.claim])[0])
        del os.environ["FAKE_DIE"]
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), ["4", "4"])
        self.assertEqual(self.verdict()[0], "agrees with arithmetic")

    def test_a_wrong_result_gives_no_row(self):
        os.environ["FAKE_WRONG"] = "2"
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("wrong result, not timed", out)
        self.assertEqual({row["x"] for row in Table.load(self.csv).rows}, {"1", "4"})
        self.assertEqual(self.verdict()[0], "not run")

    def test_a_half_written_line_is_named_and_measured_again(self):
        self.run_claim()
        self.measured()
        with open(self.csv) as file:
            text = file.read()
        with open(self.csv, "w") as file:
            file.write(text[:-3])
        good, out = self.run_claim()
        self.assertTrue(good)
        self.assertIn("cut short", out)
        self.assertEqual(self.measured(), ["4"])
        lines = text.split("\n")
        with open(self.csv, "w") as file:
            file.write("\n".join(lines[:-2] + ["a,1"]) + "\n")
        self.assertIn("2 fields, expected 4", self.run_claim()[1])
        self.assertEqual(self.measured(), ["4"])

    def test_other_sources_are_set_aside_and_a_stale_file_is_named(self):
        self.run_claim()
        self.measured()
        self.edit("base/count.cc", "int count() { return 2; }\n")
        word, why = self.verdict()
        self.assertEqual(word, "agrees with arithmetic")
        self.assertEqual(why, "stale: measured at commit abc, base has changed since")
        good, out = self.run_claim()
        self.assertTrue(good)
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        aside = os.path.join(self.dir, "build", "experiments", "set-aside")
        self.assertEqual(len(os.listdir(aside)), 1)
        self.assertIn("base has changed", out)
        with open(self.csv, "w") as file:
            file.write("x,y\n1,2\n")  # a file that run.py did not write is kept, too
        self.assertIn("expected a CSV that run.py wrote", self.run_claim()[1])
        self.assertEqual(len(os.listdir(aside)), 2)

    def test_only_what_the_experiment_depends_on_makes_it_stale(self):
        self.run_claim()
        for path in ("experiments/other.cc", "model/form.h", "base/count_cuda.cu", "base/unused.cc"):
            self.edit(path, "int other;\n")
        self.edit("model/shape.h", "// A shape.\n\n/* of\n   sides */ int\n    sides ( ) ;  // how many\n")
        self.assertEqual(self.verdict(), ("agrees with arithmetic", ""))
        for path in ("experiments/toy.cc", "experiments/models/one/config.json", "model/shape.h",
                     "model/shape_many.cc", "base/count.h", "base/count.cc"):
            self.edit(path, SOURCES[path] + "int more;\n")
            room = path.split("/")[0]
            self.assertIn(f"commit abc, {room} has changed since", self.verdict()[1])
            self.edit(path, SOURCES[path])
        self.edit("model/shape_many.cc", "int many;\n")
        self.assertIn("base, model, experiments have changed since", self.verdict()[1])
        with open(self.csv) as file:
            text = file.read()
        with open(self.csv, "w") as file:
            file.write(re.sub("# sources: .*", "# sources: 0123456789ab", text))  # older files have one hash for all sources
        self.assertIn("commit abc, sources have changed since", self.verdict()[1])

    def test_files_renamed_merged_and_split_within_their_room_make_nothing_stale(self):
        self.edit("model/shape_many.cc", SOURCES["model/shape_many.cc"] + "int sides() { return 4; }\nint twice(int);\n")
        self.run_claim()
        fresh = ("agrees with arithmetic", "")
        self.edit("base/README.md", "# Numbers\n")
        self.rename("model/shape_many.cc", "model/shape_few.cc")
        self.rename("base/count.cc", "base/count_slowly.cc")
        self.assertEqual(self.verdict(), fresh)
        self.rename("experiments/toy.cc", "experiments/toys.cc")
        self.assertEqual(self.verdict(), fresh)
        self.rename("model/shape.h", "model/plane/shape.h")  # files that include it name the new path
        self.rename("model/shape_few.cc", "model/plane/shape.cc")
        self.edit("experiments/toys.cc", SOURCES["experiments/toy.cc"].replace("model/shape.h", "model/plane/shape.h"))
        self.assertEqual(self.verdict(), fresh)
        self.edit("model/plane/shape_sides.cc", '#include "model/plane/shape.h"\nstruct Side;\nint sides() { return 4; }\n')
        self.edit("model/plane/shape.cc", "int twice(int);\n" + SOURCES["model/shape_many.cc"])
        self.assertEqual(self.verdict(), fresh)
        self.edit("model/plane/shape_sides.cc", "int sides() { return 5; }\n")
        self.assertIn("commit abc, model has changed since", self.verdict()[1])
        self.edit("model/plane/shape_sides.cc", "int sides() { return 4; }\n")
        self.assertEqual(self.verdict(), fresh)
        self.rename("model/plane/shape_sides.cc", "base/shape_sides.cc")  # no declaration there uses its names
        self.assertIn("commit abc, model has changed since", self.verdict()[1])

    def test_a_path_in_a_comment_is_no_source_and_a_model_counts_by_its_path(self):
        self.run_claim()
        self.edit("base/count.cc", SOURCES["base/count.cc"] + '// As "model/form.h" says.\n')
        self.assertEqual(self.verdict(), ("agrees with arithmetic", ""))
        self.rename("experiments/models/one/config.json", "experiments/models/one/other.json")
        self.assertIn("commit abc, experiments has changed since", self.verdict()[1])

    def test_a_bundle_without_sources_has_their_hashes(self):
        self.run_claim()
        stamp = Table.load(self.csv).stamp["sources"]
        for room in ("model", "base"):
            shutil.rmtree(os.path.join(self.dir, room))
        self.edit("experiments/sources.json", json.dumps({"toy.csv": stamp}))
        self.assertEqual(self.verdict(), ("agrees with arithmetic", ""))

    def test_a_missing_column_a_missing_file_and_a_missing_card_get_a_word(self):
        self.assertEqual(self.verdict()[0], "not run")
        self.assertIn("no toy.csv", self.verdict()[1])
        self.run_claim()
        self.claim.expect = [Expect("z", lambda t: t("z", x=2), 0, 1)]
        _, found = run.verdict(self.runner(), self.claim)
        self.assertEqual(found[0][1].verdict, "not run")
        self.assertIn("no column 'z'; it has point,repeat,x,y", found[0][1].trouble)
        self.claim.expect = [Expect("y", lambda t: t("y"), 0, 1)]
        self.assertIn("3 points with", run.verdict(self.runner(), self.claim)[1][0][1].trouble)
        self.claim.device = "cuda"
        self.assertEqual(self.verdict(), ("not run", "no CUDA device"))
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("not run: no CUDA device", out)

    def test_hosts_of_namespaces_without_root_are_said_to_be_missing(self):
        self.claim.netns = True
        with unittest.mock.patch("os.geteuid", return_value=1000):
            good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("not run: it needs root, iproute2 and etcd", out)
        self.assertEqual(self.measured(), [])

    def test_without_an_rdma_device_it_is_left_out_by_name(self):
        self.claim.rdma = True
        with unittest.mock.patch("glob.glob", return_value=[]):
            good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("toy (cpu): not run: it needs an RDMA device: `make check STAGE=rdma`", out)
        self.assertEqual(self.measured(), [])

    def test_what_differs_for_no_reason_given_fails_the_check(self):
        self.run_claim()
        check = lambda: self.quietly(run.check, self.runner(), [self.claim])  # noqa: E731
        self.assertTrue(check()[0])
        self.claim.expect[0].high = 19.5
        good, out = check()
        self.assertFalse(good)
        self.assertIn("differs from arithmetic", out)
        self.claim.expect[0].high = 21
        self.claim.expect[0].paper = printed("30 s", 30)
        self.assertFalse(check()[0])
        self.claim.expect[0].differs = "a toy"
        good, out = check()
        self.assertTrue(good)
        self.assertIn("differs from the paper; agrees with arithmetic", out)

    def test_what_is_stale_or_missing_is_named_with_its_minutes(self):
        self.assertIn("to be measured, because they are stale or missing: toy (never run): 0 minutes",
                      self.quietly(run.check, self.runner(), [self.claim])[1])
        self.run_claim()
        with open(self.csv) as file:
            text = file.read()
        with open(self.csv, "w") as file:
            file.write(re.sub("# seconds: .*", "# seconds: 420", text))
        self.assertIn("the last runs of these claims took 7 minutes; to be measured, because they are stale or missing: nothing",
                      self.quietly(run.check, self.runner(), [self.claim])[1])
        self.edit("base/count.cc", "int count() { return 2; }\n")
        self.assertIn("toy (7.0 minutes): 7 minutes", self.quietly(run.check, self.runner(), [self.claim])[1])

    def test_instructions_are_counted_of_one_process_a_point(self):
        tools = os.path.join(self.dir, "tools")
        os.makedirs(tools)
        with open(os.path.join(tools, "valgrind"), "w") as file:  # imitates callgrind's options, and its file at the end
            file.write(textwrap.dedent(f"""\
                #!{sys.executable}
                import subprocess, sys
                out = next(w.split("=")[1] for w in sys.argv if w.startswith("--callgrind-out-file="))
                line = sys.stdin.readline()
                done = subprocess.run(sys.argv[4:], input=line, capture_output=True, text=True)
                print(done.stdout, end="", flush=True)
                assert sys.stdin.readline() == ""
                open(out, "w").write("events: Ir\\ntotals: %d\\n" % (1000 + len(line)))
                """))
        os.chmod(os.path.join(tools, "valgrind"), 0o755)
        path, os.environ["PATH"] = os.environ["PATH"], tools + os.pathsep + os.environ["PATH"]
        try:
            self.claim.callgrind, self.claim.repeats = True, 1
            self.assertTrue(self.run_claim()[0])
        finally:
            os.environ["PATH"] = path
        self.assertEqual({row["instructions"] for row in Table.load(self.csv).rows}, {str(1000 + len('{"x": 1}\n'))})

    def test_the_table_is_what_was_written(self):
        self.run_claim()
        table = Table.load(self.csv)
        self.assertEqual(table.stamp["peaks"], '{"read_gbps": 1}')
        self.assertEqual(table("y", x=4), 40)
        self.assertEqual(table.curve("x", "y"), [(1, 10, 10, 10), (2, 20, 20, 20), (4, 40, 40, 40)])
        with self.assertRaises(TableError):
            table.add("h", 0, [{"x": 1, "other": 2}])


class SourceTokensTest(unittest.TestCase):
    def test_comments_and_layout_are_nothing_and_all_else_is(self):
        text = b"""#define TWICE(x) \\
            (2 * (x))  // of it
        auto s = "// no comment", r = R"(/* nor "this" */)"; char c = '"'; int n = 1'000 + 0x1F;"""
        same = b"""#define TWICE(x) (2 * (x))
/* here */ auto s = "// no comment",
  r = R"(/* nor "this" */)"; char c = '"';
  int n = 1'000+0x1F;"""
        self.assertEqual(tokens(text), tokens(same))
        for old, new in ((b"2 *", b"3 *"), (b"no comment", b"a comment"), (b"nor", b"not"), (b"1'000", b"1'001"),
                         (b"(x))", b"(y))"), (b"\\\n", b"\n"), (b"0x1F", b"0x1E")):
            self.assertIn(old, text)
            self.assertNotEqual(tokens(text), tokens(text.replace(old, new, 1)), new)

    def test_a_literal_that_the_line_parts_is_one(self):
        self.assertEqual(tokens(b'say("one and "\n    /* then */ "two\\n");'), tokens(b'say("one and two\\n");'))
        self.assertNotEqual(tokens(b'say("a", "b");'), tokens(b'say("ab");'))


# One of each kind of declaration: namespaces, a macro without semicolon, conditions, a type, a table, initialisers, a try block.
CODE = b"""#pragma once
#include <vector>
#include "base/count.h"
struct Later;
EMBED(here, "there")
namespace one {
namespace {
struct Row { const char* name; int (*f)(); };
#define FEW 3
#ifdef FAST
int pace() { return 1; }
#else
int pace() { return 2; }
#endif
}  // namespace
const Row kRows[] = {{"first", pace}, {"second", nullptr}};
Class::Class(int n) : a_{n}, b_{0} { open(n); close(); }
[[nodiscard]] bool sound() try { return true; } catch (int) { return false; }
}  // namespace one
"""


class DeclarationsTest(unittest.TestCase):
    def seen(self, text):
        return declarations(tokens(text))

    def test_they_are_parted_where_a_declaration_ends(self):
        begins = sorted(b" ".join(part[:2]) for part in self.seen(CODE))
        self.assertEqual(begins, [b"# define FEW 3", b"# ifdef FAST int", b"Class ::", b"EMBED (", b"[ [", b"const Row",
                                  b"struct Row"])

    def test_order_includes_and_forward_declarations_are_nothing(self):
        lines = CODE.split(b"\n")
        pragma, include, quoted, later, embed, outer, inner, row, few = lines[:9]
        rest = lines[9:]
        self.assertEqual(self.seen(CODE), self.seen(b"\n".join([embed, outer, inner, few, row, *rest])))
        self.assertEqual(self.seen(CODE), self.seen(b"\n".join([pragma, include, later, quoted, embed, outer, later, inner,
                                                               row, few, row, *rest])))
        kept, moved = b"\n".join(lines[:-4]), b"\n".join(lines[-4:-2])
        self.assertEqual(self.seen(CODE), self.seen(outer + moved + b"}") | self.seen(kept + b"}"))

    def test_every_token_counts_and_its_place_within_its_declaration(self):
        whole, words = self.seen(CODE), tokens(CODE)
        for i in range(words.index(b"EMBED"), len(words) - 2):  # the end of the file stands for closing braces
            if b"namespace" in words[i - 2:i + 1] or words[i - 1:i + 1] == [b"# endif", b"}"]:
                continue  # the beginning and end of a namespace do not count
            self.assertNotEqual(declarations([*words[:i], b"other", *words[i + 1:]]), whole, words[i - 3:i + 3])
            self.assertNotEqual(declarations(words[:i] + words[i + 1:]), whole, (i, words[i - 3:i + 3]))
        for old, new in ((b"open(n); close();", b"close(); open(n);"), (b"return 1", b"return 2"), (b"#else", b"#endif"),
                         (b"#ifdef", b"#ifndef"), (b"a_{n}, b_{0}", b"b_{0}, a_{n}"),
                         (b'{"first", pace}, {"second", nullptr}', b'{"second", nullptr}, {"first", pace}')):
            self.assertIn(old, CODE)
            self.assertNotEqual(self.seen(CODE.replace(old, new)), whole, new)

    def test_what_clang_format_makes_of_the_rooms_is_the_same(self):
        if not shutil.which("clang-format"):
            self.skipTest("no clang-format")
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        files = [f for room in ("allocator", "attention", "disagg") for suffix in ("cc", "h", "cu")
                 for f in glob.glob(os.path.join(root, room, "**", "*." + suffix), recursive=True)]
        with tempfile.TemporaryDirectory() as folder:
            copies = [shutil.copy(file, os.path.join(folder, str(i) + os.path.splitext(file)[1]))
                      for i, file in enumerate(files)]
            style = "{BasedOnStyle: LLVM, ColumnLimit: 72, AccessModifierOffset: 0}"
            subprocess.run(["clang-format", "-i", "--style", style, *copies], check=True)
            differ = 0
            for file, copy in zip(files, copies):
                with open(file, "rb") as old, open(copy, "rb") as new:
                    before, after = old.read(), new.read()
                differ += before != after
                self.assertEqual(self.seen(before), self.seen(after), file)
        self.assertGreater(differ, 100)


class NamesTest(unittest.TestCase):
    """Stamps of a real experiment. Renaming something everywhere keeps the stamp; calling something else changes it."""

    def setUp(self):
        self.root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self.stamp = Sources(self.root, "cpu").stamp("waste")

    def edited(self, edit, file=None):
        sources = Sources(self.root, "cpu")
        files = [file] if file else [f for f in sources.texts if sources._is_code(f)]
        before = [sources.text(f) for f in files]
        for f in files:
            sources.texts[f] = edit(sources.text(f))
        self.assertNotEqual(before, [sources.text(f) for f in files])
        sources.spaces |= {b"otherwise"}
        return sources.stamp("waste")

    def test_a_name_that_is_another_everywhere_makes_nothing_stale(self):
        for name in (b"KvMemory", b"BlockPool", b"check_invariants", b"find_admission_rule", b"EngineOptions", b"max_batch_"):
            self.assertEqual(self.edited(lambda text: re.sub(rb"\b%s\b(?!\.h)" % name, b"Qq" + name, text)), self.stamp, name)

    def test_a_namespace_more_or_by_another_name_makes_nothing_stale(self):
        def move(text):
            return re.sub(rb"\bxpyd::", b"otherwise::", re.sub(rb"\bnamespace xpyd\b", b"namespace otherwise", text))
        self.assertEqual(self.edited(move), self.stamp)
        self.assertEqual(self.edited(lambda text: text.replace(b"namespace xpyd::batch {", b"namespace xpyd::otherwise {"),
                                     "batch/engine/engine.cc"), self.stamp)

    def test_a_variable_by_another_name_in_one_function_makes_nothing_stale(self):
        def rename(text):
            begin = text.index(b"SequencePtr Scheduler::remove(")
            return text[:begin] + text[begin:].replace(b"&s]", b"&it]", 1).replace(b"== &s;", b"== &it;", 1).replace(
                b"const Sequence& s)", b"const Sequence& it)", 1)
        self.assertEqual(self.edited(rename, "batch/engine/scheduler.cc"), self.stamp)

    def test_another_call_another_argument_and_another_literal_are_seen(self):
        for old, new in ((b"std::max", b"std::min"), (b"views_.waiting", b"views_.running"), (b"+ 1)", b"+ 2)"),
                         (b"waiting_with_kv() + head_waits", b"make_room() + head_waits"), (b"push_back", b"emplace_back"),
                         (b"Model& model, KvMemory& memory", b"KvMemory& memory, Model& model"), (b"release(s);", b"reserve(s);")):
            file = "batch/engine/engine.cc" if b"Model& model" in old else "batch/engine/scheduler.cc"
            self.assertNotEqual(self.edited(lambda text: text.replace(old, new, 1), file), self.stamp, old)


class EvidenceTest(unittest.TestCase):
    def test_a_range_of_our_own_that_leaves_the_paper_out_is_no_agreement_with_it(self):
        # vAttention's prefill: 0.95 in a range of 0.95 to 1.08 used to count as "reproduced"; the paper has 1.24 to 1.36.
        found = decide([.951, .932, .977, .95, .95, .96], .92, 1.08, printed("1.24 to 1.36", 1.24, 1.36))
        self.assertEqual((found.verdict, found.arithmetic), ("differs from the paper", "agrees"))
        self.assertEqual(decide([1.3] * 6, .92, 1.08, printed("1.24 to 1.36", 1.24, 1.36)).words(),
                         "agrees with the paper; differs from arithmetic")

    def test_a_range_narrower_than_the_spread_is_undecided_however_near_the_middle_is(self):
        found = decide([.86, .89, .98, 1.0, 1.02, 1.1, 1.14], .95, 1.05, None)
        self.assertLess(abs(found.middle - 1), .01)
        self.assertEqual(found.verdict, "undecided")
        self.assertEqual(decide([.894, .932, 1.0], .95, 1.05, None).verdict, "undecided")
        self.assertEqual(decide([.99, 1.0, 1.01], .95, 1.05, None).verdict, "agrees with arithmetic")

    def test_an_effect_of_a_twentieth_is_not_reproduced_by_none(self):
        self.assertEqual(decide([1.0], 0, 2, printed("1.05", 1.05)).verdict, "differs from the paper")
        self.assertEqual(decide([1.04], 0, 2, printed("1.05", 1.05)).verdict, "agrees with the paper")
        self.assertEqual(decide([.99], 0, 2, printed("equal", .95, 1.05)).verdict, "agrees with the paper")
        self.assertEqual(decide([.97], 0, 1, printed("96.3 %", .963)).verdict, "agrees with the paper")
        self.assertEqual(decide([.99], 0, 1, printed("96.3 %", .963)).verdict, "differs from the paper")
        self.assertFalse(printed("much worse").comparable())

    def test_of_few_samples_the_whole_range_counts(self):
        self.assertEqual(interval([3, 1, 2]), (1, 3))
        self.assertEqual(interval([2, 2, 2]), (2, 2))

    def test_the_interval_holds_the_median_as_often_as_it_says(self):
        dice = random.Random(7)
        for n in (6, 12, 36):
            held = 0
            for _ in range(100):
                low, high = interval([dice.expovariate(1) for _ in range(n)])
                held += low <= .6931 <= high
            self.assertGreater(held, 87, f"of 100, with {n} samples")

    def test_questions_of_which_none_turned_are_no_interval_of_nothing(self):
        # With f32 and int4 KV, 160 of 160 right answers used to count as the interval (0, 0).
        one = lost(0, 0, 160)
        self.assertEqual(one.middle, 0)
        self.assertAlmostEqual(one.high, 3.8415 / 163.8415, 4)
        self.assertAlmostEqual(one.low, -one.high, 9)
        self.assertEqual(decide([one], -.01, .01, None).verdict, "undecided")
        self.assertEqual(decide([one], -.03, .03, None).n, 160)
        self.assertAlmostEqual(share(160, 160).low, .9766, 4)
        self.assertAlmostEqual(lost(9, 4, 100).low, -lost(4, 9, 100).high, 9)

    def test_the_interval_of_paired_answers_holds_the_difference_as_often_as_it_says(self):
        dice = random.Random(3)
        for lose, win, n in ((.08, .05, 120), (.02, .0, 360), (.3, .1, 40)):
            held = 0
            for _ in range(300):
                draws = [dice.random() for _ in range(n)]
                one = lost(sum(x < lose for x in draws), sum(lose <= x < lose + win for x in draws), n)
                held += one.low <= lose - win <= one.high
            self.assertGreater(held, 276, f"of 300: {lose}, {win}, {n}")

    def test_inside_outside_across(self):
        self.assertEqual(against(1, 2, 1, 2), "agrees")
        self.assertEqual(against(1, 2, 2.1, 3), "differs")
        self.assertEqual(against(1, 2, 1.5, 3), "undecided")
        self.assertEqual(against(0, 4, 1, 3), "undecided")  # the range lies inside the spread

    def test_a_p99_of_twenty_requests_is_refused(self):
        table = Table("pd.csv", {})
        table.columns = ["point", "repeat", "generated_tokens", "p99_itl_ms"]
        table.rows = [{"point": "a", "repeat": "0", "generated_tokens": "1257", "p99_itl_ms": "9.6"}]
        with self.assertRaisesRegex(TableError, "a P99 of 1257 gaps is none"):
            gap99(table)
        table.rows[0]["generated_tokens"] = "2100"
        self.assertEqual(gap99(table), 9.6)
        table.rows[0]["p99_itl_ms"] = ""  # experiments leave it empty if they have too few gaps
        with self.assertRaisesRegex(TableError, "too few samples"):
            gap99(table)

    def test_no_experiment_takes_a_percentile_past_the_guard(self):
        # Results used to contain percentiles of 20 requests, of 9 turns and of 5 rounds.
        here = os.path.dirname(os.path.abspath(__file__))
        past = re.compile(r"(?<!_)\bpercentile\(|(\.|->)(median|p9\d)\b|nth_element")
        for path in glob.glob(os.path.join(here, "*.cc")) + glob.glob(os.path.join(here, "*.h")) + glob.glob(
                os.path.join(here, "cuda", "*.cu")):
            with open(path) as file:
                code = re.sub(r"//.*", "", file.read())
            # values.cc defines percentile_seen(), which calls what stats.h and stats.cc define.
            if os.path.basename(path) not in ("values.cc", "stats.cc", "stats.h"):
                self.assertNotRegex(code, past, f"{path}: percentile_seen() of values.h refuses too few samples")

    def test_samples_are_repetitions_and_what_each_holds_of_its_own(self):
        table = Table("t.csv", {})
        table.columns = ["point", "repeat", "sample", "way", "ms"]
        # First parts of one point, then draws that are points of their own.
        for rows in ([("a", "0", "0", "x", "1"), ("a", "0", "1", "x", "2"), ("a", "1", "0", "x", "3")],
                     [("a", "0", "0", "x", "1"), ("b", "0", "1", "x", "2"), ("c", "0", "2", "x", "3")]):
            table.rows = [dict(zip(table.columns, row)) for row in rows]
            self.assertEqual([part("ms", way="x") for part in table.samples()], [1, 2, 3])
            self.assertEqual(table("ms", way="x"), 2)
        table.rows.append(dict(zip(table.columns, ("d", "0", "0", "x", "9"))))
        with self.assertRaisesRegex(TableError, "2 points with way=x"):
            table("ms", way="x")


class ClaimsTest(unittest.TestCase):
    def test_every_claim_has_its_source_a_range_and_how_it_is_known(self):
        here = os.path.dirname(os.path.abspath(__file__))
        registered = set()
        for path in glob.glob(os.path.join(here, "*.cc")) + glob.glob(os.path.join(here, "cuda", "*.cu")):
            with open(path) as file:
                registered |= set(re.findall(r'^REGISTER_EXPERIMENT\("([\w/]+)"', file.read(), re.M))
        for claim in CLAIMS:
            self.assertIn(claim.name, registered)
            self.assertTrue(claim.question and claim.source and claim.expect)
            self.assertEqual(len({e.label for e in claim.expect}), len(claim.expect))
            for e in claim.expect:
                self.assertLessEqual(e.low, e.high)
                self.assertIn(claim.how_of(e), HOW)
                if e.paper:
                    self.assertIn(e.paper.read, READ)
                # A changed range says when and why it was changed.
                self.assertEqual(bool(e.amended), bool(e.reason), e.label)
                self.assertTrue(not e.was or e.amended, e.label)
                self.assertRegex(e.amended, r"^(2\d{3}-\d\d-\d\d)?$")
        self.assertEqual(len({c.file for c in CLAIMS}), len(CLAIMS))
        self.assertEqual(registered, {c.name for c in CLAIMS})

    def test_a_range_that_is_another_than_at_the_last_run_says_when_and_why(self):
        claim = Claim("toy", "?", "nowhere", [Expect("y", None, 1, 2)])
        old = run.ranges_of([claim])
        self.assertEqual(run.unamended(old, [claim]), [])
        e = claim.expect[0]
        e.high = 3
        self.assertEqual(run.unamended(old, [claim]), ["toy: y: it was 1 to 2: `amended`, `was` and `reason` must record the change"])
        e.amended, e.reason = "2026-11-23", "the first forgot the queue"
        self.assertEqual(len(run.unamended(old, [claim])), 1)  # it must also say from what
        e.was = (1, 2)
        self.assertEqual(run.unamended(old, [claim]), [])
        later = run.ranges_of([claim])
        e.amended = e.reason = ""
        self.assertEqual(len(run.unamended(later, [claim])), 1)  # an amendment must not be removed
        e.high, e.amended, e.reason = 4, "2026-11-22", "before it"
        self.assertEqual(len(run.unamended(later, [claim])), 1)
        new = Claim("toy", "?", "nowhere", [Expect("z", None, 1, 2)])
        self.assertEqual(len(run.unamended(old, [new])), 1)
        new.name = "other"
        self.assertEqual(run.unamended(old, [new]), [])

    def test_a_figure_says_of_each_published_point_how_it_is_known(self):
        # Legends used to say "paper" where nobody here had read the paper.
        figures = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "paper_figures")
        for path in glob.glob(os.path.join(figures, "*.py")):
            with open(path) as file:
                text = file.read()
            self.assertEqual(re.findall(r'.*"paper: .*', text), [], path)
            for call in re.findall(r"style\.paper\(.*", text):
                self.assertIn("known(", call, path)
            for experiment, label in re.findall(r'''known\(["']([\w/]+)["'], ["']([^"']+)["']\)''', text):
                known(experiment, label)
        self.assertEqual(known("waste", "useful, slots"), ", from memory")
        self.assertEqual(known("fetch_or_compute/break_even", "8 x A800, 8,192 tokens, their constants"), "")
        with self.assertRaises(KeyError):
            known("waste", "useful, vAttention")

    def test_all_of_them_take_less_than_82_minutes(self):
        # Minutes come from the stamps of the last runs, because estimates were wrong: 59.9 where 44.5 were measured.
        results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
        known = {c.name: run.minutes(results, c) for c in CLAIMS if c.device == "cpu" and not c.rdma}
        self.assertNotIn(None, known.values())
        self.assertLess(sum(known.values()), 82)

    def test_whatever_differs_in_the_results_here_has_its_reason(self):
        class Options:
            results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
        for claim, _, found in run.results(run.Runner(Options)):
            for e, one in found:
                self.assertFalse(run.unexplained(e, one), f"{claim.name}: {e.label}: {run.seen(e, one)}")

    def test_profiles_of_copies_are_an_event_log(self):
        table = Table.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "offload_cost-trace.csv"))
        first, *lines = map(json.loads, run.span_log(table).split("\n"))
        self.assertEqual(first["xpyd_event_log"], 1)
        rows = [row for row in table.rows if row["repeat"] == "0" and row["round"] == "0"]
        self.assertEqual(len(lines), len(rows))
        for line, row in zip(lines, rows):
            self.assertEqual(line["e"], "step" if row["what"] == "step" else "transfer")
            self.assertEqual(row["part"], line.get("instance") or line["to" if row["what"] == "in" else "from"])
            self.assertAlmostEqual(1e3 * (line["t"] + line["seconds"]), float(row["end_ms"]))
            self.assertEqual(line["tokens"], int(row["tokens"]))
        self.assertEqual({line["from"] for line in lines if "from" in line} | {line["to"] for line in lines if "to" in line},
                         {"computed", "swapped in", "host"})

    def test_readme_is_up_to_date(self):
        class Options:
            results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
        runner = run.Runner(Options)
        self.assertTrue(run.readme(runner, only_check=True), "run `experiments/run.py readme`")


class TablesTest(unittest.TestCase):
    """The list of the tables and figures that the notes and papers print."""
    KEYS = {f"{c.anchor}: {e.label}": e for c in CLAIMS for e in c.expect}

    def test_a_published_figure_belongs_to_one_row_and_no_claim_to_two(self):
        self.assertGreater(sum(bool(e.paper) for e in self.KEYS.values()), 200)
        for key, e in self.KEYS.items():
            self.assertNotRegex(key, r"[*?\[]")  # characters with another meaning in a row's patterns
            n = len(tables.rows_of(key))
            self.assertIn(n, (1,) if e.paper else (0, 1), f"{key}: rows {[row.name for row in tables.rows_of(key)]}")

    def test_a_row_names_claims_that_exist_or_a_command_or_says_what_is_missing(self):
        self.assertGreater(len(tables.ROWS), 100)
        self.assertEqual(len({(row.of, row.name) for row in tables.ROWS}), len(tables.ROWS))
        for row in tables.ROWS:
            for pattern in row.claims:
                self.assertTrue(any(tables.Row("", "", "", (pattern,)).has(key) for key in self.KEYS), f"{row.of}, {row.name}: {pattern}")
            self.assertTrue(row.of and row.name and row.shows)
            self.assertFalse(row.claims and row.command, row.name)
            self.assertTrue(row.claims or row.command or row.lacks, f"{row.of}, {row.name}: neither rebuilt nor said why not")
            self.assertFalse(row.card and (row.claims or row.command), f"{row.of}, {row.name}: claims say themselves what they need")
            self.assertRegex(row.command, r"^(xpyd \w.*)?$")

    def found(self, *verdicts):
        """Claims a: 0, a: 1, ... from tuples (low, high, paper, how, device)."""
        all_ = {}
        for number, (low, high, paper, how, device) in enumerate(verdicts):
            claim = Claim("a", "?", "nowhere", [], device=device, how=how)
            e = Expect(str(number), None, 0, 9, paper=paper, differs=f"reason {number}")
            one = decide([low, high], 0, 9, paper) if low is not None else Evidence("not run")
            all_[f"a: {number}"] = (claim, e, one)
        return all_

    def test_a_state_follows_from_what_was_found(self):
        one, row = printed("1 to 2", 1, 2), tables.Row("a paper", "Table 1", "?", ("a: *",))
        agrees, differs, across = (1, 2, one, "virtual", "cpu"), (3, 4, one, "virtual", "cpu"), (1, 4, one, "measured", "cpu")
        ours, missing, card = (1, 4, None, "virtual", "cpu"), (None, None, one, "measured", "cpu"), (None, None, one, "measured", "cuda")
        state = lambda *verdicts: tables.state(row, self.found(*verdicts))  # noqa: E731
        self.assertEqual(state(agrees, ours), ("agrees", "virtual, 1 of 1 figures agree"))
        self.assertEqual(state(agrees, differs, across), ("differs", "measured, virtual, 1 of 3 figures agree. reason 1"))
        self.assertEqual(state(agrees, across)[0], "undecided")
        self.assertEqual(state(ours), ("virtual", ""))
        self.assertEqual(state(ours, (1, 4, None, "measured", "cpu")), ("measured", ""))
        self.assertEqual(state(agrees, card), ("agrees", "virtual, 1 of 1 figures agree. not run, for want of a card: 1"))
        self.assertEqual(state(agrees, missing)[1], "virtual, 1 of 1 figures agree. not run: 1")
        self.assertEqual(state(card)[0], "needs a card")
        self.assertEqual(state(card, missing)[0], "not run")
        row.lacks = "half of it"
        self.assertEqual(state(agrees)[1], "virtual, 1 of 1 figures agree. lacks half of it")
        row.claims = ()
        self.assertEqual(state(agrees), ("absent", "lacks half of it"))
        row.card = True
        self.assertEqual(state(agrees)[0], "needs a card")
        row.command = "xpyd info"
        self.assertEqual(state()[0], "printed")

    def test_of_all_claims_the_check_ends_with_the_list(self):
        rows = [tables.Row("a paper", "Table 1", "ys", ("toy-cuda: y*",)), tables.Row("a paper", "Fig. 2", "zs", lacks="a z")]
        claim = Claim("toy", "?", "nowhere", [Expect("y", lambda t: t("y"), 0, 9, paper=printed("7", 7))], device="cuda")

        class OnlyAFile:
            class options:
                results = ""
            path, missing = lambda self, claim: "/nowhere", lambda self, claim: "no CUDA device"
        for all_, ends in (([claim], ["    needs a card Table 1: ys (toy-cuda)", "    absent       Fig. 2: zs. lacks a z",
                                      "2 tables and figures: 1 needs a card, 1 absent; 0 of those that are here lack something", ""]),
                           ([claim, claim], ["to be measured, because they are stale or missing: nothing", ""])):
            out = io.StringIO()
            with unittest.mock.patch.object(tables, "ROWS", rows), unittest.mock.patch.object(run, "CLAIMS", all_), \
                    contextlib.redirect_stdout(out):
                run.check(OnlyAFile(), [claim])
            self.assertTrue(out.getvalue().endswith("\n".join(ends)), out.getvalue())


class CompiledTest(unittest.TestCase):
    def test_what_the_cuda_compiler_said_has_a_head_as_results_do(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "one.ptxas"), "w") as file:
                file.write("Compiling entry function 'f' for 'sm_80'\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
                           "Used 8 registers\n")
            text = subprocess.run([os.path.join(root, "tools", "kernel-registers"), folder], capture_output=True, text=True,
                                  check=True).stdout
        head = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("# "))
        self.assertEqual(list(head), ["experiment", "device", "sources", "commit", "compiler", "begun"])
        self.assertRegex(head["sources"], r"^base=\w{8} .*attention=\w{8} ")
        self.assertIn("\nsource,architecture,kernel,", text)


class Objects:
    """The objects of a build as the linker and the compiler saw them. They show which source really needs which."""

    def __init__(self, build, root, folders):
        self.root = root
        self.object = {}  # source -> object; if two folders have one, that of the later folder
        for folder in folders:
            for room in ROOMS:
                for path in glob.glob(os.path.join(build, folder, room, "**", "*.o"), recursive=True):
                    for suffix in (".cc", ".cu"):
                        source = os.path.relpath(path, os.path.join(build, folder))[:-2] + suffix
                        if os.path.exists(os.path.join(root, source)) and source.split("/")[1] not in APART:
                            self.object[source] = path
        self.needs, self.defines, inline = {}, {}, {}
        source_of = {path: source for source, path in self.object.items()}
        listing = subprocess.run(["nm", "-A", *source_of], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            path, _, rest = line.partition(":")
            kind, symbol = rest.split()[-2:]
            if kind in "Uwv":
                self.needs.setdefault(source_of[path], []).append(symbol)
            elif kind in "TDBRS":
                self.defines[symbol] = source_of[path]
            elif kind in "WVu":
                inline.setdefault(symbol, []).append(source_of[path])
        for symbol, sources in inline.items():
            # One of our templates that is instantiated in one place. Those of the standard library are in its shared object, too.
            if len(sources) == 1 and "4xpyd" in symbol:
                self.defines.setdefault(symbol, sources[0])

    def reachable(self, roots):
        """The sources whose objects the linker takes for `roots`, and every header that they include."""
        seen, left = set(roots), list(roots)
        while left:
            for symbol in self.needs.get(left.pop(), []):
                source = self.defines.get(symbol)
                if source and source not in seen:
                    seen.add(source)
                    left.append(source)
        headers = set()
        for source in seen:
            with open(self.object[source][:-2] + ".d") as file:
                headers |= {word.rstrip(":") for word in file.read().split()}
        return seen | {h for h in headers if h.split("/")[0] in ROOMS and h.endswith(".h")} - {"base/precompiled.h"}


class SourcesTest(unittest.TestCase):
    """Two of the tests need a build, that of $XPYD_BIN, which `make test` sets."""

    def test_every_file_that_implemented_names_is_there(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        named = {file for header, files in IMPLEMENTED.items() for file in [header, *files]}
        self.assertEqual({file for file in named if not os.path.exists(os.path.join(root, file))}, set())

    def test_a_command_that_prints_a_table_has_the_options_that_it_names(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        program = os.path.join(root, os.environ.get("XPYD_BIN", "") or "none")
        if not os.path.exists(program):
            self.skipTest("no xpyd: `make test` builds it")
        for words in [row.command.split() for row in tables.ROWS if row.command]:
            said = subprocess.run([program, "help", words[1]], capture_output=True, text=True, check=True).stdout
            for option in [word for word in words if word.startswith("--")]:
                self.assertRegex(said, rf"(?m)^  {option}\b", words)

    def test_the_linker_takes_no_object_that_the_sources_do_not_name(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        build = os.path.join(root, os.path.dirname(os.environ.get("XPYD_BIN", "")))
        if not glob.glob(os.path.join(build, "experiments", "*.o")) or not shutil.which("nm"):
            self.skipTest("no objects: `make test` builds them")
        engine = [os.path.join(folder, "batch/engine/engine" + suffix) for folder, suffix in ((build, ".o"), (root, ".cc"))]
        if not os.path.exists(engine[0]) or os.path.getmtime(engine[0]) < os.path.getmtime(engine[1]):
            self.skipTest("several files are one object: `make UNITS= test` builds one of each")
        for device, folders in (("cpu", [""]), ("cuda", ["", "simt", "cuda"])):
            objects, sources = Objects(build, root, folders), Sources(root, device)
            checked = 0
            for claim in CLAIMS:
                if claim.device != device:
                    continue
                roots = sources.registered_in(claim.name)
                started = [file for r in roots for file in IMPLEMENTED.get(r, [])]
                roots = [file for file in roots + started if file in objects.object]
                checked += len(roots) > 0
                lacking = objects.reachable(roots) - set(sources.files_of(claim.name))
                self.assertEqual(lacking, set(), f"{claim.name} ({device}): sources.py, IMPLEMENTED, must name them")
            self.assertGreater(checked, 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
