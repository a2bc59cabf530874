"""The cost of the system calls of vAttention by page-group size, and the rate at which they provide memory (vAttention Tables 3
and 9)."""
import style

CALLS = [("map_populate", "map with its pages"), ("unmap", "unmap"), ("create", "create")]
# ASPLOS'25 Table 3, us: vMemMap of 64, 128, 256 KiB; cuMemMap + cuMemSetAccess of 2 MiB.
PUBLISHED = [(64, 8), (128, 8.5), (256, 9), (2048, 40)]
GIB = 2**30 / 1e9

table = style.result("vmm_calls")
figure, (left, right) = style.plt.subplots(1, 2, figsize=(8.8, 3.6))
for number, (call, label) in enumerate(CALLS):
    column = "us_mean" if call == "create" else "us"  # one call creates all groups
    style.line(left, table.curve("group_kib", column, call=call), number, label)
style.paper(left, *zip(*PUBLISHED[:3]), "8, 8.5, 9 us", style.known("vmm_calls", "map and populate, 64 KiB"))
style.paper(left, *zip(*PUBLISHED[3:]), "40 us", style.known("vmm_calls", "map and populate, 2 MiB"))
style.plain_log(left)
left.set_ylabel("us a call")
style.line(right, table.curve("group_kib", "gbps", call="map_populate"), 0, "map with its pages")
# Table 9: 64 KiB TP-1, 2 MiB TP-2.
style.paper(right, [64, 2048], [7.6 * GIB, 70.3 * GIB], "7.6 and 70.3 GiB/s", style.known("vmm_calls", "handed out by maps of 64 KiB"))
right.axhline(.75, color="0.4", linestyle=":")
right.annotate("KV grows no faster (Fig. 4)", (4, .8), fontsize=6.5)
style.plain_log(right)
right.set_ylabel("GB/s handed out")
for panel in (left, right):
    style.powers(panel, [4, 16, 64, 256, 2048], ["4 KiB", "16", "64", "256", "2 MiB"])
    panel.set_xlabel("page group")
left.legend(fontsize=6.5)
style.save(figure, "vmm_calls", table, "vAttention (ASPLOS'25) Tables 3 and 9, Fig. 4: CUDA's driver and its extension")
