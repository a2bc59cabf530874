"""Which results are older than the code of their folders, and which expected ranges are younger than their results. Git
knows both."""
import functools
import glob
import os
import re
import subprocess

INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.M)
TEXT = re.compile(r"""'(?:\\.|[^'\\\n])'|"(?:\\.|[^"\\\n])*"|//[^\n]*|\s+""")  # literals, comments, space
REGISTERED = re.compile(r'^REGISTER_EXPERIMENT\(\s*"([^"]+)",\s*"([^"]+)"', re.M)


def git(root, *words):
    """The lines of git's output; None if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


@functools.lru_cache(maxsize=None)
def has_history(root):
    top = git(root, "rev-parse", "--show-toplevel")
    return bool(top) and os.path.samefile(top[0], root)


def text(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


@functools.lru_cache(maxsize=None)
def registered(root):
    """{(part, device): the file that registers it}."""
    found = {}
    for path in glob.glob(os.path.join(root, "experiments", "**", "*.c[cu]"), recursive=True):
        path = os.path.relpath(path, root)
        found.update({key: path for key in REGISTERED.findall(text(root, path))})
    return found


@functools.lru_cache(maxsize=None)
def brings(root, path):
    """The files that a file includes, and the sources with a header's name before their suffix or before an
    underscore."""
    found = [name for name in INCLUDE.findall(text(root, path)) if os.path.exists(os.path.join(root, name))]
    if path.endswith(".h"):
        stem = os.path.join(root, path[:-2])
        found += [os.path.relpath(f, root) for f in glob.glob(stem + ".c[cu]") + glob.glob(stem + "_*.c[cu]")]
    return found


def paths_of(root, part):
    """The folders on which a part depends; of experiments/ the files. A folder counts whole, so a table's rows count,
    too."""
    files = registered(root)
    first = files.get((part.part, part.device)) or files.get((part.part, "any"))
    if not first:
        raise SystemExit(f"run.py: no file of experiments/ registers '{part.part}' for device {part.device}")
    seen, left = {first}, [first]
    while left:
        new = set(brings(root, left.pop())) - seen
        seen |= new
        left += new
    return sorted({f if os.path.dirname(f) == "experiments" else os.path.dirname(f) + "/" for f in seen})


@functools.lru_cache(maxsize=None)
def code(root, commit, path):
    """A file's text without comments and, outside literals, without space."""
    lines = git(root, "show", f"{commit}:{path}") or []
    return TEXT.sub(lambda found: found[0] if found[0][0] in "'\"" else "", "\n".join(lines))


@functools.lru_cache(maxsize=None)
def changed(root, old, new, paths):
    """The files whose code differs between two commits; a comment or a line break changes no result."""
    found = git(root, "diff", "--name-only", "--no-renames", old, new, "--", *paths, ":!*.md", ":!*.csv", ":!*.py")
    return found and [path for path in found if code(root, old, path) != code(root, new, path)]


def since(root, part, old, new="HEAD"):
    """What changed the folders of a part between two commits, as text; "" if nothing did, or in a bundle, which has no
    history."""
    if old == new or not has_history(root):
        return ""
    if old.endswith("-dirty"):
        return f"measured at {old}, a tree that no commit has"
    found = changed(root, old, new, tuple(paths_of(root, part)))
    if found is None:
        return f"measured at commit {old}, which is not in this history"
    more = f" and {len(found) - 1} other files" if found[1:] else ""
    return f"measured at commit {old}; changed since then: {found[0]}{more}" if found else ""


def younger(root, claims, old):
    """The claims whose line of expected.csv was committed after `old`, or not at all."""
    blamed = git(root, "blame", "-s", "-l", "--root", "experiments/expected.csv") or []
    before = set(git(root, "rev-list", old) or [])
    return [c for c in claims if c.line <= len(blamed) and blamed[c.line - 1].split()[0] not in before]
