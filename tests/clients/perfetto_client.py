"""Lets Perfetto's trace processor read what `BIN trace` makes of a live run's log: python perfetto_client.py BIN

The package comes from PyPI, but it fetches the processor itself, a binary, from elsewhere. Where that download fails, this
script says so, and `make test` alone checks the format ([trace]).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from perfetto.trace_processor import TraceProcessor


def main(binary: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        log, trace = pathlib.Path(folder) / "log", pathlib.Path(folder) / "trace.json"
        subprocess.run([binary, "generate", "--prompt", "The key of box 17 is amber. The key of box 17 is", "--topology", "1P1D",
                        "--max-tokens", "4", "--kv-bytes", "16MiB", "--event-log", str(log)],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with trace.open("wb") as out:
            subprocess.run([binary, "trace", str(log)], check=True, stdout=out, stderr=subprocess.DEVNULL)
        events = json.loads(trace.read_text())["traceEvents"]
        try:
            processor = TraceProcessor(trace=str(trace))
        except Exception as e:  # whatever way the download fails
            print(f"perfetto: not checked, the trace processor cannot be had here: {type(e).__name__}")
            return 0
        spans = [e for e in events if e["ph"] == "X"]
        found = {
            "slices": next(iter(processor.query("select count(*) as n from slice"))).n,
            "counters": next(iter(processor.query("select count(*) as n from counter"))).n,
            "errors": [(row.name, row.value) for row in
                       processor.query("select name, value from stats where severity = 'error' and value > 0")],
        }
        processor.close()
        print("perfetto:", found)
        good = found["slices"] == len(spans) and found["counters"] > 0 and not found["errors"]
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
