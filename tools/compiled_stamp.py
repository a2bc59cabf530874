"""The head of a CSV that `make cuda` writes: lines `# key: value`, like those of results
(experiments/results/README.md), with the compiler instead of the machine's peaks. The outcome of a compilation does not
depend on the machine."""
import os
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def said(*words):
    """The last line of a program's output, or "unknown" if there is none."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip().split("\n")[-1] or "unknown"
    except OSError:
        return "unknown"


def commit():
    """The commit of the sources. experiments/results does not count as a change, because this CSV is being written
    there."""
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!experiments/results"]
    return said("git", "describe", "--always") + ("-dirty" if subprocess.run(changed, cwd=ROOT).returncode else "")


def head(name):
    nvcc = os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc") if os.environ.get("CUDA_HOME") else "nvcc"
    stamp = {"experiment": name, "device": "none: compiled for sm_80 and sm_90a",
             "commit": commit(), "compiler": said(nvcc, "--version"),
             "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return "".join(f"# {key}: {value}\n" for key, value in stamp.items())
