# In the virtual machine: our wire beside the programs of perftest, in turn, so that what slows one down
# slows the other (medians of rounds; only the ratios mean anything under emulation); then the tests
# that need an RDMA device.
rounds=${RDMA_VM_ROUNDS:-3}
peer() {  # program, arguments: its line of numbers
  program=$1 && shift
  "$program" -d rxe0 -x 1 "$@" >/tmp/server 2>&1 &
  for i in $(seq 300); do
    "$program" -d rxe0 -x 1 "$@" 127.0.0.1 >/tmp/client 2>&1 && break
    sleep 0.1
  done
  wait
  grep -E '^ *[0-9]+ +[0-9]+ ' /tmp/client | tail -n 1
}
median() { sort -n "$1" | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }
compare() {  # name, unit, goal
  awk -v name="$1" -v unit="$2" -v goal="$3" -v ours="$(median /tmp/ours)" -v theirs="$(median /tmp/theirs)" \
    'BEGIN {printf "%-34s ours %9.2f %s, perftest %9.2f %s, ratio %.3f%s\n", name, ours, unit, theirs, unit, ours / theirs, goal}'
  rm -f /tmp/ours /tmp/theirs
}
for i in $(seq "$rounds"); do
  peer ib_write_bw -s 65536 -n 1536 | awk '{print $4}' >>/tmp/theirs
  xpyd_rdma_speed write_bw rxe0 >>/tmp/ours || exit 1
done
compare "write, blocks of 64 KiB" MiB/s " (goal: at least 0.95)"
for i in $(seq "$rounds"); do
  peer ib_write_lat -s 8 -n 2000 | awk '{print $5}' >>/tmp/theirs
  xpyd_rdma_speed write_lat rxe0 >>/tmp/ours || exit 1
done
compare "write of 8 bytes until arrived()" us " (goal: at most 1.1)"
for i in $(seq "$rounds"); do
  peer ib_read_lat -s 8 -n 2000 | awk '{print $5}' >>/tmp/theirs
  xpyd_rdma_speed read_lat rxe0 >>/tmp/ours || exit 1
done
compare "read of 8 bytes and its notice" us ""
# A request whose KV crosses by rdma says what it says without a wire (where `xpyd` came along).
if command -v xpyd >/dev/null; then
  ask() { xpyd generate --topology 1P1D --prompt "the keys are" --max-tokens 24 --temperature 0 "$@" 2>/tmp/ask; }
  ask --transport local >/tmp/local && ask --transport rdma >/tmp/rdma && cmp /tmp/local /tmp/rdma || { cat /tmp/ask; exit 1; }
  echo "1P1D over rdma: the text is that of local"
fi
XPYD_WIRE=rdma xpyd_tests "transports:*,[rdma]" -d yes
