"""Measures the accuracy that quantised KV costs, with the standard tool: EleutherAI's lm-eval, `local-completions`.

    build/clients-venv/bin/python tests/clients/kv_points.py --bin build/release/xpyd --kv-dtype int4

A server runs the demo model with that KV. The task is multiple choice over facts that training never saw. Each question stands
at the end of a text that states its fact among others, and offers four values of the text. lm-eval asks for the loglikelihood
of each value (echo, logprobs, max_tokens 1) and counts how often the right one is the likeliest. This prints one line of JSON.
`answers` has 1 or 0 for each question, so that two KV types can be compared question by question. `make check STAGE=clients`
makes the environment.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../experiments/demo_model"))
import data  # noqa: E402

TASK = """task: xpyd_facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


LETTERS = 3  # of a made-up word, with one token each


def documents(count, facts, seed, letters=LETTERS):
    """Yields one question for each text. The values are made-up words, which the model copies letter by letter and less
    surely than its own words. With its own words (letters 0) it is right at any length, and no KV type costs a point."""
    rng = random.Random(seed)
    while count > 0:
        known = data.Facts(rng, facts, may_ask=data.held_out, may_state=lambda kind, number: True)
        if not known.asked:
            continue
        value = known.value
        if letters:
            words = set()
            while len(words) < facts:
                words.add("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=letters)))
            value = dict(zip(known.stated, rng.sample(sorted(words), facts)))
        text = " ".join(data.sentence(key, value[key]) for key in known.stated)
        key = rng.choice(known.asked)
        attribute, thing, _ = data.KINDS[key[0]]
        choices = rng.sample([value[key], *rng.sample(sorted(set(value.values()) - {value[key]}), 3)], 4)
        count -= 1
        yield {"context": f"{text} The {attribute} of {thing} {key[1]} is", "choices": choices,
               "answer": choices.index(value[key])}


class Server:
    """`BIN serve` of a folder on a free port, for the duration of a with block."""

    def __init__(self, binary, *options):
        self.process = subprocess.Popen([binary, "serve", "--port", "0", *options], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                self.url = f"http://127.0.0.1:{found.group(1)}"
                # The log must be read, because a full pipe would stop the server.
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return
        raise SystemExit("kv_points: the server did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)


def measure(binary, kv_dtype, questions, facts, seed, folder, letters=LETTERS):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["HF_HOME"] = os.path.join(folder, "hf")
    import lm_eval
    from lm_eval.tasks import TaskManager
    demo, task = os.path.join(folder, "demo"), pathlib.Path(folder, "task")
    subprocess.run([binary, "export", demo], check=True, stderr=subprocess.DEVNULL)
    task.mkdir()
    rows = [json.dumps(row) for row in documents(questions, facts, seed, letters)]
    (task / "facts.jsonl").write_text("\n".join(rows))
    (task / "facts.yaml").write_text(TASK.format(file=task / "facts.jsonl"))
    with Server(binary, demo, "--topology", "1C", "--kv-dtype", kv_dtype) as server:
        found = lm_eval.simple_evaluate(
            model="local-completions", tasks=["xpyd_facts"], task_manager=TaskManager(include_path=str(task), include_defaults=False),
            model_args={"base_url": server.url + "/v1/completions", "model": demo, "tokenizer": demo, "num_concurrent": 4,
                        "add_bos_token": True, "max_length": 4096},
            bootstrap_iters=0, verbosity="ERROR", log_samples=True)
    results = found["results"]["xpyd_facts"]
    samples = sorted(found["samples"]["xpyd_facts"], key=lambda sample: sample["doc_id"])
    # The logprob of the right answer is a finer measure than how often it wins.
    right = [float(s["resps"][s["doc"]["answer"]][0][0]) for s in samples]
    return {"accuracy": results["acc,none"], "questions": len(rows), "right_logprob": sum(right) / len(right),
            "answers": "".join(str(int(s["acc"])) for s in samples), "lm_eval": lm_eval.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/xpyd")
    parser.add_argument("--kv-dtype", default="int4", choices=["f32", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"])
    parser.add_argument("--questions", type=int, default=360)
    parser.add_argument("--facts", type=int, default=24, help="of each text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(os.path.abspath(options.bin), options.kv_dtype, options.questions, options.facts, options.seed, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
