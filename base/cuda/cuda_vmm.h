// The driver's calls for virtual memory (CUDA driver API, "Virtual Memory Management") on card 0, one function each:
// addresses, physical memory, and mappings between them. base/device/page_groups_cuda.cu makes page groups of them;
// experiments/gpu/vmm.cu times them. base/cuda/cuda_driver.cu calls the driver;
// tests/simt/vmm_simt.cc keeps the same rules on the CPU.
//
// All sizes, and the addresses of mappings, are multiples of granularity(). Every call returns the driver's code, 0 for
// success. None waits for the card, so no running work may use what is unmapped. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/cuda/cuda.h"

namespace xpyd::cuda::vmm {

using Address = uint64_t;
using Handle = uint64_t;  // of physical memory
// Codes on which the program acts.
constexpr int kOutOfMemory = 2;
// The driver could not do it while the card was busy; observed for cuMemSetAccess under load.
constexpr int kNotReady = 600;

Status available();    // error: the driver or the card has no such calls
size_t granularity();  // bytes; 2 MiB on every card so far. Requires available()

int address_reserve(Address* address, size_t bytes);
int address_free(Address address,
                 size_t bytes);  // exactly what was reserved, with nothing mapped
int create(Handle* handle, size_t bytes);
// The memory is freed when it is also not mapped any more.
int release(Handle handle);
// Maps all of `handle` to unmapped addresses. They must not be accessed before set_access(). The handle may also be
// mapped elsewhere.
int map(Address address, size_t bytes, Handle handle);
int set_access(Address address, size_t bytes);  // whole mappings, for reading and writing
int unmap(Address address, size_t bytes);       // whole mappings without a gap

// Exports memory of the card, of either kind, as a dma-buf for network cards, in whole pages of 4 KiB. Code 801 (not
// supported) if the driver has no such call.
int export_dma_buf(int* file, Address address, size_t bytes);

std::string code_name(int code);
void wait_for_card();  // blocks until everything on every stream is done

}  // namespace xpyd::cuda::vmm
