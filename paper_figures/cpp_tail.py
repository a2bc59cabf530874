"""The KV that is still on the wire when a prompt's last chunk leaves the last stage, by grain, rate, chunks and window."""
import style

table = style.result("cpp_tail")
figure, panels = style.plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
rates = sorted(map(float, table.distinct("gbps")))
grains = table.distinct("grain")
for panel, (chunks, queued) in zip(panels, (("8K", 1), ("equal time", 1), ("8K", 8))):
    for number, grain in enumerate(grains):
        for window, more in (("none", {}), *((("P", {"alpha": .35}),) if queued > 1 else ())):
            curve = table.curve("gbps", "last_tail_ms", grain=grain, chunks=chunks, queued=queued, window=window)
            style.line(panel, curve, number, f"by {grain}" if window == "none" else None, **more)
    style.powers(panel, rates)
    panel.set_title(f"{'one prompt' if queued == 1 else 'last of eight (pale: W = P)'}, "
                    f"{'chunks of 8K' if chunks == '8K' else 'equal-time chunks'}", fontsize=9)
    panel.set_xlabel("Gb/s of a stage's NIC")
    panel.legend(fontsize=7)
style.plain_log(panels[0])
panels[0].set_ylabel("exposed, ms (Llama-3-70B, P = 8, 128K)")
style.save(figure, "cpp_tail", table)
