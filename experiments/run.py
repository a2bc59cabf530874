#!/usr/bin/env python3
"""Runs experiments, keeps their results, compares them with what was expected. Only the standard library.

    run.py run [NAME...]      measure what is missing (all this machine can)
    run.py check              the same, then compare every result with its expected range (--no-run: only compare)
    run.py readme             rewrite the table in README.md (--check: only say whether it is up to date)
    run.py list               names, devices, minutes

A point that is in the result file is not measured again: files are stamped with hashes of the sources that
they depend on (sources.py), the machine and the seed, and a file with another stamp is set aside, never overwritten.
"""
import argparse
import contextlib
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)

from claims import CLAIMS  # noqa: E402
from sources import Sources, changed  # noqa: E402
from table import Table, TableError, point_hash  # noqa: E402

BEGIN, END = "<!-- made by `experiments/run.py readme`: -->", "<!-- end -->"


sources_below = functools.lru_cache(Sources)


def sources_stamp(root, claim):
    """Of what the experiment's result depends on."""
    kept = os.path.join(root, "experiments", "sources.json")  # a bundle has no sources
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as file:
            return json.load(file)[claim.file]
    return sources_below(root, claim.device).stamp(claim.name)


class Progress:
    """One line on a terminal, redrawn; nothing elsewhere."""

    def __init__(self, label, done, total):
        self.label, self.done, self.total, self.first = label, done, total, done
        self.start = time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, note=""):
        if not self.shown:
            return
        filled = 24 * self.done // max(1, self.total)
        line = f"{self.label} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total}"
        if self.done > self.first:
            left = (time.monotonic() - self.start) / (self.done - self.first) * (self.total - self.done)
            line += f" {left / 60:.1f} min left"
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write("\r\033[K" + f"{line} {note}"[:width - 1])
        sys.stderr.flush()

    def clear(self):
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


class Program:
    """One `xpyd_experiments run NAME`, asked point by point; started again if a point ends it."""

    def __init__(self, runner, claim):
        self.words = [runner.options.bin, "run", claim.name, *runner.settings(claim)]
        self.process, self.log = None, None

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
            return json.loads(line)
        code = self.process.wait()
        self.log.seek(0)
        last = self.log.read().strip().split("\n")[-1].replace("xpyd_experiments: ", "")
        self.close()
        return {"error": f"it ended with code {code}: {last}"}

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
        self.machine = None
        self.peaks = {}

    def call(self, *words):
        """(exit code, stdout, last line of stderr) of the program."""
        try:
            done = subprocess.run([self.options.bin, *words], cwd=ROOT, capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"run.py: {self.options.bin}: {error.strerror}: `make experiments` builds it")
        last = done.stderr.strip().split("\n")[-1].replace("xpyd_experiments: ", "")
        return done.returncode, done.stdout, last

    def answer(self, *words):
        code, out, error = self.call(*words)
        if code != 0:
            raise SystemExit(f"run.py: {' '.join(words)}: {error}")
        return json.loads(out)

    def missing(self, claim):
        """Why this machine cannot run it, or ''."""
        self.machine = self.machine or self.answer("machine")
        if claim.device == "cuda" and self.machine["cuda_missing"]:
            return self.machine["cuda_missing"]
        return "it needs the Mooncake traces; --traces names their folder" if (
            claim.traces and not self.options.traces) else ""

    def settings(self, claim):
        words = ["--device", claim.device, "--seed", str(self.options.seed)]
        if self.options.traces:
            words += ["--traces", self.options.traces]
        return words + (["--tiny"] if self.options.tiny else [])

    def stamp(self, claim):
        """What must be equal for two results to be of one kind, then what one only wants to know."""
        self.missing(claim)
        must = {
            "experiment": claim.name,
            "device": claim.device if claim.device == "cpu" else self.machine["cuda"],
            "machine": self.machine["machine"],
            "sources": sources_stamp(ROOT, claim),
            "seed": str(self.options.seed),
            "sizes": "tiny" if self.options.tiny else "full",
        }
        return must, {"commit": self.machine["commit"], "build": self.machine["build"]}

    def path(self, claim):
        return os.path.join(self.options.results, claim.file)

    def stale(self, claim, table):
        """Why the file is not of these sources on this machine, or ''."""
        must, _ = self.stamp(claim)
        for key, value in must.items():
            if table.stamp.get(key, "?") != value:
                if key == "sources":
                    return f"measured at commit {table.stamp['commit']}, {changed(table.stamp['sources'], value)}"
                return f"measured with {key} '{table.stamp.get(key, '?')}', here it is '{value}'"
        return ""

    def open(self, claim):
        """The table to go on with; what cannot be gone on with is set aside."""
        path = self.path(claim)
        if os.path.exists(path):
            try:
                table = Table.load(path)
                why = self.stale(claim, table)
                for trouble in table.troubles:
                    print(f"  {trouble}; that point is measured again")
                if not why:
                    return table
            except TableError as error:
                why = str(error)
            kept = os.path.join(ROOT, "build", "experiments", "set-aside")
            os.makedirs(kept, exist_ok=True)
            aside, number = os.path.join(kept, time.strftime("%Y%m%d-%H%M%S-") + claim.file), 0
            while os.path.exists(aside):
                number += 1
                aside = os.path.join(kept, time.strftime("%Y%m%d-%H%M%S-") + f"{number}-{claim.file}")
            os.replace(path, aside)
            print(f"  {claim.file}: {why}; kept as {os.path.relpath(aside, ROOT)}")
        must, more = self.stamp(claim)
        if claim.device not in self.peaks:
            self.peaks[claim.device] = json.dumps(self.answer("peak", "--device", claim.device))
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Table(path, {**must, **more, "peaks": self.peaks[claim.device], "begun": date})

    def plan(self, claim):
        """[(hash, repetition, parameters)]: all points, then all again, so that contestants interleave."""
        points = self.answer("points", claim.name, *self.settings(claim))
        repeats = min(claim.repeats, self.options.repeats or claim.repeats)
        return [(point_hash(claim.name, claim.device, self.options.seed, self.options.tiny, p), r, p)
                for r in range(repeats) for p in points]

    def run(self, claim):
        """Measures what is missing. True: complete."""
        why = self.missing(claim)
        if why:
            print(f"{claim.name} ({claim.device}): not run: {why}")
            return False
        plan = self.plan(claim)
        table = self.open(claim)
        done = table.done()
        todo = [unit for unit in plan if unit[:2] not in done]
        table.stamp.pop("failed", None)
        begin = time.monotonic()
        failures = []
        progress = Progress(claim.name, len(plan) - len(todo), len(plan))
        program = Program(self, claim)
        for hash_, repeat, parameters in todo:
            progress.step(" ".join(f"{k}={v}" for k, v in parameters.items()))
            reply = program.ask(parameters)
            progress.done += 1
            if "rows" in reply:
                table.add(hash_, repeat, [{**parameters, **row} for row in reply["rows"]])
                continue
            failures.append(f"{json.dumps(parameters)}: {reply['error']}")
            table.stamp["failed"] = failures[0]
            table.write()
        program.close()
        progress.clear()
        for failure in failures:
            print(f"  {claim.name}: {failure}")
        print(f"{claim.name} ({claim.device}): {len(plan) - len(failures)} of {len(plan)} points in "
              f"{os.path.relpath(self.path(claim), ROOT)}, {len(todo)} measured now in {time.monotonic() - begin:.0f} s")
        return not failures


def verdict(runner, claim):
    """(word, why, [what was found per expectation]) of one claim, from its file alone."""
    path = runner.path(claim)
    missing = runner.missing(claim)
    if not os.path.exists(path):
        return "not run", missing or f"no {claim.file}: `{claim.command}`", []
    try:
        table = Table.load(path)
        found, misses = findings(claim, table)
    except TableError as error:
        return "not run", f"{error}: `{claim.command}`", []
    notes = list(table.troubles)
    if "failed" in table.stamp:
        return "not reproduced", table.stamp["failed"], found
    if missing:
        notes.append(f"on {table.stamp['device']}, commit {table.stamp['commit']}; here: {missing}")
    else:
        stale = runner.stale(claim, table)
        notes += [f"stale: {stale}"] if stale else []
        if not stale:
            left = len([u for u in runner.plan(claim) if u[:2] not in table.done()])
            notes += [f"{left} points are still missing"] if left else []
    if misses and claim.why:
        misses.append(f"known: {claim.why}")
    return "not reproduced" if misses else "reproduced", "; ".join(misses + notes), found


def findings(claim, table):
    """What was found per expectation, in words, and those that were missed."""
    found, misses = [], []
    for e in claim.expect:
        numbers = [e.value(part) for part in table.repeats()]
        if not numbers:
            raise TableError(f"{table.path}: it holds no rows")
        middle = statistics.median(numbers)
        text = f"{e.label}: {e.show(middle)}"
        if len(numbers) > 1:
            text += f" [{e.show(min(numbers))}, {e.show(max(numbers))}]"
        found.append(text)
        if not e.low <= middle <= e.high:
            misses.append(f"{text}, expected {e.show(e.low)} to {e.show(e.high)}")
    return found, misses


def check(runner, claims):
    """Prints the verdict on every claim. True: nothing missed its range for an unknown reason."""
    counts, good = {}, True
    for claim in claims:
        word, why, found = verdict(runner, claim)
        counts[word] = counts.get(word, 0) + 1
        good &= word != "not reproduced" or bool(claim.why)
        print(f"\n{claim.name} ({claim.device}): {word}" + (f" ({why})" if why else ""))
        print(f"  {claim.question}\n  {claim.source}; {claim.command}; {claim.file}")
        for line in found:
            print(f"    {line}")
    print("\n" + ", ".join(f"{count} {word}" for word, count in counts.items()))
    return good


def readme_table(runner):
    rows = ["| question | paper, figure | command | minutes | result file | expected range | what we found |",
            "|---|---|---|---|---|---|---|"]
    for claim in CLAIMS:
        path = os.path.join(runner.options.results, claim.file)
        try:
            table = Table.load(path)
            found, misses = findings(claim, table)
            result = f"[`{claim.file}`](results/{claim.file})"
            device = table.stamp["machine"] if claim.device == "cpu" else table.stamp["device"]
            found.append(f"{'**not reproduced**' if misses else 'reproduced'} on {device}")
            if misses and claim.why:
                found.append(claim.why)
        except TableError:
            result, found = f"`{claim.file}`", ["not run yet" if claim.device == "cpu" else "not run: no CUDA device"]
        cells = [claim.question, claim.source, f"`{claim.command}`", f"{claim.minutes:g}", result,
                 "<br>".join(e.range() for e in claim.expect), "<br>".join(found)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def readme(runner, only_check):
    path = os.path.join(HERE, "README.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"run.py: {path}: expected the lines '{BEGIN}' and '{END}'")
    new = f"{head}{BEGIN}\n\n{readme_table(runner)}\n\n{END}{tail}"
    if new == text:
        return True
    if only_check:
        print("experiments/README.md: the table is not up to date: `experiments/run.py readme`")
        return False
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(new)
    os.replace(path + ".new", path)
    print("experiments/README.md: table rewritten")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check", "readme", "list", "sources"])
    parser.add_argument("names", nargs="*", help="experiments; none: all")
    parser.add_argument("--bin", default="build/release/xpyd_experiments", help="the program")
    parser.add_argument("--results", default=os.path.join(HERE, "results"), help="folder of the CSVs")
    parser.add_argument("--device", default="", help="only claims of this device: cpu or cuda")
    parser.add_argument("--repeats", type=int, default=0, help="at most so many repetitions; 0: as the claim says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default="../shared/traces", help="folder of the Mooncake traces")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--no-run", action="store_true", help="check: compare what is there")
    parser.add_argument("--check", action="store_true", help="readme: do not write")
    options = parser.parse_args()
    options.bin = os.path.abspath(os.path.join(ROOT, options.bin))
    if not os.path.isdir(os.path.join(ROOT, options.traces)):
        options.traces = ""
    names = {claim.name for claim in CLAIMS}
    for name in options.names:
        if name not in names:
            raise SystemExit(f"run.py: no experiment '{name}'; there are {', '.join(sorted(names))}")
    claims = [c for c in CLAIMS if (not options.names or c.name in options.names)
              and options.device in ("", c.device)]
    runner = Runner(options)
    if options.command == "list":
        for c in claims:
            print(f"{c.name:20} {c.device:5} {c.minutes:4g} min  {c.question}")
        return 0
    if options.command == "sources":
        print(json.dumps({c.file: sources_stamp(ROOT, c) for c in CLAIMS}, indent=1))
        return 0
    if options.command == "readme":
        return 0 if readme(runner, options.check) else 1
    os.makedirs(options.results, exist_ok=True)
    good = True
    if options.command == "run" or not options.no_run:
        with open(os.path.join(options.results, ".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SystemExit(f"run.py: another run is writing to {options.results}")
            for claim in claims:
                good &= runner.run(claim) or bool(runner.missing(claim))
    if options.command == "check":
        good = check(runner, claims)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrun.py: interrupted: every finished point is kept; the same command goes on", file=sys.stderr)
        sys.exit(130)
