#!/usr/bin/env python3
"""Runs experiments, keeps their results, and compares them with the claims. It needs only the standard library.

    run.py run [NAME...]      measure what is missing (without a name: everything that this machine can run)
    run.py check              the same, then print the evidence for every claim (--no-run: only that; --quick: only
                              the shortest parts, 4 minutes in all). It fails if a result is not reproduced without a
                              reason.
    run.py older              name the results that are older than the code of their folders, and the ranges that are
                              younger than their results
    run.py readme             rewrite CLAIMS.md, the table in experiments/README.md and the last column of the table of
                              ideas in README.md (--check: only say whether they are up to date)
    run.py list               print names, devices, the minutes that each last run took, and their sum

A point that is already in the result file is not measured again. A file of another machine, seed or older code is set
aside, never overwritten. A program built from a tree with changes that are not committed writes to build/ only. """
import argparse
import concurrent.futures
import contextlib
import fcntl
import glob
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
SHOWN = 20  # rows of a result that are printed when it is measured
QUICK = 240  # seconds in all: with the start of each program, --quick ends within five minutes
sys.path.insert(0, HERE)

import older  # noqa: E402
from claims import FRONT_PAGE, PARTS  # noqa: E402
from evidence import ELSEWHERE, EXPECTED, MISSING, NO, UNEXPECTED, YES, Evidence, decide  # noqa: E402
from table import Table, TableError, point_hash  # noqa: E402

ETCD = os.path.join(ROOT, "build/etcd/usr/bin") + os.pathsep + os.environ.get("PATH", "")
BEGIN, END = "<!-- made by `experiments/run.py readme`: -->", "<!-- end -->"
# What a part may need (parts.csv): why it cannot run here, and whether that is so.
NEEDS = {
    "callgrind": ("it needs valgrind to count instructions", lambda options: not shutil.which("valgrind")),
    "rdma": ("it needs an RDMA device: `make check STAGE=rdma` runs it in a virtual machine that has one",
             lambda options: not glob.glob("/sys/class/infiniband/*")),
    "netns": ("it needs root, iproute2 and etcd: `make check STAGE=netns` installs the last two",
              lambda options: os.geteuid() or not (shutil.which("ip") and shutil.which("tc")
                                                   and shutil.which("etcd", path=ETCD))),
    "traces": ("it needs the Mooncake traces: `experiments/fetch-traces` fetches them",
               lambda options: not options.traces),
}


class Progress:
    """One progress line, redrawn on a terminal. Elsewhere it prints nothing."""

    def __init__(self, label, done, total):
        self.label, self.done, self.total, self.first = label, done, total, done
        self.start = time.monotonic()

    def show(self, line):
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K" + line[:os.get_terminal_size(sys.stderr.fileno()).columns - 1])
            sys.stderr.flush()

    def step(self, note):
        self.done += 1
        left = (time.monotonic() - self.start) / (self.done - self.first) * (self.total - self.done) / 60
        self.show(f"{self.label} {self.done}/{self.total}, {left:.1f} min left {note}")


class Program:
    """One process `xpyd_experiments run NAME`, which is asked point by point. If a point ends it, it is started
    again."""

    def __init__(self, runner, part):
        self.words = [runner.options.bin, "run", part.part, *runner.settings(part)]
        self.process, self.log, self.counted = None, None, None
        if "callgrind" in part.needs:
            self.counted = tempfile.NamedTemporaryFile(prefix="callgrind.")
            self.words = ["valgrind", "--tool=callgrind", "--instr-atstart=no",
                          f"--callgrind-out-file={self.counted.name}", *self.words]

    def ask(self, parameters):
        if self.process is None:
            self.log = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(self.words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=self.log, text=True)
        try:
            self.process.stdin.write(json.dumps(parameters) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            reply = json.loads(line)
            if self.counted and "rows" in reply:
                self.close()  # callgrind writes its count when the process ends
                with open(self.counted.name) as file:
                    count = re.search(r"^totals: (\d+)", file.read(), re.M)
                reply["rows"] = [{**row, "instructions": int(count.group(1))} for row in reply["rows"]]
            return reply
        code = self.process.wait()
        self.log.seek(0)
        last = self.log.read().strip().split("\n")[-1].replace("xpyd_experiments: ", "")
        self.close()
        return {"error": f"the program ended with code {code}: {last}"}

    def close(self):
        if self.process:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
            self.log.close()
            self.process = None


class Runner:
    def __init__(self, options):
        self.options = options
        self.peaks, self.known = {}, None

    def answer(self, *words):
        """Runs the program to its end. Returns what it printed as JSON."""
        try:
            done = subprocess.run([self.options.bin, *words], cwd=ROOT, capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"run.py: {self.options.bin}: {error.strerror}: `make experiments` builds it")
        if done.returncode != 0:
            last = done.stderr.strip().split("\n")[-1].replace("xpyd_experiments: ", "")
            raise SystemExit(f"run.py: {' '.join(words)}: {last}")
        return json.loads(done.stdout)

    @property
    def machine(self):
        self.known = self.known or self.answer("machine")
        return self.known

    def missing(self, part):
        """Why this machine cannot run the part; "" if it can."""
        if part.device == "cuda" and self.machine["cuda_missing"]:
            return self.machine["cuda_missing"]
        return next((why for need, (why, lacks) in NEEDS.items() if need in part.needs and lacks(self.options)), "")

    def settings(self, part):
        words = ["--device", part.device, "--seed", str(self.options.seed)]
        if self.options.traces:
            words += ["--traces", self.options.traces]
        return words + (["--tiny"] if self.options.tiny else [])

    def stamp(self, part):
        """What two comparable results share."""
        return {
            "experiment": part.part,
            "device": part.device if part.device == "cpu" else self.machine["cuda"],
            "machine": self.machine["machine"],
            "seed": str(self.options.seed),
            "sizes": "tiny" if self.options.tiny else "full",
            **({"tool&agent": self.tool_agent()} if "tool_agent" in part.needs else {}),
        }

    def tool_agent(self):
        """What the program reads (mooncake_trace() in simulated.cc), so that rows of both are never mixed."""
        there = os.path.exists(os.path.join(ROOT, self.options.traces, "mooncake_toolagent.jsonl"))
        return "trace" if there else "generated"

    def path(self, part):
        return os.path.join(self.options.results, part.file)

    def stale(self, part, table):
        """Why the file does not belong to the program's code on this machine; "" if it does."""
        for key, value in self.stamp(part).items():
            if table.stamp.get(key, "?") != value:
                return f"measured with {key} '{table.stamp.get(key, '?')}', here it is '{value}'"
        return older.since(ROOT, part, table.stamp["commit"], self.machine["commit"].removesuffix("-dirty"))

    def open(self, part):
        """The table to continue. A file that cannot be continued is set aside first."""
        path = self.path(part)
        if os.path.exists(path):
            try:
                table = Table.load(path)
                why = self.stale(part, table)
                for trouble in table.troubles:
                    print(f"  {trouble}; that point is measured again")
                if not why:
                    return table
            except TableError as error:
                why = str(error)
            kept = os.path.join(ROOT, "build", "experiments", "set-aside")
            os.makedirs(kept, exist_ok=True)
            aside = os.path.join(tempfile.mkdtemp(dir=kept, prefix=time.strftime("%Y%m%d-%H%M%S-")), part.file)
            os.replace(path, aside)
            print(f"  {part.file}: {why}; moved to {os.path.relpath(aside, ROOT)}")
        if part.device not in self.peaks:
            self.peaks[part.device] = json.dumps(self.answer("peak", "--device", part.device))
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Table(path, {**self.stamp(part), "commit": self.machine["commit"], "build": self.machine["build"],
                            "peaks": self.peaks[part.device], "begun": date})

    def plan(self, part):
        """[(hash, repetition, parameters)]: all points once, then all again, so that the configurations take turns."""
        points = self.answer("points", part.part, *self.settings(part))
        repeats = min(part.repeats, self.options.repeats or part.repeats)
        return [(point_hash(part.part, part.device, self.options.seed, self.options.tiny, p), r, p)
                for r in range(repeats) for p in points]

    def run(self, part):
        """Measures what is missing. Returns True if the result is then complete."""
        why = self.missing(part)
        if not why and self.machine["commit"].endswith("-dirty") and not self.options.results.startswith(
                os.path.join(ROOT, "build")):
            why = f"the program is of {self.machine['commit']}, which no commit has: --results build/..."
        if why:
            print(f"{part.part} ({part.device}): not run: {why}")
            return False
        plan = self.plan(part)
        table = self.open(part)
        done = table.done()
        todo = [unit for unit in plan if unit[:2] not in done]
        table.stamp.pop("failed", None)
        begin, spent = time.monotonic(), float(table.stamp.get("seconds", 0))
        busy = resource.getrusage(resource.RUSAGE_CHILDREN)
        failures = []
        progress = Progress(part.part, len(plan) - len(todo), len(plan))
        mine, programs = threading.local(), []

        def ask(unit):
            if not hasattr(mine, "program"):
                mine.program = Program(self, part)
                programs.append(mine.program)
            return mine.program.ask(unit[2])

        # A part that reads no clock of this machine runs in as many processes as there are cores; a timed one runs in
        # one.
        timed = any(claim.how == "measured" for claim in part.claims)
        pool = concurrent.futures.ThreadPoolExecutor(1 if timed else len(os.sched_getaffinity(0)))
        replies = (pool.submit(ask, unit).result() for unit in todo) if timed else pool.map(ask, todo)
        for (hash_, repeat, parameters), reply in zip(todo, replies):
            progress.step(" ".join(f"{k}={v}" for k, v in parameters.items()))
            if "rows" in reply:
                table.stamp["seconds"] = f"{spent + time.monotonic() - begin:.0f}"
                table.add(hash_, repeat, [{**parameters, **row} for row in reply["rows"]])
                continue
            failures.append(f"{json.dumps(parameters)}: {reply['error']}")
            table.stamp["failed"] = failures[0]
            table.write()
        pool.shutdown()
        for program in programs:
            program.close()
        if todo and not timed:  # the CPU time spread over idle cores, however busy they were
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = ended.ru_utime + ended.ru_stime - busy.ru_utime - busy.ru_stime
            table.stamp["seconds"] = f"{spent + cpu / len(os.sched_getaffinity(0)):.0f}"
            table.write()
        progress.show("")
        for failure in failures:
            print(f"  {part.part}: {failure}")
        print(f"{part.part} ({part.device}): {len(plan) - len(failures)} of {len(plan)} points in "
              f"{os.path.relpath(self.path(part), ROOT)}, {len(todo)} measured now in {time.monotonic() - begin:.0f} s")
        if len(table.rows) <= SHOWN:
            print(table.text())
        return not failures


def seconds(part, results=os.path.join(HERE, "results")):
    """What the last run took on two idle cores, from its stamp; None if there was no run."""
    try:
        return float(Table.load(os.path.join(results, part.file)).stamp["seconds"])
    except (TableError, KeyError):
        return None


def quick(parts):
    """The shortest parts, as many as took QUICK seconds together."""
    known = sorted((s, i) for i, s in enumerate(map(seconds, parts)) if s is not None)
    kept, total = set(), 0
    for s, i in known:
        total += s
        if total <= QUICK:
            kept.add(i)
    return [part for i, part in enumerate(parts) if i in kept]


def took(part):
    known = seconds(part)
    return "never run" if known is None else f"{known / 60:.1f} minutes" if known >= 6 else f"{known:.0f} seconds"


def evidence(part, table):
    """[(claim, Evidence)] of a part, from the rows of its result file alone."""
    found = []
    for claim in part.claims:
        try:
            if not table or not table.rows:
                raise TableError(f"{part.file}: " + ("the file has no rows" if table else "there is no such result"))
            found.append((claim, decide([claim.value(sample) for sample in table.samples()], claim)))
        except (TableError, ZeroDivisionError) as error:
            found.append((claim, Evidence(MISSING, why=str(error).replace(os.path.join(HERE, "results") + os.sep, ""))))
    return found


def seen(claim, found):
    """The median, its interval and the number of samples, as text."""
    if found.n == 0:
        return MISSING
    text = claim.show(found.middle)
    if found.n > 1 and found.low != found.high:
        text += f" [{claim.range(found.low, found.high)}]"
    return text + (f", n {found.n}" if found.n > 1 else "")


def loaded(part, results):
    """(table or None, why there is none)."""
    try:
        return Table.load(os.path.join(results, part.file)), ""
    except TableError as error:
        return None, str(error)


def verdict(runner, part):
    """(state of the result file, [(claim, Evidence)]) of one part, from its result file alone."""
    missing = runner.missing(part)
    table, why = loaded(part, runner.options.results)
    if not table:
        return missing or f"{why}: `{part.command}`", evidence(part, None)
    notes = list(table.troubles)
    if "failed" in table.stamp:
        notes.append(f"failed: {table.stamp['failed']}")
    if missing:
        notes.append(f"on {table.stamp['device']}, commit {table.stamp['commit']}; here: {missing}")
    else:
        stale = runner.stale(part, table)
        notes += [f"stale: {stale}"] if stale else []
        left = 0 if stale else len([u for u in runner.plan(part) if u[:2] not in table.done()])
        notes += [f"{left} points are still missing"] if left else []
    return "; ".join(notes), evidence(part, table)


def check(runner, parts):
    """Prints the evidence for every claim. Returns True if nothing failed and every difference has a reason."""
    counts, good, due = {}, True, []
    for part in parts:
        state, found = verdict(runner, part)
        print(f"\n{part.part} ({part.device})" + (f": {state}" if state else ""))
        print(f"  {part.question}\n  {part.command}; {part.file}")
        if not runner.missing(part) and (state or any(one.verdict == MISSING for _, one in found)):
            due.append(part)
        good &= "failed: " not in state
        for claim, one in found:
            counts[one.verdict] = counts.get(one.verdict, 0) + 1
            paper = f"; published {claim.paper}, {claim.page}" if claim.paper else ""
            print(f"    {one.verdict:20} {claim.claim}: {seen(claim, one)} ({claim.how}; expected "
                  f"{claim.range(claim.low, claim.high)}{paper})" + (f"; {one.why}" if one.why else ""))
            if one.verdict in (NO, UNEXPECTED) and not one.why:
                good = False
                print("      the claim gives no reason for the difference")
    print("\n" + "; ".join(f"{word}: {counts[word]}" for word in (YES, NO, ELSEWHERE, EXPECTED, UNEXPECTED, MISSING)
                         if word in counts))
    print("to be measured, because they are stale or missing: " +
          (", ".join(f"{part.part} ({took(part)})" for part in due) or "nothing"))
    return good


def tell_older(parts, results):
    """Prints the results that are older than the code of their folders, and the ranges that are younger than their
    results."""
    count = 0
    for part in parts:
        table, why = loaded(part, results)
        why = why or older.since(ROOT, part, table.stamp["commit"])
        late = older.younger(ROOT, part.claims, table.stamp["commit"].removesuffix("-dirty")) if table else []
        if why or late:
            print(f"{part.file}: " + (why or "its code is unchanged") +
                  (f"; {len(late)} of {len(part.claims)} ranges are younger than it" if late else ""))
        count += bool(why)
    print(f"{count} of {len(parts)} results are older than the code of their folders, or missing")
    return count == 0


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def published(claim):
    if not claim.paper:
        return ""
    exact = claim.comparable and (claim.paper_low, claim.paper_high) != (claim.low, claim.high)
    return f"{claim.paper}: {claim.page}" + (
        f" (the same: {claim.range(claim.paper_low, claim.paper_high)})" if exact else "")


def claims_page(all_):
    """The text of CLAIMS.md."""
    out = ["# Claims, one by one\n\n`experiments/run.py readme` makes this page from [expected.csv](expected.csv) and\n"
           "the [results](results). [README.md](README.md#how-to-read-a-verdict) explains the verdicts."]
    for part, table, found in all_:
        out.append(f"\n## {part.anchor}\n\n{part.question}\n")
        where = f"`{part.command}`, {took(part)}"
        if table:
            device = table.stamp["machine"] if part.device == "cpu" else table.stamp["device"]
            where += (f". [results/{part.file}](results/{part.file}): {device}, commit {table.stamp['commit']}, "
                      f"{table.stamp.get('begun', '?')[:10]}")
        out.append(f"{where}.\n")
        out.append("| claim | ours | how | published | expected | verdict |\n|---|---|---|---|---|---|")
        for claim, one in found:
            because = one.why and one.verdict in (NO, UNEXPECTED)
            why = f", because {one.why}" if because else f": {one.why}" if one.why else ""
            out.append("| " + " | ".join(cell(text) for text in (
                claim.claim, seen(claim, one), claim.how, published(claim), claim.range(claim.low, claim.high),
                one.verdict + why)) + " |")
    return "\n".join(out) + "\n"


def readme_table(all_):
    """The table of README.md: one row an experiment, with all its parts."""
    def counts(found):
        """Published figures: reproduced, not, not comparable; our arithmetic: reproduced, not; no result."""
        of_papers = [one.verdict for claim, one in found if claim.paper]
        ours = [one.verdict for claim, one in found if not claim.paper]
        return [of_papers.count(YES), of_papers.count(NO), of_papers.count(ELSEWHERE), ours.count(EXPECTED),
                ours.count(UNEXPECTED), (of_papers + ours).count(MISSING)]
    every = [pair for _, _, found in all_ for pair in found]
    n = counts(every)
    rows = [f"**{len(every)} claims. Published figures: {n[0]} reproduced, {n[1]} not reproduced, {n[2]} not "
            f"comparable here. Figures that nobody has published: {n[3]} as our arithmetic expects, {n[4]} not. No "
            f"result: {n[5]}.**\n",
            "| experiment | question | how | published: reproduced | not | not comparable | ours: as expected | not "
            "| no result |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|"]
    for experiment in dict.fromkeys(part.experiment for part, _, _ in all_):
        parts = [(part, found) for part, _, found in all_ if part.experiment == experiment]
        found = [pair for _, of in parts for pair in of]
        how = ", ".join(dict.fromkeys(claim.how for claim, _ in found))
        more = ", ".join(f"[{part.anchor[len(experiment) + 1:]}](CLAIMS.md#{part.anchor})" for part, _ in parts[1:])
        rows.append(f"| [{experiment}](CLAIMS.md#{parts[0][0].anchor})" + (f"; {more}" if more else "") +
                    f" | {cell(parts[0][0].question)} | {how} | " +
                    " | ".join(str(k) if k else "" for k in counts(found)) + " |")
    return "\n".join(rows)


def front_page(all_, text):
    """The text of the root README with the last column of its table of ideas: our value of FRONT_PAGE's claim, and the
    paper's."""
    found = {(part.anchor, claim.claim): (claim, one) for part, _, of in all_ for claim, one in of}
    shown = []

    def row(match):
        anchor = match[2]
        label, words = FRONT_PAGE[anchor]
        claim, one = found[anchor, label]
        shown.append(anchor)
        ours = claim.show(one.middle) if one.n else MISSING
        paper = f"; {cell(claim.paper)}" + ("" if one.verdict == YES else f" ({one.verdict})") if claim.paper else ""
        return f"{match[1]}{words}, {claim.how}: **{ours}**{paper} |"

    text = re.sub(r"^(\|(?:[^|\n]*\|){4} \[[^]]*\]\(experiments/CLAIMS\.md#([^)]*)\) \| ).*\|$", row, text, flags=re.M)
    if sorted(shown) != sorted(FRONT_PAGE):
        raise SystemExit(f"run.py: README.md: expected a row for each experiment of FRONT_PAGE, not {', '.join(shown)}")
    return text


def readme(options):
    """Writes the pages. Returns True if they were up to date, or are now."""
    all_ = []
    for part in PARTS:
        table, _ = loaded(part, options.results)
        all_.append((part, table, evidence(part, table)))
    page, front = os.path.join(HERE, "README.md"), os.path.join(ROOT, "README.md")
    with open(page, encoding="utf-8") as file, open(front, encoding="utf-8") as front_file:
        text, front_text = file.read(), front_file.read()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"run.py: {page}: expected the lines '{BEGIN}' and '{END}'")
    good = True
    for path, new in ((front, front_page(all_, front_text)),
                      (page, f"{head}{BEGIN}\n\n{readme_table(all_)}\n\n{END}{tail}"),
                      (os.path.join(HERE, "CLAIMS.md"), claims_page(all_))):
        name = os.path.relpath(path, ROOT)
        with open(path, encoding="utf-8") as file:
            if file.read() == new:
                continue
        good = False
        if options.check:
            print(f"{name} is out of date; `experiments/run.py readme` rewrites it")
            continue
        with open(path, "w", encoding="utf-8") as file:
            file.write(new)
        print(f"{name}: written")
    return good or not options.check


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check", "older", "readme", "list"])
    parser.add_argument("names", nargs="*", help="experiments; none: all")
    parser.add_argument("--bin", default="build/release/xpyd_experiments", help="the program that measures")
    parser.add_argument("--results", default=os.path.join(HERE, "results"), help="folder of the CSVs")
    parser.add_argument("--device", default="", help="only parts of this device: cpu or cuda")
    parser.add_argument("--repeats", type=int, default=0, help="at most so many repetitions; 0: as parts.csv says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default="", help="folder of the Mooncake traces (build/traces)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test")
    parser.add_argument("--quick", action="store_true", help=f"only the shortest parts, {QUICK} s in all")
    parser.add_argument("--no-run", action="store_true", help="check: measure nothing, compare the results that exist")
    parser.add_argument("--check", action="store_true", help="readme: only name the files that are out of date")
    options = parser.parse_args()
    options.bin = os.path.abspath(os.path.join(ROOT, options.bin))
    options.results = os.path.abspath(options.results)
    folders = [options.traces] if options.traces else ["build/traces", "../shared/traces"]
    options.traces = next((f for f in folders if os.path.isdir(os.path.join(ROOT, f))), "")
    names = {part.experiment for part in PARTS} | {part.part for part in PARTS}
    for name in options.names:
        if name not in names:
            raise SystemExit(f"run.py: no experiment '{name}'; there are {', '.join(sorted(names))}")
    parts = [p for p in PARTS if (not options.names or {p.part, p.experiment} & set(options.names))
             and options.device in ("", p.device)]
    if options.quick:
        parts = quick(parts)
    if options.command == "list":
        for p in parts:
            print(f"{p.part:28} {p.device:5} {took(p):13} {p.question}")
        cpu = sum(seconds(p) or 0 for p in parts if p.device == "cpu")
        print(f"{'':34} {cpu / 60:.1f} minutes without those of a card")
        return 0
    if options.command == "older":
        return 0 if tell_older(parts, options.results) else 1
    if options.command == "readme":
        return 0 if readme(options) else 1
    runner, good = Runner(options), True
    os.makedirs(options.results, exist_ok=True)
    if options.command == "run" or not options.no_run:
        with open(os.path.join(options.results, ".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SystemExit(f"run.py: another run is writing to {options.results}")
            for part in parts:
                good &= runner.run(part) or bool(runner.missing(part))
    if options.command == "check":
        good &= check(runner, parts)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrun.py: interrupted. Every finished point is kept; the same command continues", file=sys.stderr)
        sys.exit(130)
