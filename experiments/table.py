"""One result file: a CSV whose leading comment lines say how it was made.

    # experiment: waste          the stamp: experiment, device, machine, commit, seed, peaks, ...
    point,repeat,block,...       `point` is the hash of the row's parameters; a point may have several rows
    8c1f0e2a44,0,16,...

The rows are raw, one set per repetition; readers compute medians and spreads. The file is replaced as a whole after
every repetition, so an interruption leaves it as it was before or after that repetition. """
import csv
import hashlib
import io
import json
import os
import statistics

from evidence import interval


class TableError(Exception):
    """The file cannot be used for what was asked. The message names the file and what was expected."""


def point_hash(experiment, device, seed, tiny, parameters):
    text = json.dumps([experiment, device, seed, tiny, parameters], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Table:
    def __init__(self, path, stamp=None):
        self.path = path
        self.stamp = dict(stamp or {})
        self.columns = ["point", "repeat"]
        self.rows = []  # dicts of strings
        self.troubles = []  # defects of the file, as text; the lines concerned are not in rows

    @staticmethod
    def load(path):
        """Loads the good rows of a file and describes bad ones in `troubles`. Raises TableError if it is no result
        file."""
        try:
            with open(path, newline="", encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise TableError(f"{path}: {error.strerror}")
        except UnicodeDecodeError:
            raise TableError(f"{path}: not UTF-8 text: expected a CSV that run.py wrote")
        table = Table(path)
        lines = text.split("\n")
        n_stamp = 0
        while n_stamp < len(lines) and lines[n_stamp].startswith("# "):
            key, _, value = lines[n_stamp][2:].partition(": ")
            table.stamp[key] = value
            n_stamp += 1
        missing = [key for key in ("experiment", "device", "machine", "commit") if key not in table.stamp]
        if missing:
            raise TableError(f"{path}: no line '# {missing[0]}: ...' at its head: expected a CSV that run.py wrote")
        if not text.endswith("\n"):
            table.troubles.append(f"{path}: line {len(lines)} is cut short: left out")
            lines[-1] = ""
        records = list(csv.reader(lines[n_stamp:]))
        if not records or records[0][:2] != ["point", "repeat"]:
            if any(records):
                raise TableError(f"{path}: the first columns are not point,repeat: expected a CSV that run.py wrote")
            return table
        table.columns = records[0]
        for number, record in enumerate(records[1:], n_stamp + 2):
            if len(record) == len(table.columns):
                table.rows.append(dict(zip(table.columns, record)))
            elif record:
                table.troubles.append(
                    f"{path}: line {number} has {len(record)} fields, expected {len(table.columns)}: left out")
        return table

    def done(self):
        """The set of (point, repeat) that the file holds."""
        return {(row["point"], int(row["repeat"])) for row in self.rows}

    def add(self, point, repeat, rows):
        """Appends the rows of one repetition and replaces the file."""
        for row in rows:
            if len(self.columns) == 2:
                self.columns += row.keys()
            if list(row) != self.columns[2:]:
                raise TableError(f"{self.path}: new rows have columns {','.join(row)}, the file has "
                                 f"{','.join(self.columns[2:])}")
            self.rows.append({"point": point, "repeat": str(repeat), **{k: str(v) for k, v in row.items()}})
        self.write()

    def text(self):
        """The rows in aligned columns."""
        lines = [self.columns[2:]] + [[row[column] for column in self.columns[2:]] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  " + "  ".join(c.ljust(width) for c, width in zip(line, widths)).rstrip() for line in lines)

    def write(self):
        out = io.StringIO()
        for key, value in self.stamp.items():
            out.write(f"# {key}: {value}\n")
        writer = csv.writer(out, lineterminator="\n")
        if len(self.columns) > 2:
            writer.writerow(self.columns)
        writer.writerows([row[c] for c in self.columns] for row in self.rows)
        temporary = self.path + ".new"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(out.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    # The following calls serve claims and figures.

    def samples(self):
        """One table per sample. Each repetition is a sample, or several if the experiment has a column `sample`: time
        slices in which all configurations took turns, or draws of the load."""
        parts = {}
        for row in self.rows:
            key = int(row["repeat"]), int(row.get("sample") or 0)
            if key not in parts:
                parts[key] = Table(self.path, self.stamp)
                parts[key].columns = self.columns
            parts[key].rows.append(row)
        return [parts[key] for key in sorted(parts)]

    def where(self, conditions):
        """The rows that meet conditions (column, whether its value must be among the values, values)."""
        for column, _, _ in conditions:
            self._need(column)
        return [row for row in self.rows if all((row[c] in values) == among for c, among, values in conditions)]

    def select(self, **where):
        """The rows whose columns have these values. Raises TableError if the file has no such column."""
        return self.where([(column, True, [str(value)]) for column, value in where.items()])

    def numbers(self, column, rows):
        """The column of these rows as numbers."""
        self._need(column)
        try:
            return [float(row[column]) for row in rows]
        except ValueError:
            bad = next(row[column] for row in rows if not row[column].replace(".", "").isdigit())
            raise TableError(f"{self.path}: column {column} holds '{bad}', expected a number"
                             + ("" if bad else ": there are too few samples for this percentile"))

    def distinct(self, column, **where):
        """The distinct values of a column, in the order of the file."""
        self._need(column)
        return list(dict.fromkeys(row[column] for row in self.select(**where)))

    def values(self, column, **where):
        return self.numbers(column, self.select(**where))

    def __call__(self, column, **where):
        """The median of a column over the matching rows, which must be of one point in each sample."""
        rows = self.select(**where)
        points = {(row["repeat"], row.get("sample"), row["point"]) for row in rows}
        if not rows or len(points) > len({point[:2] for point in points}):
            raise TableError(f"{self.path}: {len({point[2] for point in points})} points with "
                             f"{', '.join(f'{c}={v}' for c, v in where.items())}, expected one")
        return statistics.median(self.numbers(column, rows))

    def curve(self, x, y, **where):
        """[(x, median of y, its interval)], with x ascending, as a figure draws it."""
        self._need(x)
        at = {}
        for row in self.select(**where):
            at.setdefault(float(row[x]), []).append(row)
        numbers = {key: self.numbers(y, rows) for key, rows in at.items()}
        return [(key, statistics.median(of), *interval(of)) for key, of in sorted(numbers.items())]

    def _need(self, column):
        if column not in self.columns:
            raise TableError(f"{self.path}: no column '{column}'; it has {','.join(self.columns)}")
