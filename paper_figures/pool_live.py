"""The pool live, at another scale: TTFT by the wire's rate, by the share that is known; hits; what telling of it costs."""
import style

from claims import on_pool

table = style.result("pool_live")
figure, panels = style.plt.subplots(1, 4, figsize=(15, 3.6))
rates = (.25, .6, 2, 8)
for number, policy in enumerate(("always", "cost")):
    for at, x in enumerate(rates):
        style.bar(panels[0], at + .4 * number, table, lambda t: on_pool(t, "rate", "fetched", x, policy) / on_pool(t, "rate", "computed", x, policy),
                  width=.38, label=None if at else policy, **style.FILLS[number])
panels[0].axhline(1, color="black", linestyle=":", linewidth=1)
panels[0].set_xticks([at + .2 for at in range(len(rates))], [f"{x:g}" for x in rates])
panels[0].set_xlabel("the wire, in rates of computing")
panels[0].set_ylabel("TTFT asked there / computed")
for number, (arm, label) in enumerate((("none", "nothing known"), ("pool", "pool"), ("device", "own cache"))):
    style.line(panels[1], table.curve("x", "ms", part="shares", arm=arm), number, label)
panels[1].set_xlabel("share of the prompt that is known")
panels[1].set_ylabel("TTFT, ms")
for at, arm in enumerate(("random", "local", "global")):
    style.bar(panels[2], at, table, lambda t: on_pool(t, "caches", arm, 0, column="hit_share"), width=.6, **style.FILLS[at])
panels[2].set_xticks(range(3), ["at random", "each its own", "one for all"])
panels[2].set_ylabel("hits, three instances")
sizes = sorted(map(float, table.distinct("x", part="swap_out")))
for number, cache in enumerate(("on", "off")):
    for at, x in enumerate(sizes):
        style.bar(panels[3], at + .4 * number, table, lambda t: on_pool(t, "swap_out", "without", x, cache) / on_pool(t, "swap_out", "with", x, cache),
                  width=.38, label=None if at else f"prefix cache {cache}", **style.FILLS[number])
panels[3].set_xticks([at + .2 for at in range(len(sizes))], [f"{x:g}" for x in sizes])
panels[3].set_xlabel("chunk, tokens")
panels[3].set_ylabel("prompts/s, with tiers / without")
for panel in (panels[0], panels[1], panels[3]):
    panel.legend(fontsize=7)
style.save(figure, "pool_live", table)
