# Runs in the virtual machine. First come requests whose KV crosses by rdma. Then the transport runs beside the programs
# of perftest, in turn, so that what slows one down slows the other (medians of rounds; under emulation only the ratios
# mean anything). Last come the tests that need an RDMA device.
rounds=${RDMA_VM_ROUNDS:-1}
failed() { echo "FAILED: $*"; exit 1; }

# A request's text, and its logits where they are in this process, equal those over `local`. (Under emulation a process
# may be silent for longer than 3 s, which is a lease elsewhere.)
prompt="The key of box 17 is amber. The owner of house 3 is Grace. The key of box 3 is jade. The key of box 17 is"
ask() { xpyd generate --prompt "$prompt" --max-tokens 24 --temperature 0 --topology 1P1D "$@" 2>/tmp/log; }
hash_of() { sed -n 's/^logits hash //p' /tmp/log; }
ask --transport local >/tmp/expected || { cat /tmp/log; failed "a request without a wire"; }
expected=$(hash_of)
echo "1P1D, local: $(tr '\n' ' ' </tmp/expected)"
for options in "" "--stream-kv request" "--prefill-tp 2" "--prefill-tp 2 --decode-pp 2" \
  "--disagg decode_first" "--processes --lease 30" "--processes --lease 30 --prefill-tp 2"; do
  ask --transport rdma $options >/tmp/answer || { cat /tmp/log; failed "1P1D over rdma $options"; }
  cmp /tmp/expected /tmp/answer || failed "1P1D over rdma $options: another text than local's"
  case $options in
    --processes*) ;;
    *) [ "$(hash_of)" = "$expected" ] || failed "1P1D over rdma $options: other logits" ;;
  esac
  echo "1P1D over rdma ${options:---stream-kv layer}: the same"
done

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
row() {  # name, unit, goal: medians of /tmp/ours and /tmp/theirs
  awk -v name="$1" -v unit="$2" -v goal="$3" -v o="$(median /tmp/ours)" -v t="$(median /tmp/theirs)" \
    'BEGIN {printf "%-38s ours %9.2f %s, perftest %9.2f %s, ratio %.3f%s\n", name, o, unit, t, unit, o / t, goal}'
}
compare() {  # ours, perftest's arguments, its column, that of the least (0: no latency), row's words
  ours=$1 theirs=$2 column=$3 least=$4 && shift 4
  rm -f /tmp/ours* /tmp/theirs*
  for i in $(seq "$rounds"); do
    peer $theirs >/tmp/line
    awk -v c="$column" '{print $c}' /tmp/line >>/tmp/theirs
    xpyd_rdma_speed "$ours" rxe0 >/tmp/own || failed "xpyd_rdma_speed $ours"
    awk '{print $1}' /tmp/own >>/tmp/ours
    awk -v c="$least" '{print $c}' /tmp/line >>/tmp/theirs.least
    awk '{print $2}' /tmp/own >>/tmp/ours.least
  done
  row "$@"
  [ "$least" = 0 ] && return
  mv /tmp/ours.least /tmp/ours && mv /tmp/theirs.least /tmp/theirs
  row "  the least of each round" "$2" ""
}
if [ "$rounds" -gt 0 ]; then
  compare write_bw "ib_write_bw -s 65536 -n 1536" 4 0 "write, blocks of 64 KiB" MiB/s " (goal: at least 0.95)"
  compare read_bw "ib_read_bw -s 65536 -n 1536" 4 0 "read, blocks of 64 KiB, and notices" MiB/s ""
  compare write_lat "ib_write_lat -s 8 -n 1000" 5 3 "write of 8 bytes until arrived()" us " (goal: at most 1.1)"
  compare read_lat "ib_read_lat -s 8 -n 1000" 5 3 "read of 8 bytes and its notice" us ""
fi
# Sizes, KV by layer, chunk and request, one and two NICs. Small ones are a test; RDMA_VM_EXPERIMENT=full gives the
# figures.
size=--tiny && [ "${RDMA_VM_EXPERIMENT:-}" = full ] && size=
for experiment in rdma rdma/kv; do
  xpyd_experiments points $experiment $size | sed 's/^\[//; s/\]$//; s/},{/}\n{/g' >/tmp/points
  xpyd_experiments run $experiment $size </tmp/points >/tmp/rows || { cat /tmp/rows; failed "experiment $experiment"; }
  echo "experiment $experiment:" && cat /tmp/rows
done
XPYD_WIRE=rdma xpyd_tests "transports:*,[rdma]" -d yes || failed "tests"

# Workers are killed and stopped while KV crosses. Under emulation instances are silent for longer than half a second,
# which is a lease elsewhere, and nothing would ever end.
export XPYD_BIN=/bin/xpyd WIRE=rdma LEASE=4 SECONDS_OF_CHAOS=${RDMA_VM_CHAOS_S:-20}
[ "$SECONDS_OF_CHAOS" = 0 ] || xpyd_tests '[process-chaos]' -d yes || failed "process chaos"
