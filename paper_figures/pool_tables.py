"""wde's tables with the pool as one more place: requests a second by the share of hits, and by the length of the answer."""
import style

table = style.result("pool_tables")
figure, panels = style.plt.subplots(1, 2, figsize=(10, 3.6))
names = {"none": "nothing known", "device": "own cache", "host": "tier", "always": "pool, always", "cost": "pool, by cost"}
for number, cache in enumerate(("device", "host", "always", "cost")):
    style.line(panels[0], table.curve("hits", "requests_per_s", scene="hits", cache=cache), number, names[cache])
style.paper(panels[0], [0, 1], [20.62, 98.84], "20.62, 98.84 /s", style.known("pool_tables", "no hits, requests/s"))
panels[0].set_xlabel("share of a prompt of 1,000 tokens that is known")
for number, cache in enumerate(("device", "host", "always", "cost", "none")):
    style.line(panels[1], table.curve("output", "requests_per_s", scene="outputs", cache=cache), number, names[cache])
for at, values in ((2, (.91, 49.96, 9.23)), (16, (.84, 6.39, 4.69)), (128, (.45, .81, .78))):
    style.paper(panels[1], [at] * 3, values, "0.91 and 9.23 to 49.96 /s at 2, …", style.known("pool_tables", "documents, 2 tokens out: requests/s, tier"))
panels[1].set_yscale("log")
style.plain_log(panels[1])
style.powers(panels[1], [2, 4, 8, 16, 32, 64, 128])
panels[1].set_xlabel("tokens of the answer to 10,240 known tokens")
for panel in panels:
    panel.set_ylabel("requests/s")
    panel.legend(fontsize=7)
style.save(figure, "pool_tables", table)
