"""Checks the standard evaluation tool, a tokenizer loader, and the page's arithmetic against BIN:
python lm_eval_client.py BIN

lm-eval's loglikelihood task (tests/clients/kv_points.py) over the demo model must find nearly every fact. The logprobs that it
sums must equal those that the server gives for the same tokens by other requests. The exit code is 0 only if all held.
"""
import http.client
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, "tests/clients")
import kv_points  # noqa: E402

failures = 0


def check(what, good):
    global failures
    failures += not good
    print(f"{'ok' if good else 'FAILED'}  {what}")


def post(url, body):
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def tokenizer(binary, folder):
    from transformers import AutoTokenizer
    demo = os.path.join(folder, "tokenizer")
    subprocess.run([binary, "export", demo], check=True, stderr=subprocess.DEVNULL)
    with kv_points.Server(binary, demo, "--kv-bytes", "16MiB") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("GET", "/v1/models")
        card = json.loads(connection.getresponse().read())["data"][0]
        loaded = AutoTokenizer.from_pretrained(card["root"])  # as `vllm bench serve` does
        check("root of /v1/models is a folder from which AutoTokenizer loads", loaded.vocab_size > 256)
        text = "The key of box 17 is amber. Ünïcode, too."
        status, answer = post(server.url, {"prompt": text, "max_tokens": 1, "return_token_ids": True, "model": card["root"]})
        check("that path is a model name", status == 200)
        check("the same tokens", status == 200 and loaded.encode(text) == answer["choices"][0]["prompt_token_ids"])
        ids = loaded.encode(text)
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0}
        echo = post(server.url, {**asked, "echo": True, "logprobs": 1})[1]["choices"][0]["logprobs"]["token_logprobs"]
        named = post(server.url, {**asked, "prompt_logprobs": 0})[1]["choices"][0]["prompt_logprobs"]
        check("echo with logprobs and prompt_logprobs agree",
              echo[0] is None and named[0] is None and
              all(e == n[str(i)]["logprob"] for e, n, i in zip(echo[1:-1], named[1:], ids[1:])))
        # Token by token, as without echo: the logprob of the next token among the likeliest.
        agree = 0
        for at in range(1, 9):
            one = post(server.url, {"prompt": ids[:at], "max_tokens": 1, "temperature": 0, "logprobs": 20, "return_token_ids": True})
            choice = one[1]["choices"][0]
            if choice["token_ids"] == [ids[at]]:
                agree += abs(choice["logprobs"]["token_logprobs"][0] - echo[at]) < 1e-5
            else:
                agree += loaded.decode([ids[at]]) not in choice["logprobs"]["top_logprobs"][0] or abs(
                    choice["logprobs"]["top_logprobs"][0][loaded.decode([ids[at]])] - echo[at]) < 1e-5
        check("... and with one request per token", agree == 8)


def page():
    """Runs the page's gapsOf() in a JavaScript engine. Tokens of one read share its time, and no gap is 0.00 ms."""
    from py_mini_racer import MiniRacer
    source = re.search(r"^function gapsOf\(reads\) \{.*?^\}", pathlib.Path("server/openai/page.html").read_text(), re.M | re.S).group(0)
    engine = MiniRacer()
    engine.eval(source)
    check("the page: three tokens in one read of 30 ms took 10 ms each",
          json.loads(engine.eval("JSON.stringify(gapsOf([[100, 1], [110, 1], [140, 3]]))")) == [10, 10, 10, 10])
    check("the page: an answer that came in one read has no gaps", json.loads(engine.eval("JSON.stringify(gapsOf([[100, 7]]))")) == [])


def main():
    binary = os.path.abspath(sys.argv[1])
    page()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer(binary, folder)
        found = kv_points.measure(binary, "f32", 16, 12, 1, folder, letters=0)
        print(found)
        check("lm-eval's local-completions: the demo model finds the facts", found["accuracy"] >= 14 / 16)
    check("xpyd export: what is there stays",
          subprocess.run([binary, "export", "tests"], stderr=subprocess.DEVNULL).returncode == 2)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
