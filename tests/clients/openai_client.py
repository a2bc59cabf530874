"""Drives `BIN serve` with the openai package and raw HTTP: python openai_client.py BIN

The model is ../shared/models/stories260k if it is there, otherwise a folder of random weights that this
script writes. Every check prints a line. The exit code is 0 only if all held.
"""

import asyncio
import contextlib
import http.client
import io
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import openai

STORIES = pathlib.Path("../shared/models/stories260k")


def write_dummy_model(folder: pathlib.Path) -> None:
    """Writes config.json of a tiny Llama, and a byte-level tokenizer.json with one token per byte."""
    vocab, extra = {}, 0x100
    for byte in range(256):
        own = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        vocab[chr(byte if own else extra)] = byte
        extra += not own
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 257,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "bos_token_id": 256, "eos_token_id": 256, "tie_word_embeddings": True,
    }
    tokenizer = {
        "added_tokens": [{"id": 256, "content": "<|end|>", "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


class Server:
    def __init__(self, binary: str, *words: str | pathlib.Path):
        self.process = subprocess.Popen(
            [binary, "serve", *words, "--port", "0", "--kv-bytes", "16MiB"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"on http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        else:
            sys.exit("the server did not start:\n" + "".join(self.log))
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()  # matters after a failure; otherwise it has ended
        self.process.wait()

    def terminate(self):
        """Sends SIGTERM. Returns the exit code and the rest of the log."""
        self.process.send_signal(signal.SIGTERM)
        try:
            rest = self.process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            return "did not end", ""
        return self.process.returncode, rest

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = dict(headers or {})
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply, text

    def metric(self, name):
        """Returns the sum over all series of that name."""
        text = self.request("GET", "/metrics")[1]
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if re.match(re.escape(name) + r"[{ ]", line))


checks = failures = 0


def check(what: str, holds) -> None:
    global checks, failures
    checks += 1
    failures += not holds
    print(("ok    " if holds else "FAILED"), what, flush=True)


def check_error(what, kind, call, param=None, code=None):
    try:
        call()
        check(f"{what}: raises {kind.__name__}", False)
    except openai.APIStatusError as error:
        check(f"{what}: {kind.__name__}, param {param}, code {code}",
              type(error) is kind and error.param == param and error.code == code
              and bool(error.body["message"]))


def completions(client, model):
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=12,
                                      temperature=0)
    check("completion: ends by length after 12 tokens",
          whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12)
    check("completion: usage adds up",
          whole.usage.total_tokens == whole.usage.prompt_tokens + 12 and whole.usage.prompt_tokens > 0)
    chunks = list(client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}))
    check("completion stream: the same text",
          "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text)
    check("completion stream: one chunk per token, then usage",
          len(chunks) == 13 and not chunks[-1].choices and chunks[-1].usage == whole.usage.model_copy(
              update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}))
    plain = list(client.completions.create(model=model, prompt="a", max_tokens=3, stream=True))
    check("completion stream: no usage chunk unless asked", all(len(c.choices) == 1 for c in plain))

    many = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=24, seed=7)
    check("two prompts, two choices: indices 0 to 3", [c.index for c in many.choices] == [0, 1, 2, 3])
    again = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=24, seed=7)
    check("the same seed gives the same texts",
          [c.text for c in many.choices] == [c.text for c in again.choices])
    check("choices of one seed differ from each other",
          many.choices[0].text != many.choices[1].text or many.choices[2].text != many.choices[3].text)

    echo = client.completions.create(model=model, prompt="Once", echo=True, max_tokens=2, temperature=0)
    check("echo begins with the prompt", echo.choices[0].text.startswith("Once"))
    scored = client.completions.create(model=model, prompt="Once", max_tokens=5, temperature=0, logprobs=3)
    logprobs = scored.choices[0].logprobs
    check("logprobs: five tokens, three alternatives, greedy takes the best",
          len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
          and all(len(top) == 3 for top in logprobs.top_logprobs)
          and all(lp == max(top.values()) <= 0
                  for lp, top in zip(logprobs.token_logprobs, logprobs.top_logprobs)))
    stop = whole.choices[0].text[3:6]
    stopped = client.completions.create(model=model, prompt="Once upon a time", max_tokens=12,
                                        temperature=0, stop=[stop])
    check("a stop string ends the text before it",
          stopped.choices[0].finish_reason == "stop" and stop not in stopped.choices[0].text
          and whole.choices[0].text.startswith(stopped.choices[0].text))
    long = client.completions.create(model=model, prompt="a", max_tokens=40, temperature=0,
                                     extra_body={"ignore_eos": True, "top_k": 1})
    check("ignore_eos: 40 tokens", long.usage.completion_tokens == 40)


def chat(client, model):
    messages = [{"role": "system", "content": "Tell stories."},
                {"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}]
    whole = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=10,
                                           temperature=0, logprobs=True, top_logprobs=2)
    check("chat: an assistant's message",
          whole.choices[0].message.role == "assistant" and whole.choices[0].message.content is not None)
    content = whole.choices[0].logprobs.content
    check("chat: logprobs with bytes and two alternatives",
          len(content) == whole.usage.completion_tokens
          and all(len(t.top_logprobs) == 2 and t.bytes is not None for t in content))
    chunks = list(client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=10, temperature=0, stream=True,
        stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check("chat stream: the same text", text == whole.choices[0].message.content)
    check("chat stream: the role once, with the first chunk",
          [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
          and chunks[0].choices[0].delta.role == "assistant")
    check("chat stream: the reason in the last chunk",
          chunks[-2].choices[0].finish_reason in ("length", "stop")
          and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens)
    with client.chat.completions.stream(model=model, messages=messages, max_tokens=5) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        snapshot = stream.current_completion_snapshot
    check("chat stream helper: gathers the deltas", snapshot.choices[0].message.content == text)


def errors(client, model, server):
    def create(**change):
        return lambda: client.completions.create(**{"model": model, "prompt": "a", **change})

    bad = openai.BadRequestError
    check_error("max_tokens 0", bad, create(max_tokens=0), "max_tokens")
    check_error("temperature -1", bad, create(temperature=-1), "temperature")
    check_error("n 9", bad, create(n=9), "n")
    check_error("prompt too long", bad, create(prompt=[5] * 100000), "prompt", "context_length_exceeded")
    check_error("unknown model", openai.NotFoundError, create(model="no-such"), "model", "model_not_found")
    check_error("empty messages", bad,
                lambda: client.chat.completions.create(model=model, messages=[]), "messages")
    check_error("tools", bad, lambda: client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {"name": "f"}}]), "tools")
    check("deep JSON is a 400", server.request("POST", "/v1/completions", "[" * 100000)[0].status == 400)
    check("invalid UTF-8 is a 400",
          server.request("POST", "/v1/completions", b'{"prompt":"\xff"}')[0].status == 400)
    check("GET of a POST route is a 405 with Allow",
          server.request("GET", "/v1/completions")[0].getheader("Allow") == "POST")
    check("text/plain is a 415",
          server.request("POST", "/v1/completions", "{}", {"Content-Type": "text/plain"})[0].status == 415)


def small_routes(client, model, server):
    models = client.models.list()
    check("models: one card with root and max_model_len",
          len(models.data) == 1 and models.data[0].id == model and models.data[0].model_extra["root"]
          and models.data[0].model_extra["max_model_len"] == 512)
    tokens = json.loads(server.request("POST", "/tokenize", json.dumps(
        {"model": model, "prompt": "Once upon", "add_special_tokens": False}))[1])["tokens"]
    back = json.loads(server.request("POST", "/detokenize", json.dumps({"model": model, "tokens": tokens}))[1])
    check("detokenize undoes tokenize", back["prompt"] == "Once upon")
    for path in ("/health", "/stats", "/metrics", "/"):
        check(f"GET {path}", server.request("GET", path)[0].status == 200)


async def concurrent(server, model):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        async def one(i):
            stream = await client.completions.create(model=model, prompt=f"Story {i % 5}:", max_tokens=20,
                                                     temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        alone = [await one(i) for i in range(5)]
        together = await asyncio.gather(*(one(i) for i in range(40)))
        check("40 streams at once give the texts of one at a time",
              all(text == alone[i % 5] for i, text in enumerate(together)))


def sessions(client, model):
    """The server keeps the conversation, and a client sends only what a turn adds."""
    generation = "new"

    def turn(text, **more):
        nonlocal generation
        answer = client.completions.create(model=model, prompt=text, max_tokens=4, temperature=0, extra_body={
            "session_id": "s1", "session_generation": generation, "ignore_eos": True, **more})
        generation = "new" if "session_end" in more else answer.session_generation
        return answer

    first = turn("Once upon")
    second = turn(" a time")
    check("a session's prompt holds its turn before",
          second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens)
    check_error("n > 1 in a session", openai.BadRequestError, lambda: turn("x", n=2), "n", None)
    turn(" and", session_end=True)
    check("session_end drops it", turn("Once upon").usage.prompt_tokens == first.usage.prompt_tokens)
    check("the same turn again gives the same text", turn(" a time").choices[0].text == second.choices[0].text)


def disconnect(client, model, server):
    aborted = 'vllm:request_success_total{model_name="%s",engine="all",finished_reason="abort"}' % model
    before = server.metric(aborted)
    stream = client.completions.create(model=model, prompt="a", max_tokens=400, stream=True,
                                       extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.time() + 20
    while time.time() < deadline:
        idle = server.metric("vllm:num_requests_running") == 0
        in_use = server.metric("vllm:kv_cache_usage_perc")
        if idle and in_use == 0:
            break
        time.sleep(0.05)
    check("a client that leaves frees its blocks", idle and in_use == 0)
    check("... and is counted as an abort, or had been served", server.metric(aborted) - before in (0, 1))


def page(binary):
    """Runs the Python of server/openai/README.md with the demo model."""
    text = pathlib.Path("server/openai/README.md").read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)).replace("\nturn(", "\nprint(turn(").rstrip() + ")"
    with Server(binary) as server, contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
    check("the page's Python prints what the page says", printed.getvalue().startswith(" The key of box 17 is amber.\n"))
    check("... and its second turn knows the first", printed.getvalue().count("amber") >= 2)


def main() -> int:
    binary = sys.argv[1]
    with tempfile.TemporaryDirectory() as scratch:
        if STORIES.exists():
            folder, options = STORIES, ("--chat-template", "plain")
        else:
            folder, options = pathlib.Path(scratch) / "tiny", ("--chat-template", "plain", "--load-format", "dummy")
            folder.mkdir()
            write_dummy_model(folder)
        print(f"openai {openai.__version__}, model {folder}")
        with Server(binary, folder, "--topology", "1P1D", *options) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
            model = client.models.list().data[0].id
            small_routes(client, model, server)
            completions(client, model)
            chat(client, model)
            errors(client, model, server)
            sessions(client, model)
            asyncio.run(concurrent(server, model))
            disconnect(client, model, server)
            client.close()
            code, log = server.terminate()
            check("SIGTERM: drains and exits 0", code == 0)
            check("the log names requests and holds no prompt", "request id=" in log and "Once upon" not in log)

        key = pathlib.Path(scratch) / "key"
        key.write_text("secret\n")
        key.chmod(0o600)
        with Server(binary, folder, "--topology", "1C", "--api-key-file", str(key), *options) as server:
            wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="guess", max_retries=0)
            check_error("wrong key", openai.AuthenticationError, wrong.models.list, None, "invalid_api_key")
            right = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
            check("right key", len(right.models.list().data) == 1)
            check("health needs no key", server.request("GET", "/health")[0].status == 200)
            check("SIGTERM again", server.terminate()[0] == 0)
    page(binary)
    print(f"{checks - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
