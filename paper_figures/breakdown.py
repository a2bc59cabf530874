"""Where one long request's time goes, stacked: prompts of 8K to 128K, nothing known and 95 % in another instance's memory."""
import style

table = style.result("breakdown")
figure, panels = style.plt.subplots(1, 3, figsize=(13, 3.6))
parts = [("schedule_s", "schedule"), ("fetch_s", "prefix's transfer"), ("prefill_s", "prefill"), ("exposed_s", "KV to D, waited for"), ("decode_s", "127 tokens")]
prompts = sorted(map(int, table.distinct("prompt")))
for panel, gbps in zip(panels, (800., 200., 100.)):
    for at, prompt in enumerate(prompts):
        for side, known in enumerate((0., .95)):
            below = 0
            for fill, (column, label) in zip(style.FILLS, parts):
                seconds = table(column, prompt=prompt, known=known, gbps=gbps)
                panel.bar(at + .42 * side, seconds, bottom=below, width=.4, label=label if at + side == 0 else None, **fill)
                below += seconds
    panel.set_xticks([at + .21 for at in range(len(prompts))], [f"{prompt // 1024}K" for prompt in prompts])
    panel.set_title(f"{gbps:.0f} Gb/s; left nothing known, right 95 %", fontsize=9)
    panel.set_ylabel("s")
panels[0].legend(fontsize=7)
style.save(figure, "breakdown", table)
