"""Products and copies against the SMs they are given, alone and beside another phase."""
import style

table = style.result("sm_curves-cuda")
figure, panels = style.plt.subplots(1, 2, figsize=(8.4, 3.4))
for panel, (what, unit) in zip(panels, (("gemm", "TFLOP/s"), ("copy", "TB/s"))):
    for number, beside in enumerate(table.distinct("beside")):
        curve = [(x, *(1e-3 * v for v in rest)) for x, *rest in table.curve("sms_given", "rate", what=what,
                                                                             beside=beside)]
        style.line(panel, curve, number, f"beside {beside}")
    panel.set_xlabel("SMs")
    panel.set_ylabel(unit)
    panel.set_title("products, 4096^3" if what == "gemm" else "copy, bytes read and written", fontsize=8)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)
style.save(figure, "sm_curves", table)
