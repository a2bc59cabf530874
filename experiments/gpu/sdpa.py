#!/usr/bin/env python3
"""Yardsticks: PyTorch's scaled_dot_product_attention, one backend at a time, on the shapes of the
prefill rows of xpyd_gpu_report (experiments/gpu/attention.cu). CUDNN_ATTENTION is cuDNN's own kernel.

Prints CSV, one row per backend: yardstick,backend,shape,ms,tflops,versions. A backend that does not take a
shape is named on stderr. Times are medians of rounds in which the backends take turns.
Exit code: 0; 1: a result is wrong, or no backend ran; 3: no PyTorch or no card.

Expected on an H200 (arithmetic): 4 * 32 * 128 * 16384^2 / 2 = 2.2 TFLOP. FlashAttention-2 (what FLASH_ATTENTION
is in most builds) at some 350 TFLOP/s: 6.3 ms; cuDNN at some 550: 4.0 ms (FlashAttention-3, arXiv 2407.08608, Fig. 5).
"""
import argparse
import sys

SHAPES = [(1, 16384, 32, 8, 128)]  # sequences, tokens, query heads, KV heads, head_dim; causal, bf16
BACKENDS = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]


def fail(why):
    print("sdpa.py: " + why, file=sys.stderr)
    sys.exit(3)


def wrong(torch, out, q, k, v):
    """Some tokens against double precision; "" when all are right."""
    n, heads, dim = q.shape[2], q.shape[1], q.shape[3]
    for token in (0, n // 3, n - 1):
        for head in (0, heads - 1):
            at = head * k.shape[1] // heads
            scores = k[0, at, : token + 1].double() @ q[0, head, token].double() / dim**0.5
            want = torch.softmax(scores, 0) @ v[0, at, : token + 1].double()
            error = (out[0, head, token].double() - want).abs().max().item()
            if not error < 0.02:
                return f"token {token}, head {head}: off by {error:.3g}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=0, help="instead of the report's 16384")
    options = parser.parse_args()
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attend
    except ImportError as error:
        fail(f"needs PyTorch 2.5 or later: {error}")
    if not torch.cuda.is_available():
        fail("PyTorch finds no CUDA card")
    versions = f"torch {torch.__version__} cudnn {torch.backends.cudnn.version()} cuda {torch.version.cuda}"

    print("yardstick,backend,shape,ms,tflops,versions")
    all_right, ran = True, 0
    for n_seqs, tokens, heads, kv_heads, dim in SHAPES:
        tokens = options.tokens or tokens
        shape = f"prefill {tokens} causal bf16 heads {heads}/{kv_heads} dim {dim}"
        torch.manual_seed(1)

        def uniform(n_heads):
            x = torch.empty(n_seqs, n_heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
            return x.uniform_(-1, 1)

        q, k, v = uniform(heads), uniform(kv_heads), uniform(kv_heads)
        timed = []
        for name in BACKENDS:
            # Grouped heads where the backend knows them; else KV is repeated, before the time is taken.
            for grouped in (True, False):
                keys, values = (k, v) if grouped else (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))

                def run(name=name, keys=keys, values=values, grouped=grouped):
                    with sdpa_kernel(getattr(SDPBackend, name)):
                        return attend(q, keys, values, is_causal=True, enable_gqa=grouped)

                try:
                    out = run()
                    torch.cuda.synchronize()
                except RuntimeError as error:
                    how = "grouped heads" if grouped else "repeated heads"
                    print(f"{name}, {how}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                if why := wrong(torch, out, q, k, v):
                    print(f"{name}: WRONG: {why}", file=sys.stderr)
                    all_right = False
                else:
                    timed.append((name, shape + ("" if grouped else " KV repeated"), run, []))
                break
        for run_number in range(options.rounds + 2):  # the first two warm up
            for name, _, run, times in timed:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                if run_number >= 2:
                    times.append(begin.elapsed_time(end))
        flops = 4 * n_seqs * heads * dim * tokens * (tokens + 1) / 2
        for name, what, _, times in timed:
            ms = sorted(times)[len(times) // 2]
            print(f"sdpa,{name},{what},{ms:.4f},{1e-9 * flops / ms:.1f},{versions}")
            ran += 1
    sys.exit(0 if all_right and ran else 1)


if __name__ == "__main__":
    main()
