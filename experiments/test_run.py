#!/usr/bin/env python3
"""Tests of the runner, the result files and the claims, against a program that only pretends to measure."""
import contextlib
import glob
import io
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import run  # noqa: E402
from claims import CLAIMS, Claim, Expect  # noqa: E402
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
        self.root, run.ROOT = run.ROOT, self.dir  # no sources there; set-aside files go below it

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
        with open(self.csv) as file:
            text = file.read()
        with open(self.csv, "w") as file:
            file.write(text.replace("# sources: ", "# sources: old"))
        word, why, _ = self.verdict()
        self.assertEqual(word, "reproduced")
        self.assertIn("stale: measured at commit abc, sources have changed", why)
        good, out = self.run_claim()
        self.assertTrue(good)
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        aside = os.path.join(self.dir, "build", "experiments", "set-aside")
        self.assertEqual(len(os.listdir(aside)), 1)
        self.assertIn("sources have changed", out)
        with open(self.csv, "w") as file:
            file.write("x,y\n1,2\n")  # nobody's file: kept too
        self.assertIn("expected a CSV that run.py wrote", self.run_claim()[1])
        self.assertEqual(len(os.listdir(aside)), 2)

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


if __name__ == "__main__":
    unittest.main(verbosity=1)
