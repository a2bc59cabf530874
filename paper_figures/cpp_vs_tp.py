"""A pipeline of P cards against tensor parallelism over the same P cards: TTFT and throughput."""
import style

table = style.result("cpp_vs_tp")
figure, panels = style.plt.subplots(1, 4, figsize=(15, 3.7))
lengths = sorted(map(int, table.distinct("tokens")))
words = [f"{n // 1024}K" for n in lengths]
WAYS = [("equal time", "nvlink"), ("8K", "nvlink"), ("equal time", "nic"), ("8K", "nic")]
for number, (chunks, link) in enumerate(WAYS):
    for reused, more in ((0., {}), (.9, {"alpha": .35})):
        curve = table.curve("tokens", f"{link}_ttft", stages=8, queued=1, chunks=chunks, window="none", reused=reused)
        style.line(panels[0], curve, number, f"{chunks}, TP over {link}" if reused == 0 else None, **more)
panels[0].set_ylabel("TTFT of one prompt, CPP / TP, P = 8")
panels[0].set_xlabel("tokens (pale: 90 % reused)")
for number, queued in enumerate((1, 8, 32)):
    where = dict(stages=8, queued=queued, chunks="8K", window="none", reused=0.)
    style.line(panels[1], table.curve("tokens", "nvlink_rate", **where), number, f"{queued} queued, NVLink")
    style.line(panels[1], table.curve("tokens", "nic_rate", **where), number, None, alpha=.35)
panels[1].set_ylabel("tokens/s, CPP / TP, chunks of 8K")
panels[1].set_xlabel("tokens (pale: TP over NICs)")
for number, window in enumerate(("P", "2P", "none")):
    for chunks, more in (("8K", {}), ("equal time", {"alpha": .35})):
        curve = table.curve("tokens", "tokens_per_s", stages=8, queued=32, chunks=chunks, window=window, reused=0.)
        style.line(panels[2], curve, number, f"window {window}" if chunks == "8K" else None, **more)
panels[2].set_ylabel("tokens/s, 32 queued, chunks of 8K")
panels[2].set_xlabel("tokens (pale: equal time)")
for number, stages in enumerate((2, 4, 8)):
    where = dict(stages=stages, queued=1, chunks="equal time", window="none", reused=0.)
    style.line(panels[3], table.curve("tokens", "ttft_s", **where), number, f"P = {stages}")
panels[3].set_ylabel("TTFT, s, one cold prompt, equal time")
for panel in panels:
    style.powers(panel, lengths, words)
    style.plain_log(panel)
    panel.legend(fontsize=6.5)
panels[0].set_ylim(top=25)
panels[1].set_ylim(bottom=.06)
for panel in panels[:2]:
    panel.axhline(1, color="black", linewidth=.8)
style.save(figure, "cpp_vs_tp", table, scene="up to 8 H200, Llama-3-70B")
