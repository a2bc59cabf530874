#!/usr/bin/env python3
"""Yardsticks for attention: PyTorch's scaled_dot_product_attention, one backend at a time, on the shapes of the attention
rows of xpyd_gpu_report (experiments/gpu/attention.cu). The backend CUDNN_ATTENTION is cuDNN's own kernel.

Each backend that works runs a second time over page groups. K and V then have the layout of a vAttention slot (token, head,
dim), at addresses behind which physical page groups are mapped in random order. The kernels are unmodified. Their results
are checked and compared bit for bit. This tests vAttention's claim of portability (ASPLOS'25, section 7.1).

The script prints CSV, one row per backend and memory: yardstick,backend,shape,ms,tflops,versions. A backend that does not
accept a shape is named on stderr. Times are medians over rounds in which the backends take turns.
Exit code: 0; 1: a result is wrong, or no backend ran; 3: no PyTorch or no GPU.

Expected on an H200 (arithmetic): 4 * 32 * 128 * 16384^2 / 2 = 2.2 TFLOP. FlashAttention-2 (the kernel behind FLASH_ATTENTION
in most builds) at about 350 TFLOP/s takes 6.3 ms; cuDNN at about 550 takes 4.0 ms (FlashAttention-3, arXiv 2407.08608, Fig. 5).
"""
import argparse
import ctypes
import random
import sys

# sequences, query tokens of each (causal; the whole prompt in prefill), KV tokens, query heads, KV heads, head_dim; bf16
SHAPES = [(1, 8192, 8192, 32, 8, 128), (1, 16384, 16384, 32, 8, 128), (64, 1, 8192, 64, 8, 128)]
BACKENDS = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]


def fail(why):
    print("sdpa.py: " + why, file=sys.stderr)
    sys.exit(3)


def wrong(torch, out, q, k, v):
    """Compares some tokens of the last sequence with double precision. Returns "" if all are right, else what is wrong."""
    n, heads, dim = q.shape[2], q.shape[1], q.shape[3]
    for token in (0, n // 3, n - 1):
        seen = k.shape[2] - n + token + 1
        for head in (0, heads - 1):
            at = head * k.shape[1] // heads
            scores = k[-1, at, :seen].double() @ q[-1, head, token].double() / dim**0.5
            want = torch.softmax(scores, 0) @ v[-1, at, :seen].double()
            error = (out[-1, head, token].double() - want).abs().max().item()
            if not error < 0.02:
                return f"token {token}, head {head}: off by {error:.3g}"
    return ""


class Location(ctypes.Structure):  # CUmemLocation
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location),
                ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class PageGroups:
    """Memory for `n` 16-bit values, mapped as base/device/page_groups_cuda.cu maps it. It is never freed; the end of the
    process frees it."""

    def __init__(self, n, library="libcuda.so.1"):
        cuda = ctypes.CDLL(library)

        def call(name, *args):
            code = getattr(cuda, name)(*args)
            if code:
                raise RuntimeError(f"{name}: error {code}")

        u64, size_t, zero = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64(0)
        on_card = Location(1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE
        what = Properties(type=1, location=on_card)  # CU_MEM_ALLOCATION_TYPE_PINNED
        group = size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(group), ctypes.byref(what), 0)
        count = -(-2 * n // group.value)
        base = u64()
        call("cuMemAddressReserve", ctypes.byref(base), size_t(count * group.value), size_t(0), zero, zero)
        places = list(range(count))
        random.Random(1).shuffle(places)
        for place in places:
            handle = u64()
            call("cuMemCreate", ctypes.byref(handle), group, ctypes.byref(what), zero)
            call("cuMemMap", u64(base.value + place * group.value), group, size_t(0), handle, zero)
        access = Access(location=on_card, flags=3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", base, size_t(count * group.value), ctypes.byref(access), size_t(1))
        # Neither NumPy nor this interface has bf16.
        self.__cuda_array_interface__ = {"shape": (n,), "typestr": "<i2", "data": (base.value, False),
                                         "strides": None, "version": 3}


def over_page_groups(torch, x):
    """Copies x [sequences, heads, tokens, dim] into page groups, with the layout [sequence, token, head, dim]."""
    flat = torch.as_tensor(PageGroups(x.numel()), device="cuda").view(torch.bfloat16)
    slot = flat.view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    slot.copy_(x)
    return slot


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=0, help="KV tokens, instead of those of the report")
    options = parser.parse_args()
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attend
    except ImportError as error:
        fail(f"it needs PyTorch 2.5 or later: {error}")
    if not torch.cuda.is_available():
        fail("PyTorch finds no CUDA device")
    versions = f"torch {torch.__version__} cudnn {torch.backends.cudnn.version()} cuda {torch.version.cuda}"

    print("yardstick,backend,shape,ms,tflops,versions")
    all_right, ran = True, 0
    for n_seqs, asking, tokens, heads, kv_heads, dim in SHAPES:
        prefill = asking > 1
        tokens = options.tokens or tokens
        asking = tokens if prefill else 1
        what = f"prefill {tokens} causal" if prefill else f"decode {n_seqs} x {tokens}"
        shape = f"{what} bf16 heads {heads}/{kv_heads} dim {dim}"
        torch.manual_seed(1)

        def uniform(n_heads, n):
            x = torch.empty(n_seqs, n_heads, n, dim, device="cuda", dtype=torch.bfloat16)
            return x.uniform_(-1, 1)

        q, k, v = uniform(heads, asking), uniform(kv_heads, tokens), uniform(kv_heads, tokens)
        timed = []
        for name in BACKENDS:
            # Grouped heads if the backend supports them; else KV heads are repeated, outside the timed part.
            for grouped in (True, False):
                keys, values = (k, v) if grouped else (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))

                def run(keys=keys, values=values, q=q, name=name, grouped=grouped, causal=prefill):
                    with sdpa_kernel(getattr(SDPBackend, name)):
                        return attend(q, keys, values, is_causal=causal, enable_gqa=grouped)

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
                    break
                what = shape + ("" if grouped else " KV repeated")
                timed.append((name, what, run, []))
                try:
                    slots = [over_page_groups(torch, x) for x in (keys, values)]
                    same = torch.equal(run(*slots), out)
                except (OSError, RuntimeError) as error:
                    print(f"{name} over page groups: {str(error).splitlines()[0]}", file=sys.stderr)
                    break
                if not same and (why := wrong(torch, run(*slots), q, k, v)):
                    print(f"{name} over page groups: WRONG: {why}", file=sys.stderr)
                    all_right = False
                else:
                    if not same:  # another layout may select another kernel of the library
                        print(f"{name} over page groups: correct, but not bit-identical", file=sys.stderr)
                    timed.append((name, what + " over page groups", lambda run=run, slots=slots: run(*slots), []))
                break
        for run_number in range(options.rounds + 2):  # the first two rounds warm up
            for name, _, run, times in timed:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                if run_number >= 2:
                    times.append(begin.elapsed_time(end))
        flops = 4 * n_seqs * heads * dim * (tokens * (tokens + 1) / 2 if prefill else tokens)
        for name, what, _, times in timed:
            ms = sorted(times)[len(times) // 2]
            print(f"sdpa,{name},{what},{ms:.4f},{1e-9 * flops / ms:.1f},{versions}")
            ran += 1
    sys.exit(0 if all_right and ran else 1)


if __name__ == "__main__":
    main()
