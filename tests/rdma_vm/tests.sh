# Runs in the virtual machine. First come requests whose KV crosses by rdma. Then come the experiments, of which one runs
# beside the programs of perftest (under emulation only the ratios mean anything). Last come the tests that need an RDMA
# device.
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

# Sizes beside perftest, KV by layer, chunk and request, one and two NICs. Small ones are a test; RDMA_VM_EXPERIMENT=full
# gives the figures.
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
