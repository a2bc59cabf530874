# The stages of `make check`, in the order in which they run. CI runs some of them (.ci/run).
# `make check STAGE=asan` runs one and shows its output; `make check STAGE='asan tsan'` runs several. Each stage is a target
# check-NAME. The text after its ## has three fields: minutes | needs | what it does. `minutes` is the expected time after `make test`,
# on two cores on which `make test` takes what its own row says; tools/check scales it to the machine. `needs` is a shell command that
# succeeds if the stage can run here ("-": no condition); if it fails, the stage is left out and named.
# Lines `N passed, N failed, N skipped` in the output are added up as the stage's count. A stage without such a line counts as one test.
TESTS_OF = $(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests $(BIN) $(FAULTS_LIB) && XPYD_BIN=$(BIN) XPYD_FAULTS=$(FAULTS_LIB)

check-test: test  ## 8 | - | every test of `make test`

check-cuda: cuda  ## 6 | ls /usr/local/cuda/bin/nvcc | compiles everything for sm_80 and sm_90a, reports registers and spills, and lints the machine code

check-chaos: build  ## 5 | - | the cluster under seeded faults and a virtual clock (SEEDS=2000, or SEED=77 for that one)
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests
	@tools/chaos $(BUILD)/xpyd_tests $(SEEDS)

MINUTES ?= 20
check-storm: build  ## 20 | - | storms of requests against servers with little memory; every answer is compared (MINUTES=20, SEED=1)
	@$(PYTHON) tests/storm/storm.py $(BIN) --minutes $(MINUTES) --seed $(or $(SEED),1)

check-parity: build  ## 3 | - | compares the logits hash of SEEDS=2000 random setups over all switches
	@$(TESTS_OF) SEEDS=$(SEEDS) $(BUILD)/xpyd_tests '[all-waves]'

check-points: build  ## 3 | - | every point of every experiment at a small size; the runner, result files and claims; the benchmarks compile; line counts in pages
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_bench
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[experiments][slow]'
	@tools/readme-lines --check

check-pages: build  ## 3 | - | the links of every Markdown page; its commands, run or looked up
	@tools/install-packages curl procps
	@tools/check-pages $(BIN)

check-slow: build  ## 3 | - | tests that wait: supervision, kept services, killed workers, soak, measured peaks
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[slow]~[experiments]'

check-emulated: build  ## 1 | - | the AVX-512 kernels, emulated
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[emulated]'

check-process-chaos: build  ## 8 | - | kill -9 and SIGSTOP of random worker processes under load (CHAOS_SECONDS=100 for each transport; rdma's run is in the stage rdma)
	@$(TESTS_OF) SECONDS_OF_CHAOS=$(or $(CHAOS_SECONDS),100) $(BUILD)/xpyd_tests '[process-chaos]'

# CuTe's headers (CUTLASS on PyPI) and the CUDA headers that they include. They are fetched into build/ and never committed.
CUTLASS  = build/cutlass/cutlass_library/source/include
CUTE_INC = -isystem $(CUTLASS) -isystem $(CUDA_HOME)/include -isystem $(CUDA_HOME)/include/cccl
check-cute: deps  ## 2 | ls /usr/local/cuda/include/cccl | CuTe's layouts as the oracle for descriptors, swizzles and fragments
	@[ -d $(CUTLASS)/cute ] || { mkdir -p build/cutlass && $(PYTHON) -m pip download -q --no-deps -d build/cutlass nvidia-cutlass==4.2.0.0 && $(PYTHON) -m zipfile -e build/cutlass/*.whl build/cutlass; } || true
	@if [ -d $(CUTLASS)/cute ] && [ -d "$(CUDA_HOME)/include/cccl" ]; then $(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_cute_tests && $(BUILD)/xpyd_cute_tests '[cute]'; \
	else echo "cute: skipped: no CUTLASS from PyPI, or no headers of CUDA 13"; fi

check-asan:  ## 20 | - | the tests under AddressSanitizer and UBSan
	@$(MAKE) --no-print-directory test MODE=asan

check-tsan:  ## 30 | - | the tests under ThreadSanitizer, except those of kernels and their interpreter
	@$(MAKE) --no-print-directory test MODE=tsan TESTS='$(or $(TESTS),~[attention]~[gemm]~[quantised]~[simt]~[cuda]~[.])'

check-odr: deps  ## 6 | - | links all objects of the tests with -flto -Wodr, which finds two types with one name in different files
	@$(MAKE) --no-print-directory -j$$(nproc) MODE=odr build/odr/all.o

FUZZ_SECONDS ?= 180
FUZZ         ?= $(patsubst tests/fuzz/fuzz_%.cc,%,$(wildcard tests/fuzz/fuzz_*.cc))
check-fuzz: deps  ## 14 | - | every libFuzzer target (FUZZ='tokenizer' selects some, FUZZ_SECONDS=180)
	@tools/install-packages clang
	@$(MAKE) --no-print-directory -j$$(nproc) MODE=fuzz CXX=clang++ $(FUZZ:%=build/fuzz/fuzz_%)
	@tools/run-fuzzers build/fuzz $(FUZZ_SECONDS) $(FUZZ)

FAULTS ?= one-process processes worker
check-faults: build  ## 22 | - | makes every C library call of a start, a request and a shutdown fail once (FAULTS='worker' selects some, EVERY=20: every twentieth call)
	@$(TESTS_OF) FAULTS="$(FAULTS)" EVERY="$(EVERY)" $(BUILD)/xpyd_tests '[all-faults]'

check-faults-tcp: FAULTS = processes-tcp
check-faults-tcp: check-faults  ## 10 | - | the same for processes that communicate over TCP

check-planted: build  ## 8 | - | plants 32 faults one after another; a test must detect each (PLANTED='3 7' selects some)
	@tests/planted_faults/run $(PLANTED)

check-debian13:  ## 22 | tools/debian13 --can | `make serve` and `make test` on a fresh Debian 13 in build/debian13 (debootstrap, chroot)
	@tools/debian13

# The rooms with code that differs on Arm are tested. The whole server only answers one question.
AARCH64_ROOMS ?= base allocator attention model
AARCH64        = $(MAKE) --no-print-directory -j$$(nproc) CXX=aarch64-linux-gnu-g++ BUILD=build/aarch64 SYSROOT=build/aarch64/sysroot
AARCH64_LIBS   = nettle-dev libutf8proc-dev libpcre2-dev libibverbs-dev libibverbs1 libnl-3-200 libnl-route-3-200 libzmq3-dev libmsgpack-cxx-dev \
                 $(shell apt-cache depends libboost-program-options-dev libboost-context-dev | sed -nE 's/.*Depends: (libboost-.*-dev)$$/\1/p')
QEMU_AARCH64   = qemu-aarch64-static -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=build/aarch64/sysroot/usr/lib/aarch64-linux-gnu:build/aarch64/sysroot/lib/aarch64-linux-gnu
check-aarch64: deps  ## 15 | - | the portable kernels on Arm: Debian's cross compiler, then a small suite and one answer under qemu-user
	@tools/install-packages g++-aarch64-linux-gnu qemu-user-static
	@for p in $(AARCH64_LIBS); do tools/fetch-package $$p build/aarch64/sysroot arm64 || exit 1; done
	@$(AARCH64) build/aarch64/xpyd
	@$(AARCH64) ROOMS="$(AARCH64_ROOMS)" SIMT= LIB=build/aarch64/librooms.a build/aarch64/xpyd_tests
	@$(QEMU_AARCH64) build/aarch64/xpyd generate --prompt 'The key of box 17 is amber. The key of box 17 is' --max-tokens 4 2>/dev/null | grep -q amber
	@$(QEMU_AARCH64) build/aarch64/xpyd_tests $(or $(TESTS),'[base]~[peak]$(comma)[attention]$(comma)[model]')

check-compilers:  ## 35 | tools/debian13 --can | `make serve` and `make test` compiled with clang, here and on Debian 13 (g++ 14 is in debian13)
	@tools/install-packages clang
	@tools/two-commands CXX=clang++ BUILD=build/clang
	@tools/debian13 bash -c 'tools/install-packages clang && tools/two-commands CXX=clang++ BUILD=build/clang'

check-dockerfile:  ## 8 | tools/debian13 --can | runs the commands of Dockerfile in a chroot
	@tools/check-dockerfile

check-clients: build  ## 8 | tests/clients/run --can | the openai Python package and other clients against a running server (in a venv under build/)
	@tools/install-packages python3-venv
	@tests/clients/run $(BIN)

check-etcd: build  ## 4 | apt-cache show etcd-server | cluster membership with Debian's etcd-server (unpacked into build/etcd, not installed)
	@tools/fetch-package etcd-server build/etcd
	@$(TESTS_OF) $(BUILD)/xpyd_tests '[etcd]'

check-netns: build  ## 6 | tests/netns/run --can | four hosts as network namespaces under load; hosts, links, connections to etcd and conductors fail (root; ARGS='--rounds 3')
	@tools/install-packages iproute2 python3
	@tools/fetch-package etcd-server build/etcd
	@PATH=$(CURDIR)/build/etcd/usr/bin:$$PATH tests/netns/run $(BIN) $(ARGS)

check-deploy: build  ## 1 | - | checks the units and files of server/deploy
	@tools/check-deploy $(BIN)

RDMA_VM = tests/rdma_vm/run build/rdma_vm tests/rdma_vm/tests.sh
check-rdma: build  ## 14 | apt-cache show linux-image-amd64 | the rdma transport in a small virtual machine with Soft-RoCE: requests, tests, and speed beside perftest's
	@tools/install-packages qemu-system-x86 busybox-static cpio kmod iproute2 perftest ibverbs-providers
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests $(BUILD)/xpyd_experiments
	@$(RDMA_VM) $(BIN) $(BUILD)/xpyd_tests $(BUILD)/xpyd_experiments ib_write_bw ib_write_lat

.PHONY: $(shell sed -nE 's/^(check-[a-z0-9-]+):.*##.*/\1/p' tools/check.mk)
