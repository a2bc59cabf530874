#!/usr/bin/env python3
"""Tests of the runner, the result files and the claims, against a program that only pretends to measure."""
import contextlib
import glob
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import run  # noqa: E402
from claims import CLAIMS, Claim, Expect  # noqa: E402
from sources import APART, IMPLEMENTED, ROOMS, Sources  # noqa: E402
from table import Table, TableError  # noqa: E402

# Two points; FAKE_WRONG names an x whose result is wrong, FAKE_DIE one at which it dies; every call is logged.
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

# What it pretends to be made of: toy.cc, a header and what implements it, a model, and a file of no concern.
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
        self.claim = Claim("toy", "?", "nowhere", 0, [Expect("y at 2", lambda t: t("y", x=2), 19, 21, "s")], repeats=2)
        self.csv = os.path.join(self.dir, "toy.csv")
        self.root, run.ROOT = run.ROOT, self.dir  # its own sources; set-aside files go below it
        for path, text in SOURCES.items():
            self.edit(path, text)

    def edit(self, path, text):
        os.makedirs(os.path.dirname(os.path.join(self.dir, path)), exist_ok=True)
        with open(os.path.join(self.dir, path), "w") as file:
            file.write(text)
        run.sources_below.cache_clear()

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
        """What was measured since the last call."""
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
        return run.verdict(self.runner(**more), self.claim)

    def test_repetitions_interleave_and_a_second_run_measures_nothing(self):
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), [])
        self.assertEqual(self.verdict()[:2], ("reproduced", ""))

    def test_an_interrupted_run_goes_on_where_it_was(self):
        os.environ["FAKE_DIE"] = "4"
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("ended with code 7: out of luck", out)
        self.measured()
        word, why, _ = self.verdict()
        self.assertEqual(word, "not reproduced")
        self.assertIn("out of luck", why)
        del os.environ["FAKE_DIE"]
        self.assertTrue(self.run_claim()[0])
        self.assertEqual(self.measured(), ["4", "4"])
        self.assertEqual(self.verdict()[0], "reproduced")

    def test_a_wrong_result_gives_no_row(self):
        os.environ["FAKE_WRONG"] = "2"
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("wrong result, not timed", out)
        self.assertEqual({row["x"] for row in Table.load(self.csv).rows}, {"1", "4"})
        self.assertNotEqual(self.verdict()[0], "reproduced")

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
        word, why, _ = self.verdict()
        self.assertEqual(word, "reproduced")
        self.assertEqual(why, "stale: measured at commit abc, base has changed since")
        good, out = self.run_claim()
        self.assertTrue(good)
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        aside = os.path.join(self.dir, "build", "experiments", "set-aside")
        self.assertEqual(len(os.listdir(aside)), 1)
        self.assertIn("base has changed", out)
        with open(self.csv, "w") as file:
            file.write("x,y\n1,2\n")  # nobody's file: kept too
        self.assertIn("expected a CSV that run.py wrote", self.run_claim()[1])
        self.assertEqual(len(os.listdir(aside)), 2)

    def test_only_what_the_experiment_depends_on_makes_it_stale(self):
        self.run_claim()
        for path in ("experiments/other.cc", "model/form.h", "base/count_cuda.cu", "base/unused.cc"):
            self.edit(path, "int other;\n")
        self.edit("model/shape.h", "// A shape.\n\n" + SOURCES["model/shape.h"])
        self.assertEqual(self.verdict()[:2], ("reproduced", ""))
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
            file.write(re.sub("# sources: .*", "# sources: 0123456789ab", text))  # one hash of everything, as once
        self.assertIn("commit abc, sources have changed since", self.verdict()[1])

    def test_a_bundle_without_sources_has_their_hashes(self):
        self.run_claim()
        stamp = Table.load(self.csv).stamp["sources"]
        for room in ("model", "base"):
            shutil.rmtree(os.path.join(self.dir, room))
        self.edit("experiments/sources.json", json.dumps({"toy.csv": stamp}))
        self.assertEqual(self.verdict()[:2], ("reproduced", ""))

    def test_a_missing_column_a_missing_file_and_a_missing_card_get_a_word(self):
        self.assertEqual(self.verdict()[0], "not run")
        self.assertIn("no toy.csv", self.verdict()[1])
        self.run_claim()
        self.claim.expect = [Expect("z", lambda t: t("z", x=2), 0, 1)]
        word, why, _ = self.verdict()
        self.assertEqual(word, "not run")
        self.assertIn("no column 'z'; it has point,repeat,x,y", why)
        self.claim.expect = [Expect("y", lambda t: t("y"), 0, 1)]
        self.assertIn("3 points with", self.verdict()[1])
        self.claim.device = "cuda"
        self.assertEqual(self.verdict(), ("not run", "no CUDA device", []))
        good, out = self.run_claim()
        self.assertFalse(good)
        self.assertIn("not run: no CUDA device", out)

    def test_out_of_range_is_not_reproduced_and_says_by_how_much(self):
        self.claim.expect[0].high = 19.5
        self.run_claim()
        word, why, found = self.verdict()
        self.assertEqual(word, "not reproduced")
        self.assertIn("y at 2: 20 s [20 s, 20 s], expected 19 s to 19.5 s", why)
        self.claim.why = "a toy"
        self.assertIn("known: a toy", self.verdict()[1])

    def test_the_table_is_what_was_written(self):
        self.run_claim()
        table = Table.load(self.csv)
        self.assertEqual(table.stamp["peaks"], '{"read_gbps": 1}')
        self.assertEqual(table("y", x=4), 40)
        self.assertEqual(table.curve("x", "y"), [(1, 10, 10, 10), (2, 20, 20, 20), (4, 40, 40, 40)])
        with self.assertRaises(TableError):
            table.add("h", 0, [{"x": 1, "other": 2}])


class ClaimsTest(unittest.TestCase):
    def test_every_claim_has_its_source_and_a_range(self):
        here = os.path.dirname(os.path.abspath(__file__))
        registered = set()
        for path in glob.glob(os.path.join(here, "*.cc")) + glob.glob(os.path.join(here, "cuda", "*.cu")):
            with open(path) as file:
                registered |= set(re.findall(r'^REGISTER_EXPERIMENT\("(\w+)"', file.read(), re.M))
        for claim in CLAIMS:
            self.assertIn(claim.name, registered)
            self.assertTrue(claim.question and claim.source and claim.expect)
            for e in claim.expect:
                self.assertLessEqual(e.low, e.high)
        self.assertEqual(len({c.file for c in CLAIMS}), len(CLAIMS))

    def test_readme_is_up_to_date(self):
        class Options:
            results = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
        runner = run.Runner(Options)
        self.assertTrue(run.readme(runner, only_check=True), "run `experiments/run.py readme`")


class Objects:
    """What the linker and the compiler saw, of the objects of a build: the truth about who needs whom."""

    def __init__(self, build, root, folders):
        self.root = root
        self.object = {}  # source -> object; of two objects that of the later folder
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
            # A template of ours instantiated in one place; one of the standard library is in its shared object, too.
            if len(sources) == 1 and "4xpyd" in symbol:
                self.defines.setdefault(symbol, sources[0])

    def reachable(self, roots):
        """Sources whose objects the linker takes for these, and every header that they include."""
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
    """Needs a build: that of $XPYD_BIN, as `make test` sets it."""

    def test_the_linker_takes_no_object_that_the_sources_do_not_name(self):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        build = os.path.join(root, os.path.dirname(os.environ.get("XPYD_BIN", "")))
        if not glob.glob(os.path.join(build, "experiments", "*.o")) or not shutil.which("nm"):
            self.skipTest("no objects: `make test` builds them")
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
