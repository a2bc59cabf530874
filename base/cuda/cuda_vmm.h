// The driver's calls for virtual memory (CUDA driver API, "Virtual Memory Management"), one function each, of card 0:
// addresses, physical memory, and mappings between them. base/device/page_groups_cuda.cu makes page groups of them, and
// memory for other processes; experiments/gpu/vmm.cu times them. base/cuda/cuda_driver.cu asks the driver,
// tests/simt/vmm_simt.cc keeps the same rules on the CPU.
//
// All sizes, and the addresses of maps, are multiples of granularity(). Every call returns the driver's code, 0 for
// success. None waits for the card: nothing that may still run uses what is unmapped. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/cuda/cuda.h"

namespace xpyd::cuda::vmm {

using Address = uint64_t;
using Handle = uint64_t;  // of physical memory
// Codes that the program acts upon.
constexpr int kOutOfMemory = 2;
// The driver could not do it while the card was busy; seen of cuMemSetAccess under load.
constexpr int kNotReady = 600;

Status available();    // error: the driver or the card has no such calls
size_t granularity();  // bytes; 2 MiB on every card so far. Before: available()

int address_reserve(Address* address, size_t bytes);
int address_free(Address address,
                 size_t bytes);  // exactly what was reserved; nothing is mapped there
// file: export_file() can give it to other processes. Before: exports_files()
enum class Export { none, file };
int create(Handle* handle, size_t bytes, Export to = Export::none);
// The memory is freed when it is not mapped any more either, and no file stands for it.
int release(Handle handle);
// All of it, where nothing is. Not to be touched before set_access(). It may be mapped elsewhere, too.
int map(Address address, size_t bytes, Handle handle);
int set_access(Address address, size_t bytes);  // of whole mappings: read and write
int unmap(Address address, size_t bytes);       // whole mappings, without a gap

Status exports_files();                     // error: this card's memory cannot be exported by file descriptor
int export_file(int* file, Handle handle);  // a new descriptor, the caller's to close
int import_file(Handle* handle, int file);  // of the same physical memory, all of it
std::string card_identity();                // "GPU-…", as nvidia-smi -L says it

// Memory of the card, of either kind, as a dma-buf for network cards; whole pages of 4 KiB. Code
// 801 (not supported) where the driver has no such call.
int export_dma_buf(int* file, Address address, size_t bytes);

std::string code_name(int code);
void wait_for_card();  // until everything on every stream is done

}  // namespace xpyd::cuda::vmm
