"""KV in 32, 16, 8 and 4 bits: tokens that fit into the same bytes, and requests a second (TurboMind's KV quantisation)."""
import style

DTYPES = ["f32", "bf16", "int8", "fp8_e4m3", "int4"]
# lmdeploy docs/en/quantization/kv_quant.md, A100: requests a second relative to fp16. The model with GQA is InternLM2-7B.
PUBLISHED = {"llama-2-7b": {"int8": 1.27, "int4": 1.39}, "llama-3-8b": {"int8": 1.05, "int4": 1.07}}

table = style.result("kv_dtype")
figure, panels = style.plt.subplots(1, 2, figsize=(7.2, 3.2))
models = table.distinct("model")
for panel, column, title in ((panels[0], "gain_over_f16", "tokens of the same bytes / bf16"),
                             (panels[1], "requests_per_s", "requests a second / bf16")):
    for number, (model, fill) in enumerate(zip(models, style.FILLS)):
        places = [i + .38 * (number - .5) for i in range(len(DTYPES))]
        for place, dtype in zip(places, DTYPES):
            style.bar(panel, place, table, lambda t: t(column, model=model, dtype=dtype) / t(column, model=model, dtype="bf16"),
                      width=.36, label=None if dtype != DTYPES[0] else model, **fill)
        if column == "requests_per_s":
            for dtype, gain in PUBLISHED[model].items():
                style.paper(panel, places[DTYPES.index(dtype)], gain, "1.27, 1.39; GQA 1.05, 1.07", style.known("kv_dtype", "requests/s, Llama-2-7B, int8"))
    panel.set_xticks(range(len(DTYPES)), DTYPES)
    panel.set_title(title, fontsize=8)
panels[0].legend(fontsize=7)
style.save(figure, "kv_dtype", table, "TurboMind on A100, Llama-2-7B and InternLM2-7B, over fp16")
