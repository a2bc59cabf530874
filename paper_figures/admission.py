"""Requests a second and preemptions under three admission rules, with caps that are known and caps of twice the output
(lightllm's Efficient Router)."""
import style

RULES = ["prompt", "peak_tokens", "longest"]
PUBLISHED = [("vLLM 0.1.2", 5.53), ("lightllm", 10.59)]

table = style.result("admission")
figure, panels = style.plt.subplots(1, 3, figsize=(11, 3.8))
columns = [("requests_per_s", "requests/s"), ("batch_mean", "sequences in a step"),
           ("recomputed_share", "tokens computed twice / tokens")]
for panel, (column, words) in zip(panels, columns):
    for number, cap in enumerate((1, 2)):
        for at, rule in enumerate(RULES):
            style.bar(panel, at + .36 * number - .18, table, lambda t: t(column, rule=rule, allocator="token", cap=cap), width=.34,
                      label=None if at else ("max_tokens as generated", "max_tokens twice that")[number], **style.FILLS[number])
    panel.set_xticks(range(3), RULES)
    panel.set_ylabel(words)
for at, (name, rate) in enumerate(PUBLISHED):
    style.paper(panels[0], at, rate, f"{name} {rate} /s", style.known("admission", "requests/s, peak_tokens / prompt"))
panels[1].legend(fontsize=7)
preemptions = table("preemptions", rule="prompt", allocator="token", cap=1)
panels[2].annotate(f"{preemptions:.0f} preemptions\nof 2,000 requests", (.55, panels[2].get_ylim()[1] * .8), fontsize=7)
style.save(figure, "admission", table, "lightllm's performance.rst: LLaMA-7B, A800-80G, ShareGPT, two whole systems")
