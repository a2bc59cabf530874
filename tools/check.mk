# The stages of `make check`, in the order in which they run (CI runs some of them: .ci/run).
# `make check STAGE=asan` runs one and shows it, `make check STAGE='asan tsan'` several. One target each, check-NAME, and behind its ##:
# minutes | needs | what it does. minutes: expected behind `make test`, on two cores on which that takes what its row says;
# tools/check scales them. needs: a shell command that succeeds where the stage can run at all ("-": nothing); elsewhere it is left out, by name.
# Lines `N passed, N failed, N skipped` that a command prints are its count; one that prints none counts as one.
TESTS_OF = $(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests $(BIN) $(FAULTS_LIB) && XPYD_BIN=$(BIN) XPYD_FAULTS=$(FAULTS_LIB)

check-test: test  ## 8 | - | every test of `make test`

check-cuda: cuda  ## 6 | ls /usr/local/cuda/bin/nvcc | everything for sm_80 and sm_90a, registers, spills, and a lint of the machine code

check-chaos: build  ## 5 | - | the cluster under seeded faults and a virtual clock (SEEDS=2000, or SEED=77 alone)
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests
	@tools/chaos $(BUILD)/xpyd_tests $(SEEDS)

MINUTES ?= 20
check-storm: build  ## 20 | - | storms of requests against servers with little memory, every answer compared (MINUTES=20, SEED=1)
	@$(PYTHON) tests/storm/storm.py $(BIN) --minutes $(MINUTES) --seed $(or $(SEED),1)

check-parity: build  ## 3 | - | one logits hash over SEEDS=2000 setups drawn from all switches, and over the product of eight of them
	@$(TESTS_OF) SEEDS=$(SEEDS) $(BUILD)/xpyd_tests '[all-waves],[all-parity]'

check-points: build  ## 1 | - | every point of every experiment, small; the runner, result files and claims; the line counts in pages
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[experiments][slow]'
	@tools/readme-lines --check

check-slow: build  ## 3 | - | tests that wait: supervision, kept services, killed workers, soak, measured peaks
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[slow]~[experiments]'

check-emulated: build  ## 1 | - | kernels for AVX-512, emulated
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[emulated]'

check-process-chaos: build  ## 8 | - | kill -9 and SIGSTOP of random worker processes under load (CHAOS_SECONDS=100, each wire; rdma's is in the stage rdma)
	@$(TESTS_OF) SECONDS_OF_CHAOS=$(or $(CHAOS_SECONDS),100) $(BUILD)/xpyd_tests '[process-chaos]'

# CuTe's headers (CUTLASS on PyPI) and what they include of CUDA's; fetched into build/, never kept.
CUTLASS  = build/cutlass/cutlass_library/source/include
CUTE_INC = -isystem $(CUTLASS) -isystem $(CUDA_HOME)/include -isystem $(CUDA_HOME)/include/cccl
check-cute: deps  ## 2 | ls /usr/local/cuda/include/cccl | CuTe's layouts as the oracle of descriptors, swizzles and fragments
	@[ -d $(CUTLASS)/cute ] || { mkdir -p build/cutlass && $(PYTHON) -m pip download -q --no-deps -d build/cutlass nvidia-cutlass==4.2.0.0 && $(PYTHON) -m zipfile -e build/cutlass/*.whl build/cutlass; } || true
	@if [ -d $(CUTLASS)/cute ] && [ -d "$(CUDA_HOME)/include/cccl" ]; then $(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_cute_tests && $(BUILD)/xpyd_cute_tests '[cute]'; \
	else echo "cute: skipped: no CUTLASS from PyPI, or no headers of CUDA 13"; fi

check-asan:  ## 20 | - | the tests under AddressSanitizer and UBSan
	@$(MAKE) --no-print-directory test MODE=asan

check-tsan:  ## 30 | - | the tests under ThreadSanitizer, but for what computes by itself: kernels and their interpreter
	@$(MAKE) --no-print-directory test MODE=tsan TESTS='$(or $(TESTS),~[attention]~[gemm]~[quantised]~[simt]~[cuda]~[.])'

check-odr: deps  ## 6 | - | one name, one type, also across files: all that the tests are linked from, linked with -flto -Wodr
	@$(MAKE) --no-print-directory -j$$(nproc) MODE=odr build/odr/all.o

FUZZ_SECONDS ?= 180
FUZZ         ?= $(patsubst tests/fuzz/fuzz_%.cc,%,$(wildcard tests/fuzz/fuzz_*.cc))
check-fuzz: deps  ## 14 | - | every libFuzzer target (FUZZ='tokenizer' narrows, FUZZ_SECONDS=180)
	@tools/install-packages clang
	@$(MAKE) --no-print-directory -j$$(nproc) MODE=fuzz CXX=clang++ $(FUZZ:%=build/fuzz/fuzz_%)
	@tools/run-fuzzers build/fuzz $(FUZZ_SECONDS) $(FUZZ)

FAULTS ?= one-process processes worker
check-faults: build  ## 22 | - | every call of a start, a request and a shutdown fails once (FAULTS='worker' narrows, EVERY=20: a twentieth)
	@$(TESTS_OF) FAULTS="$(FAULTS)" EVERY="$(EVERY)" $(BUILD)/xpyd_tests '[all-faults]'

check-faults-tcp: FAULTS = processes-tcp
check-faults-tcp: check-faults  ## 10 | - | the same of processes over TCP

check-planted: build  ## 8 | - | 31 faults planted, one after the other: a test sees each (PLANTED='3 7' narrows)
	@tests/planted_faults/run $(PLANTED)

check-debian13:  ## 22 | tools/debian13 --can | `make serve` and `make test` on a fresh Debian 13 in build/debian13 (debootstrap, chroot)
	@tools/debian13

# The rooms in which something is compiled differently there; the server as a whole answers a question.
AARCH64_ROOMS ?= base allocator attention model
AARCH64        = $(MAKE) --no-print-directory -j$$(nproc) CXX=aarch64-linux-gnu-g++ BUILD=build/aarch64 SYSROOT=build/aarch64/sysroot
AARCH64_LIBS   = liburing-dev nettle-dev libutf8proc-dev libpcre2-dev libibverbs-dev libibverbs1 libnl-3-200 libnl-route-3-200 libzmq3-dev libmsgpack-cxx-dev libssl-dev libssl3 \
                 $(shell apt-cache depends libboost-program-options-dev libboost-context-dev | sed -nE 's/.*Depends: (libboost-.*-dev)$$/\1/p')
QEMU_AARCH64   = qemu-aarch64-static -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=build/aarch64/sysroot/usr/lib/aarch64-linux-gnu:build/aarch64/sysroot/lib/aarch64-linux-gnu
# (Flags of mappings, which [pages] reads, are made up by qemu-user.)
check-aarch64: deps  ## 15 | - | the portable kernels on Arm: Debian's cross compiler, a small suite and one answer under qemu-user
	@tools/install-packages g++-aarch64-linux-gnu qemu-user-static
	@for p in $(AARCH64_LIBS); do tools/fetch-package $$p build/aarch64/sysroot arm64 || exit 1; done
	@$(AARCH64) build/aarch64/xpyd
	@$(AARCH64) ROOMS="$(AARCH64_ROOMS)" SIMT= LIB=build/aarch64/librooms.a build/aarch64/xpyd_tests
	@$(QEMU_AARCH64) build/aarch64/xpyd generate --prompt 'The key of box 17 is amber. The key of box 17 is' --max-tokens 4 2>/dev/null | grep -q amber
	@$(QEMU_AARCH64) build/aarch64/xpyd_tests $(or $(TESTS),'[base]~[peak]~[pages]$(comma)[attention]$(comma)[model]')

check-compilers:  ## 35 | tools/debian13 --can | both commands as clang compiles them, here and on Debian 13 (g++ 14 is in debian13)
	@tools/install-packages clang
	@tools/two-commands CXX=clang++ BUILD=build/clang
	@tools/debian13 bash -c 'tools/install-packages clang && tools/two-commands CXX=clang++ BUILD=build/clang'

check-dockerfile:  ## 8 | tools/debian13 --can | what server/deploy's Dockerfile does, in a chroot
	@tools/check-dockerfile

check-clients: build  ## 8 | tests/clients/run --can | the openai Python package and others against a running server (a venv under build/)
	@tools/install-packages python3-venv
	@tests/clients/run $(BIN)

check-etcd: build  ## 4 | apt-cache show etcd-server | cluster membership by Debian's etcd-server (fetched into build/etcd, not installed)
	@tools/fetch-package etcd-server build/etcd
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[etcd]'

check-netns: build  ## 6 | tests/netns/run --can | four hosts as network namespaces, under load: hosts, links, etcd's sight and conductors fail (root; ARGS='--rounds 3')
	@tools/install-packages iproute2 python3
	@tools/fetch-package etcd-server build/etcd
	@PATH=$(CURDIR)/build/etcd/usr/bin:$$PATH tests/netns/run $(BIN) $(ARGS)

check-deploy: build  ## 1 | - | the units and files of server/deploy
	@tools/check-deploy $(BIN)

RDMA_VM = tests/rdma_vm/run build/rdma_vm tests/rdma_vm/tests.sh
check-rdma: build  ## 14 | apt-cache show linux-image-amd64 | the rdma wire in a small virtual machine with Soft-RoCE: requests, tests, and speed beside perftest's
	@tools/install-packages qemu-system-x86 busybox-static cpio kmod iproute2 perftest ibverbs-providers
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests $(BUILD)/xpyd_rdma_speed $(BUILD)/xpyd_experiments
	@$(RDMA_VM) $(BIN) $(BUILD)/xpyd_tests $(BUILD)/xpyd_rdma_speed $(BUILD)/xpyd_experiments ib_write_bw ib_read_bw ib_write_lat ib_read_lat

.PHONY: $(shell sed -nE 's/^(check-[a-z0-9-]+):.*##.*/\1/p' tools/check.mk)
