#!/usr/bin/env python3
"""Tests of the runner, the result files and the claims, with a program that only pretends to measure."""
import contextlib
import glob
import io
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

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)

import claims  # noqa: E402
import older  # noqa: E402
import run  # noqa: E402
from claims import FRONT_PAGE, HOW, PARTS, Claim, Part  # noqa: E402
from evidence import ELSEWHERE, EXPECTED, MISSING, NO, UNEXPECTED, YES, against, decide, interval  # noqa: E402
from table import Table, TableError  # noqa: E402

# It has three points and logs every call. FAKE_WRONG names an x whose result is wrong, FAKE_DIE one at which it ends.
FAKE = textwrap.dedent("""\
    #!{python}
    import json, os, sys
    words = sys.argv[1:]
    if words[0] == "machine":
        print(json.dumps({{"commit": os.environ["FAKE_COMMIT"], "build": "release", "machine": "toy", "cuda": "",
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

# The sources of the pretended program: two experiments, a header, its implementation, a row, and unrelated files.
SOURCES = {
    "experiments/toy.cc": '#include "model/shape.h"\nREGISTER_EXPERIMENT("toy", "cpu", points, open);\n',
    "experiments/other.cc": '#include "disagg/far.h"\nREGISTER_EXPERIMENT("other", "any", points, open);\n',
    "experiments/expected.csv": "experiment,claim\ntoy,one\n",
    "model/shape.h": "int sides();\n",
    "model/shape_many.cc": '#include "base/count.h"\n',
    "base/count.h": "int count();\n",
    "base/row.cc": "int row;\n",
    "disagg/far.h": "int far();\n",
}


def claim(**more):
    values = dict(experiment="toy", claim="y at 2", how="measured", metric="y", cell="x=2", over="", low=19,
                  high=21, unit="s", paper="", paper_low=None, paper_high=None, page="", differs="")
    return Claim(**{**values, **more})


def table(columns, *rows):
    found = Table("t.csv", {})
    found.columns = columns.split()
    found.rows = [dict(zip(found.columns, row.split())) for row in rows]
    return found


@unittest.skipUnless(shutil.which("git"), "no git")
class RunnerTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.log, self.bin = os.path.join(self.dir, "log"), os.path.join(self.dir, "program")
        with open(self.bin, "w") as file:
            file.write(FAKE.format(python=sys.executable))
        os.chmod(self.bin, 0o755)
        for name in ("FAKE_WRONG", "FAKE_DIE"):
            os.environ.pop(name, None)
        os.environ["FAKE_LOG"] = self.log
        self.claim = claim()
        self.part = Part("toy", "cpu", 2, (), "?", [self.claim])
        self.csv = os.path.join(self.dir, "toy.csv")
        self.root, run.ROOT = run.ROOT, self.dir  # this root has a history of its own, and set-aside files go below it
        self.git("init", "-q")
        self.commit(SOURCES)

    def tearDown(self):
        run.ROOT = self.root
        shutil.rmtree(self.dir)

    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=self.dir, check=True,
                       capture_output=True)

    def commit(self, files):
        for path, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(self.dir, path)), exist_ok=True)
            with open(os.path.join(self.dir, path), "w") as file:
                file.write(text)
        self.git("add", *files)
        self.git("commit", "-q", "-m", "edit")
        os.environ["FAKE_COMMIT"] = older.git(self.dir, "rev-parse", "--short", "HEAD")[0]
        for cached in (older.registered, older.brings, older.code, older.changed):
            cached.cache_clear()

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

    def run_part(self, **more):
        return self.quietly(self.runner(**more).run, self.part)

    def verdict(self, **more):
        """(verdict of the part's one claim, state of the file)."""
        state, found = run.verdict(self.runner(**more), self.part)
        return found[0][1].verdict, state

    def test_repetitions_interleave_and_a_second_run_measures_nothing(self):
        self.assertTrue(self.run_part()[0])
        self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        self.assertTrue(self.run_part()[0])
        self.assertEqual(self.measured(), [])
        self.assertEqual(self.verdict(), (EXPECTED, ""))

    def test_what_reads_no_clock_is_asked_of_several_programs_and_stands_in_the_order_of_the_plan(self):
        self.claim.how = "virtual"
        self.assertTrue(self.run_part()[0])
        self.assertEqual(sorted(self.measured()), sorted(["1", "2", "4"] * 2))
        self.assertEqual([(row["repeat"], row["x"]) for row in Table.load(self.csv).rows],
                         [(r, x) for r in "01" for x in "124"])

    def test_an_interrupted_run_goes_on_where_it_was(self):
        os.environ["FAKE_DIE"] = "4"
        good, out = self.run_part()
        self.assertFalse(good)
        self.assertIn("ended with code 7: out of luck", out)
        self.measured()
        self.assertIn("out of luck", self.verdict()[1])
        self.assertFalse(self.quietly(run.check, self.runner(), [self.part])[0])
        del os.environ["FAKE_DIE"]
        self.assertTrue(self.run_part()[0])
        self.assertEqual(self.measured(), ["4", "4"])

    def test_a_wrong_result_gives_no_row(self):
        os.environ["FAKE_WRONG"] = "2"
        good, out = self.run_part()
        self.assertFalse(good)
        self.assertIn("wrong result, not timed", out)
        self.assertEqual({row["x"] for row in Table.load(self.csv).rows}, {"1", "4"})
        self.assertEqual(self.verdict()[0], MISSING)

    def test_a_half_written_line_is_named_and_measured_again(self):
        self.run_part()
        self.measured()
        with open(self.csv) as file:
            text = file.read()
        last = text[:-1].rindex("\n") + 1
        for broken, word in ((text[:-3], "cut short"), (text[:last] + "a,1\n", "2 fields, expected 4")):
            with open(self.csv, "w") as file:
                file.write(broken)
            good, out = self.run_part()
            self.assertTrue(good)
            self.assertIn(word, out)
            self.assertEqual(self.measured(), ["4"])

    def test_a_result_is_stale_after_a_commit_to_its_folders_alone(self):
        self.run_part()
        self.measured()
        for path in ("disagg/far.h", "experiments/other.cc", "base/README.md", "README.md"):
            self.commit({path: SOURCES.get(path, "") + "more\n"})
            self.assertEqual(self.verdict(), (EXPECTED, ""), path)
        self.commit({"model/shape.h": SOURCES["model/shape.h"].replace(";", "\n  ;  // more\n")})
        self.assertEqual(self.verdict(), (EXPECTED, ""))
        for path in ("experiments/toy.cc", "model/shape.h", "model/shape_many.cc", "base/row.cc"):
            self.commit({path: SOURCES[path] + "int more;  // of it\n"})
            self.assertIn("stale: measured at commit", self.verdict()[1], path)
            good, out = self.run_part()
            self.assertTrue(good)
            self.assertIn(f"changed since then: {path}; moved", out)
            self.assertEqual(self.measured(), ["1", "2", "4"] * 2)
        aside = glob.glob(os.path.join(self.dir, "build", "experiments", "set-aside", "*", "toy.csv"))
        self.assertEqual(len(aside), 4)
        for host in ("a", "b"):  # what looks like a comment inside a literal is code
            self.commit({"base/row.cc": f'auto url = "http://{host}";\n'})
            self.assertIn("changed since then: base/row.cc", self.run_part()[1])
        with open(self.csv, "w") as file:
            file.write("x,y\n1,2\n")  # a file that run.py did not write is kept, too
        self.assertIn("expected a CSV that run.py wrote", self.run_part()[1])

    def test_changes_without_a_commit_are_measured_into_build_alone(self):
        os.environ["FAKE_COMMIT"] = "abc-dirty"
        good, out = self.run_part()
        self.assertFalse(good)
        self.assertIn("not run: the program is of abc-dirty, which no commit has", out)
        self.assertEqual(self.measured(), [])
        build = os.path.join(self.dir, "build")
        os.mkdir(build)
        self.assertTrue(self.run_part(results=build)[0])

    def test_older_names_results_of_older_code_and_younger_ranges(self):
        self.claim.line = 2
        tell = lambda: self.quietly(run.tell_older, [self.part], self.dir)  # noqa: E731
        self.assertIn("toy.csv: No such file", tell()[1].replace(self.dir + os.sep, ""))
        self.run_part()
        self.assertEqual(tell(), (True, "0 of 1 results are older than the code of their folders, or missing\n"))
        self.commit({"experiments/expected.csv": "experiment,claim\ntoy,two\n"})
        self.assertEqual(tell()[1].splitlines()[0], "toy.csv: its code is unchanged; 1 of 1 ranges are younger than it")
        self.commit({"model/shape.h": "int other();\n"})
        good, out = tell()
        self.assertFalse(good)
        self.assertIn("changed since then: model/shape.h;", out)

    def test_a_missing_column_and_a_missing_card_get_a_word(self):
        self.assertEqual(self.verdict()[0], MISSING)
        self.run_part()
        self.claim.metric = "z"
        found = run.verdict(self.runner(), self.part)[1]
        self.assertIn("no column 'z'; it has point,repeat,x,y", found[0][1].why)
        self.claim.metric, self.claim.cell = "y", ""
        self.assertIn("3 points with no condition, expected one", run.verdict(self.runner(), self.part)[1][0][1].why)
        self.part.device = "cuda"
        self.assertEqual(self.verdict(), (MISSING, "no CUDA device"))
        self.assertIn("not run: no CUDA device", self.run_part()[1])

    def test_what_this_machine_lacks_is_said(self):
        lacks = unittest.mock.patch
        for need, lack, word in (("netns", lacks("os.geteuid", return_value=1000), "it needs root, iproute2 and etcd"),
                                 ("rdma", lacks("glob.glob", return_value=[]), "it needs an RDMA device"),
                                 ("callgrind", lacks("shutil.which", return_value=None), "it needs valgrind"),
                                 ("traces", contextlib.nullcontext(), "it needs the Mooncake traces")):
            self.part.needs = (need,)
            with lack:
                good, out = self.run_part()
            self.assertFalse(good)
            self.assertIn("not run: " + word, out)
        self.assertEqual(self.measured(), [])

    def test_rows_of_the_trace_and_of_generated_requests_are_not_mixed(self):
        self.part.needs = ("tool_agent",)
        self.run_part()
        self.measured()
        traces = os.path.join(self.dir, "traces")
        self.commit({"traces/mooncake_toolagent.jsonl": "{}"})
        self.assertEqual(self.runner().stamp(self.part)["tool&agent"], "generated")
        self.assertEqual(self.runner(traces=traces).stamp(self.part)["tool&agent"], "trace")
        table = Table.load(self.runner().path(self.part))
        self.assertIn("tool&agent 'generated', here it is 'trace'", self.runner(traces=traces).stale(self.part, table))

    def test_quick_takes_the_shortest_parts_within_its_time(self):
        with unittest.mock.patch("run.seconds", side_effect=[100, None, 50, 150]):
            self.assertEqual(run.quick(["a", "never run", "c", "d"]), ["a", "c"])

    def test_what_is_not_reproduced_for_no_reason_given_fails_the_check(self):
        self.run_part()
        check = lambda: self.quietly(run.check, self.runner(), [self.part])  # noqa: E731
        self.assertTrue(check()[0])
        self.claim.high = 19.5
        good, out = check()
        self.assertFalse(good)
        self.assertIn("the claim gives no reason", out)
        self.claim.differs = "a range too narrow"
        good, out = check()
        self.assertTrue(good)
        self.assertIn("; a range too narrow", out)
        self.claim.differs = ""
        self.claim.high, self.claim.paper, self.claim.page = 21, "30 s", "a paper"
        self.claim.paper_low, self.claim.paper_high = 29, 31
        self.assertFalse(check()[0])
        self.claim.differs = "a toy"
        good, out = check()
        self.assertTrue(good)
        self.assertIn("published 30 s, a paper); a toy", out)

    def test_instructions_are_counted_of_one_process_a_point(self):
        tools = os.path.join(self.dir, "tools")
        os.makedirs(tools)
        with open(os.path.join(tools, "valgrind"), "w") as file:  # imitates callgrind's options and its file
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
        self.part.needs, self.part.repeats = ("callgrind",), 1
        with unittest.mock.patch.dict(os.environ, PATH=tools + os.pathsep + os.environ["PATH"]):
            self.assertTrue(self.run_part()[0])
        self.assertEqual({row["instructions"] for row in Table.load(self.csv).rows}, {str(1000 + len('{"x": 1}\n'))})

    def test_the_table_is_what_was_written(self):
        self.run_part()
        found = Table.load(self.csv)
        self.assertEqual(found.stamp["peaks"], '{"read_gbps": 1}')
        self.assertEqual(found("y", x=4), 40)
        self.assertEqual(found.curve("x", "y"), [(1, 10, 10, 10), (2, 20, 20, 20), (4, 40, 40, 40)])
        with self.assertRaises(TableError):
            found.add("h", 0, [{"x": 1, "other": 2}])


class EvidenceTest(unittest.TestCase):
    def test_the_published_range_decides_and_not_our_own(self):
        paper = dict(low=.92, high=1.08, paper="1.24 to 1.36", page="a paper")
        compared = claim(**paper, paper_low=1.24, paper_high=1.36)
        self.assertEqual(decide([.951, .932, .977, .95, .95, .96], compared).verdict, NO)
        self.assertEqual(decide([1.3] * 6, compared).verdict, YES)
        self.assertEqual(decide([1.0] * 6, claim(**paper)).verdict, ELSEWHERE)
        self.assertEqual(decide([1.3] * 6, claim(**paper)).verdict, NO)  # our own range decides, then

    def test_a_range_narrower_than_the_spread_is_not_met_however_near_the_middle_is(self):
        found = decide([.86, .89, .98, 1.0, 1.02, 1.1, 1.14], claim(low=.95, high=1.05))
        self.assertLess(abs(found.middle - 1), .01)
        self.assertEqual((found.verdict, found.why), (UNEXPECTED, "the interval crosses an edge of the range"))
        self.assertEqual(decide([.99, 1.0, 1.01], claim(low=.95, high=1.05)).verdict, EXPECTED)

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

    def test_inside_outside_across(self):
        self.assertEqual([against(*four) for four in ((1, 2, 1, 2), (1, 2, 2.1, 3), (1, 2, 1.5, 3), (0, 4, 1, 3))],
                         ["in", "out", "across", "across"])

    def test_samples_are_repetitions_and_what_each_holds_of_its_own(self):
        # First parts of one point, then draws that are points of their own.
        for rows in (("a 0 0 x 1", "a 0 1 x 2", "a 1 0 x 3"), ("a 0 0 x 1", "b 0 1 x 2", "c 0 2 x 3")):
            found = table("point repeat sample way ms", *rows)
            self.assertEqual([part("ms", way="x") for part in found.samples()], [1, 2, 3])
            self.assertEqual(found("ms", way="x"), 2)
        found = table("point repeat sample way ms", "a 0 0 x 1", "d 0 0 x 9")
        with self.assertRaisesRegex(TableError, "2 points with way=x"):
            found("ms", way="x")

    def test_no_experiment_takes_a_percentile_past_the_guard(self):
        # Results used to contain percentiles of 20 requests, of 9 turns and of 5 rounds.
        past = re.compile(r"(?<!_)\bpercentile\(|(\.|->)(median|p9\d)\b|nth_element")
        for path in [f for pattern in ("*.cc", "*.h", "cuda/*.cu") for f in glob.glob(os.path.join(HERE, pattern))]:
            with open(path) as file:
                code = re.sub(r"//.*", "", file.read())
            # values.cc defines percentile_seen(), which calls what stats.h and stats.cc define.
            if os.path.basename(path) not in ("values.cc", "stats.cc", "stats.h"):
                self.assertNotRegex(code, past, f"{path}: percentile_seen() of values.h refuses too few samples")


class ClaimsTest(unittest.TestCase):
    def test_a_value_is_a_cell_divided_by_another(self):
        found = table("point repeat way load ms left", "a 0 x 1 8 2", "b 0 x 2 6 1", "c 0 y 1 2 0")
        for words, expected in ((dict(metric="ms", cell="way=x; load=1"), 8), (dict(metric="max ms", cell="way=x"), 8),
                                (dict(metric="ms", cell="way=x; load=1", over="way=y"), 4),
                                (dict(metric="ms", cell="way=x; load=2", over="way=y; load=*"), 3),
                                (dict(metric="ms", cell="way=x; load=1", over="0.5"), 16),
                                (dict(metric="ms", cell="way=x; load=1", over="min way=x|y; load=*"), 4),
                                (dict(metric="ms/left", cell="way=x; load=1"), 4),
                                (dict(metric="sum ms-left", cell="way!=y"), 11)):
            self.assertEqual(claim(**words).value(found), expected, words)
        for cell in ("way=x", "way=z", "what=x"):
            with self.assertRaises(TableError):
                claim(metric="ms", cell=cell).value(found)
        empty = table("point repeat ms", "a 0 ")
        empty.rows[0]["ms"] = ""
        with self.assertRaisesRegex(TableError, "too few samples"):
            claim(metric="ms", cell="").value(empty)

    def test_a_line_that_cannot_be_read_is_named(self):
        head = "experiment,claim,how,metric,cell,over,low,high,unit,paper,paper_low,paper_high,page,differs\n"
        with tempfile.TemporaryDirectory() as folder:
            expected, parts = os.path.join(folder, "expected.csv"), os.path.join(folder, "parts.csv")
            with open(parts, "w") as file:
                file.write("part,device,repeats,needs,question\ntoy,cpu,1,,?\n")
            for line, good in (("toy,y,measured,y,x=2,,1,2,s,,,,,", True), ("toy,y,guessed,y,x=2,,1,2,s,,,,,", False),
                               ("toy,y,measured,y,x=2,,2,1,s,,,,,", False), ("toy,y,measured,y,x,,1,2,s,,,,,", False),
                               ("none,y,measured,y,x=2,,1,2,s,,,,,", False),
                               ("toy,y,measured,y,x=2,,1,2,s,3 s,,,,", False),
                               ("toy,y,measured,y,x=2,,1,2,s,3 s,,,a paper,", True)):
                with open(expected, "w") as file:
                    file.write(head + line + "\n")
                if good:
                    self.assertEqual(len(claims.load(expected, parts)[0].claims), 1)
                else:
                    with self.assertRaisesRegex(SystemExit, "expected.csv:2: "):
                        claims.load(expected, parts)

    def test_the_claims_are_few_distinct_and_each_belongs_to_a_program(self):
        every = [c for part in PARTS for c in part.claims]
        self.assertLessEqual(len(every), 250)
        self.assertLessEqual(len({part.experiment for part in PARTS}), 30)
        self.assertEqual(len({(c.experiment, c.claim) for c in every}), len(every))
        self.assertEqual(len({(c.experiment, c.metric, c.cell, c.over) for c in every}), len(every))
        known = older.registered(ROOT)
        self.assertEqual({name for name, _ in known}, {part.part for part in PARTS})
        for part in PARTS:
            self.assertTrue(part.claims, part.part)
            self.assertTrue({(part.part, part.device), (part.part, "any")} & set(known), part.part)
            self.assertLessEqual(set(part.needs), set(run.NEEDS) | {"tool_agent"})
            self.assertLessEqual({c.how for c in part.claims}, set(HOW))
        for anchor, (label, _) in FRONT_PAGE.items():
            self.assertTrue([c for c in every if (c.experiment, c.claim) == (anchor, label)], anchor)

    def test_each_experiment_begins_with_its_card(self):
        for name in {part.experiment for part in PARTS}:
            lines = older.text(ROOT, f"experiments/{name}.cc").split("\n")
            card = lines[:next(i for i, line in enumerate(lines) if not line.startswith("//"))]
            self.assertLessEqual(len(card), 15, name)
            heads = [line[3:].split(",")[0].split(":")[0] for line in card if line[3:4] != " "]
            self.assertEqual(heads, [name, "Paper", "Set-up", "Command", "Expected", "Found"])
            self.assertIn(f"Command: make exp-{name} (", "\n".join(card))

    def test_each_experiment_depends_on_its_own_folders(self):
        for part in PARTS:
            paths = older.paths_of(ROOT, part)
            self.assertIn("base/", paths)
            self.assertNotIn("tests/", paths)
        waste = next(part for part in PARTS if part.part == "waste")
        self.assertIn("allocator/", older.paths_of(ROOT, waste))
        self.assertNotIn("disagg/pool/", older.paths_of(ROOT, waste))

    def test_a_percent_and_a_range_are_shown(self):
        self.assertEqual(claim(unit="%").show(.963), "96.3 %")
        self.assertEqual(claim(unit="x").range(1, 1.25), "1 to 1.25 x")
        self.assertEqual(claim().show(12035), "12035 s")


class MakeTest(unittest.TestCase):
    def test_claims_are_quick_only_if_asked(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "QUICK"}
        for words, quick in ([], False), (["QUICK=1"], True):
            said = subprocess.run(["make", "-n", "claims", *words], cwd=ROOT, env=env, capture_output=True, text=True)
            self.assertIn("run.py check ", said.stdout)
            self.assertEqual("--quick" in said.stdout, quick)


class CompiledTest(unittest.TestCase):
    def test_what_the_cuda_compiler_said_has_a_head_as_results_do(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "one.ptxas"), "w") as file:
                file.write("Compiling entry function 'f' for 'sm_80'\n"
                           "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 8 registers\n")
            text = subprocess.run([os.path.join(ROOT, "tools", "kernel-registers"), folder], capture_output=True,
                                  text=True, check=True).stdout
        head = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("# "))
        self.assertEqual(list(head), ["experiment", "device", "commit", "compiler", "begun"])
        self.assertIn("\nsource,architecture,kernel,", text)


if __name__ == "__main__":
    unittest.main(verbosity=1)
